"""Training with patches on: gradients of the weights, loss curves, checkpointed gradients, optimizers' steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from train_beside_stock import BF16, FAST, FP16, FP32, RESCALE, WIDE, Course, Run, train, training_batches
from zoo import BY_NAME, KINDS, Kind

import t5fastpatch
from t5fastpatch.measure.subject import Batch, Subject, load
from t5fastpatch.patch import State

RESCALING = ("residual_rescale", "residual_fp32")
STEPS = 12
Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load(None, "cpu")


@pytest.fixture(scope="module")
def few(subject: Subject) -> list[Batch]:
    """Small batches of short sentences: fp16 is slow on a CPU."""
    return training_batches(subject, size=2, longest=8)


def gradients(model: Any, batch: dict[str, Any], *, autocast: bool = False, loss_scale: float = 1.0) -> Gradients:
    """Of the weights, in training mode, in fp32 and without the loss scale; the dropout is always the same."""
    model.train().zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = model(**batch).loss
    (loss.float() * loss_scale).backward()
    found = {name: each.grad.float() / loss_scale for name, each in model.named_parameters() if each.grad is not None}
    assert found
    return found


def patched_gradients(model: Any, batch: dict[str, Any], patch: str, scale: float, **how: Any) -> Gradients:
    with t5fastpatch.patched(model, [patch], scale=scale):
        return gradients(model, batch, **how)


def equal(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def distance(one: Gradients, other: Gradients) -> float:
    """The norm of the difference of all gradients as one vector, relative to the second."""
    difference = torch.cat([(one[name] - other[name]).flatten() for name in other])
    return float(difference.norm() / torch.cat([each.flatten() for each in other.values()]).norm())


@pytest.mark.parametrize("patch", RESCALING)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_in_fp32_weight_gradients_are_stock_s_bit_for_bit_whatever_the_scale(kind: Kind, patch: str) -> None:
    model, batch = kind.build(), kind.batch()
    stock = gradients(model, batch)
    for scale in (2.0**-2, 2.0**-8):
        assert equal(patched_gradients(model, batch, patch, scale), stock)


@pytest.mark.parametrize("patch", RESCALING)
@pytest.mark.parametrize("kind", ["t5", "t5-v1.1", "umt5"])
def test_in_bf16_weight_gradients_do_not_depend_on_the_scale_and_are_as_near_to_fp32_s_as_stock_s(
    kind: str, patch: str
) -> None:
    model = BY_NAME[kind].build()
    batch = BY_NAME[kind].batch()
    truth = gradients(model, batch)
    model.bfloat16()
    stock = gradients(model, batch)
    large, small = (patched_gradients(model, batch, patch, scale) for scale in (2.0**-2, 2.0**-8))
    assert equal(large, small)
    assert distance(large, truth) < 1.25 * distance(stock, truth)


@pytest.mark.parametrize("patch", RESCALING)
@pytest.mark.parametrize("kind", ["t5", "t5-v1.1", "umt5"])
def test_in_fp16_autocast_weight_gradients_are_as_near_to_fp32_s_as_stock_s(kind: str, patch: str) -> None:
    model, batch = BY_NAME[kind].build(), BY_NAME[kind].batch()
    truth = gradients(model, batch)
    stock = distance(gradients(model, batch, autocast=True, loss_scale=2.0**8), truth)
    for scale in (2.0**-2, 2.0**-8):
        # Gradients of the stream are 1/scale as large, so they want a loss scale that is as much smaller.
        found = patched_gradients(model, batch, patch, scale, autocast=True, loss_scale=2.0**8 * scale)
        assert distance(found, truth) < 1.25 * stock


def test_a_loss_scaler_finds_the_smaller_loss_scale_by_itself(subject: Subject, few: list[Batch]) -> None:
    stock, patched = (train(subject.fp32, Run(FP16, patches, loss_scale=2.0**16), few, 8) for patches in ((), RESCALE))
    assert stock.non_finite < patched.non_finite < 8


@pytest.fixture(scope="module")
def fp32_course(subject: Subject, few: list[Batch]) -> Course:
    return train(subject.fp32, Run(FP32), few, STEPS)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_loss_curve_is_stock_s_within_the_noise(
    subject: Subject, few: list[Batch], fp32_course: Course, dtype: torch.dtype
) -> None:
    stock, other = (train(subject.fp32, Run(dtype, seed=seed), few, STEPS) for seed in (0, 1))
    # Noise is what another dropout makes of stock's curve.
    noise = other.distance(stock)
    for patches in (FAST, WIDE):
        patched = train(subject.fp32, Run(dtype, patches), few, STEPS)
        assert patched.non_finite == 0
        assert patched.distance(stock) < 0.2 * noise
        assert patched.distance(fp32_course) < 0.2 * noise


def test_where_products_overflow_stock_makes_no_step_and_a_patched_model_learns(
    subject: Subject, few: list[Batch]
) -> None:
    stock, patched = (
        train(subject.fp32, Run(FP16, patches, loss_scale=1.0, twin=True), few, STEPS) for patches in ((), RESCALE)
    )
    assert stock.non_finite == STEPS
    assert patched.non_finite == 0
    assert patched.last(5) < patched.losses[0]


@pytest.mark.parametrize("patch", RESCALING)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_checkpointed_gradients_are_stock_s(kind: Kind, patch: str) -> None:
    model, batch = kind.build(), kind.batch()
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{kind} of this release does not checkpoint")
    model.gradient_checkpointing_enable()
    assert equal(patched_gradients(model, batch, patch, 2.0**-5), gradients(model, batch))


def test_an_optimizer_s_step_leaves_the_checks_off_until_the_model_is_patched_anew() -> None:
    model, batch = BY_NAME["t5-v1.1"].build().train(), BY_NAME["t5-v1.1"].batch()
    assert t5fastpatch.apply(model)["skip_inf_check"].state is State.ON
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e9).step()
    assert t5fastpatch.status(model)["skip_inf_check"].state is State.ON
    assert t5fastpatch.apply(model)["skip_inf_check"].state is State.UNSAFE
