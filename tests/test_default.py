"""`apply(model)` with no list, for every family in fp16: nothing overflows, and the result is near fp32's."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo

import t5fastpatch
from t5fastpatch import State
from t5fastpatch.headroom.scaling import SCALED
from t5fastpatch.headroom.stacks import stacks_of
from t5fastpatch.headroom.weights import bound
from t5fastpatch.install import setup_on
from t5fastpatch.rescaling import scaled_product

PROVEN = {"skip_inf_check", "residual_rescale", "residual_fp32", "wo_half"}
every_kind = pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
# UDOP's buckets and Switch's routes jump where a rounding falls the other way, in stock too.
SMOOTH = [kind for kind in zoo.KINDS if kind.family not in ("udop", "switch_transformers")]


def overflowing(kind: zoo.Kind) -> Any:
    """A model in fp16 whose feed-forwards add more than fp16 holds, by the bound from the weights."""
    model = kind.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("wo.weight"):
                parameter.mul_(2.0**13)
    return model.half()


def logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**batch)["logits"]
    return found


def states(report: Any) -> dict[str, State]:
    return {row.patch: row.state for row in report.rows if row.patch in PROVEN}


@every_kind
def test_a_model_that_could_overflow_is_rescaled_until_it_cannot(kind: zoo.Kind) -> None:
    kind.check_dtype(torch.float16)
    model = overflowing(kind)
    before = bound(model)
    report = t5fastpatch.apply(model)
    assert State.ON in (report["residual_rescale"].state, report["residual_fp32"].state)
    assert report["skip_inf_check"].state is State.ON
    scales = {stack.name: setup_on(stack.module).scaling for stack in stacks_of(model)}
    found = [each for name in scales for each in before.of(name, *SCALED)]
    assert max(each.value for each in found) > 65504
    assert max(each.under(scales[each.stack]) for each in found) <= 65504
    assert logits(model, kind.batch(torch.float16)).isfinite().all()


@pytest.mark.parametrize("kind", SMOOTH, ids=str)
def test_its_results_are_those_of_fp32(kind: zoo.Kind) -> None:
    model, batch = overflowing(kind), kind.batch(torch.float16)
    exact = copy.deepcopy(model).float()
    wide = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    t5fastpatch.apply(model)
    found = logits(model, batch).float()
    assert torch.cosine_similarity(found, logits(exact, wide), dim=-1).min() > 0.9995


@every_kind
def test_running_a_model_does_not_withdraw_its_proof(kind: zoo.Kind) -> None:
    """Switch's router puts its own classifier back at every call."""
    kind.check_dtype(torch.float16)
    model = overflowing(kind)
    t5fastpatch.apply(model)
    before = states(t5fastpatch.status(model))
    logits(model, kind.batch(torch.float16))
    assert states(t5fastpatch.status(model)) == before


def test_a_product_of_no_rows_is_one_of_no_rows() -> None:
    """As Switch's experts take it that no token is routed to."""
    assert scaled_product(torch.nn.Linear(8, 3, bias=False), torch.empty(0, 8), 0.5).shape == (0, 3)
    assert scaled_product(torch.nn.Linear(8, 3, bias=False), torch.empty(2, 0, 8), 0.5).shape == (2, 0, 3)


@pytest.mark.parametrize("first", [True, False], ids=["T5 first", "T5 last"])
def test_what_else_a_pipeline_holds_is_left_alone(first: bool) -> None:
    t5, other = overflowing(zoo.BY_NAME["t5"]), torch.nn.Linear(3, 3)
    held = {"text_encoder": t5, "vae": other} if first else {"vae": other, "text_encoder": t5}
    pipeline = SimpleNamespace(components=held)
    batch = zoo.BY_NAME["t5"].batch()
    assert t5fastpatch.apply(pipeline, batches=[batch])["residual_rescale"].state is State.ON
    assert t5fastpatch.status(pipeline)["skip_inf_check"].state is State.ON


def test_batches_that_pass_the_bound_void_it() -> None:
    model = zoo.BY_NAME["t5"].build().encoder.half()
    assert t5fastpatch.apply(model)["skip_inf_check"].state is State.ON
    t5fastpatch.remove(model)
    beyond = {"inputs_embeds": torch.full((1, 4, 32), 60000.0)}
    report = t5fastpatch.apply(model, batches=[beyond])
    assert "by the data" in report["residual_rescale"].why
    assert "by the weights" not in report["skip_inf_check"].why
    found = model(inputs_embeds=beyond["inputs_embeds"].half()).last_hidden_state
    assert found.isfinite().all()
    assert t5fastpatch.check(model, [beyond]).decisions["T5Stack"].rests_on == "data"


def test_a_wo_that_half_precision_cannot_hold_stays_in_fp32() -> None:
    kind = zoo.BY_NAME["t5"]
    model = kind.build().half()
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    with torch.no_grad():
        model.encoder.block[1].layer[-1].DenseReluDense.wo.weight[0, 0] = 7e4
    report = t5fastpatch.apply(model, batches=[kind.batch()])
    assert "wo of block 1 holds 7e+04" in report["wo_half"].why
    assert logits(model, kind.batch(torch.float16)).isfinite().all()


def test_what_was_named_is_not_called_safe_for_a_scale_that_is_off() -> None:
    model = overflowing(zoo.BY_NAME["t5"])
    t5fastpatch.apply(model, ["residual_rescale", "skip_inf_check"])
    assert "scale 2^-" in t5fastpatch.status(model)["residual_rescale"].why
    t5fastpatch.remove(model, "residual_rescale")
    row = t5fastpatch.status(model)["skip_inf_check"]
    assert row.state is State.ON
    assert "may reach" in row.why
    assert "safe" not in row.why


def test_bfloat16_needs_none_of_it() -> None:
    report = t5fastpatch.apply(zoo.BY_NAME["t5"].build().bfloat16())
    assert {report[name].state for name in ("residual_rescale", "residual_fp32", "skip_inf_check")} == {State.NEEDLESS}
