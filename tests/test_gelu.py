"""`gelu`: PyTorch's tanh approximation in the place of upstream's written-out one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo

import t5fastpatch
from t5fastpatch.measure.census import census
from t5fastpatch.patches.gelu import activation, has_written_out_gelu

GATED = zoo.BY_NAME["t5-v1.1"]


def feed_forwards(model: Any) -> list[Any]:
    return [module for module in model.modules() if has_written_out_gelu(module)]


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
    model = zoo.BY_NAME["t5"].build()
    (row,) = t5fastpatch.apply(model, "gelu").rows
    assert row.state is t5fastpatch.State.NEEDLESS
    gated = GATED.build()
    t5fastpatch.apply(gated, "gelu")
    (feed_forward, *_) = feed_forwards(gated)
    x = torch.randn(2, 3, 32)
    feed_forward.act = torch.nn.ReLU()
    relu = copy.deepcopy(feed_forward)
    t5fastpatch.remove(gated)
    assert torch.equal(relu(x), feed_forward(x))


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
