"""`gelu`: PyTorch's tanh approximation in the place of upstream's written-out one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo

import t5fastpatch
from t5fastpatch.measure.census import census, peak_live_bytes
from t5fastpatch.patches.gelu import activation, has_known_activation

GATED = zoo.BY_NAME["t5-v1.1"]


def feed_forwards(model: Any) -> list[Any]:
    return [module for module in model.modules() if has_known_activation(module)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_values_and_gradients_are_no_further_from_fp64_than_upstreams(dtype: torch.dtype) -> None:
    (feed_forward, *_) = feed_forwards(GATED.build())
    x = (2 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = []
    for function, rows in (
        (lambda rows: torch.nn.functional.gelu(rows, approximate="tanh"), x.double()),
        (feed_forward.act, x),
        (lambda rows: activation(feed_forward, rows), x),
    ):
        rows = rows.clone().requires_grad_()
        y = function(rows)
        (gradient,) = torch.autograd.grad(y.sum(), rows)
        assert y.dtype == gradient.dtype == rows.dtype
        found.append((y.detach().double(), gradient.double()))
    exact, stock, patched = found
    quantiles = torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64)
    for truth, theirs, ours in zip(exact, stock, patched):
        assert ((ours - truth).abs().quantile(quantiles) <= 1.05 * (theirs - truth).abs().quantile(quantiles)).all()


def test_the_gradient_of_a_large_half_is_a_number() -> None:
    """Upstream's cube overflows in fp16 from 41 on, and its gradient is NaN."""
    (feed_forward, *_) = feed_forwards(GATED.build().half())
    x = torch.tensor([-6e4, -50.0, 50.0, 6e4], dtype=torch.float16, requires_grad=True)
    (stock,) = torch.autograd.grad(feed_forward.act(x).float().sum(), x)
    (patched,) = torch.autograd.grad(activation(feed_forward, x).float().sum(), x)
    assert stock.isnan().any()
    assert torch.equal(patched, torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float16))


def test_seven_ops_a_feed_forward_are_gone() -> None:
    model, batch = GATED.build().half(), GATED.batch(torch.float16)
    with torch.no_grad():
        stock = census(lambda: model(**batch)).ops
        report = t5fastpatch.apply(model, "gelu")
        patched = census(lambda: model(**batch)).ops
    (row,) = report.rows
    assert stock - patched == 7 * row.modules == 7 * len(feed_forwards(model)) > 0


def test_another_activation_needs_no_patch_and_stays_itself() -> None:
    model = zoo.BY_NAME["t5"].build(feed_forward_proj="silu")
    (row,) = t5fastpatch.apply(model, "gelu").rows
    assert row.state is t5fastpatch.State.NEEDLESS
    gated = GATED.build()
    t5fastpatch.apply(gated, "gelu")
    (feed_forward, *_) = feed_forwards(gated)
    x = torch.randn(2, 3, 32)
    feed_forward.act = torch.nn.SiLU()
    silu = copy.deepcopy(feed_forward)
    t5fastpatch.remove(gated)
    with torch.no_grad():
        assert torch.equal(silu(x), feed_forward(x))


@pytest.mark.parametrize("name", ["t5", "t5-v1.1"])
def test_in_place_it_is_the_same_and_takes_less_memory(name: str) -> None:
    model = zoo.BY_NAME[name].build().half()
    (feed_forward, *_) = feed_forwards(model)
    x = torch.randn(2, 3, 32).half()
    with torch.no_grad():
        stock = peak_live_bytes(lambda: feed_forward(x))
        t5fastpatch.apply(model, "gelu")
        patched, peak = feed_forward(x), peak_live_bytes(lambda: feed_forward(x))
    slow = feed_forward(x)
    assert slow.requires_grad
    assert torch.equal(patched, slow)
    hidden, output = 2 * 2 * 3 * 64, 2 * 2 * 3 * 32
    # Of a gated one, the second half is let go of before the output is made.
    assert peak == (hidden + output if name == "t5" else 2 * hidden) < stock


@pytest.mark.parametrize("linear", ["wi_0", "wi_1"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["hook", "global hook"])
def test_what_a_hook_has_seen_is_not_changed(linear: str, everywhere: bool) -> None:
    model, seen = GATED.build(), []
    (feed_forward, *_) = feed_forwards(model)
    module = getattr(feed_forward, linear)

    def keep(hooked: Any, args: Any, output: torch.Tensor) -> None:
        if hooked is module:
            seen.append(output)

    register = torch.nn.modules.module.register_module_forward_hook if everywhere else module.register_forward_hook
    handle = register(keep)
    try:
        t5fastpatch.apply(model, "gelu")
        x = torch.randn(2, 3, 32)
        with torch.no_grad():
            feed_forward(x)
            assert torch.equal(seen[0], torch.nn.functional.linear(x, module.weight))
    finally:
        handle.remove()


def test_a_linear_that_gives_its_result_twice_is_not_changed() -> None:
    """Whoever puts another module in a linear's place may keep what it gives."""

    class Constant(torch.nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)
            self.result = torch.linspace(-1, 1, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.result

    model = GATED.build()
    (feed_forward, *_) = feed_forwards(model)
    feed_forward.wi_0 = Constant(feed_forward.wi_0.weight.detach())
    t5fastpatch.apply(model, "gelu")
    with torch.no_grad():
        first, second = (feed_forward(torch.ones(1, 1, 32)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("observe", ["hook", "forward", "autocast"])
def test_upstreams_activation_runs_where_somebody_would_notice(observe: str) -> None:
    model = GATED.build()
    t5fastpatch.apply(model, "gelu")
    (feed_forward, *_) = feed_forwards(model)
    x, seen = torch.linspace(-5, 5, 10_000), []
    upstream = feed_forward.act(x)
    assert not torch.equal(activation(feed_forward, x), upstream)
    if observe == "hook":
        feed_forward.act.register_forward_hook(lambda module, args, output: seen.append(output))
    elif observe == "forward":
        feed_forward.act.forward = lambda x: x * 0
    with torch.autocast("cpu", enabled=observe == "autocast"):
        found = activation(feed_forward, x)
    assert torch.equal(found, x * 0 if observe == "forward" else upstream)
    assert len(seen) == (observe == "hook")
