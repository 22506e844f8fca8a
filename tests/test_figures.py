"""The figures the patches must reach, counted by the census."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import zoo

import t5fastpatch
from t5fastpatch.measure.census import Census, census
from t5fastpatch.measure.workloads import decoder_step, forward

PATCHES = ["skip_inf_check", "softmax_dtype", "layer_norm"]
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
# Most operations and casts of a patched decoder step in fp16 (stock: 479 and 65 on 4.57, 407 and 41 on 5.24).
MOST = {(4, 57): (200, 4), (5, 24): (150, 3)}


@pytest.fixture(scope="module")
def small_shaped() -> Any:
    """A model of t5-small's shape, in fp16 by `.half()`."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval().half()


def step(model: Any) -> Census:
    tokens = torch.randint(2, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[:, :2].contiguous()}
    return census(decoder_step(model, batch).prepare())


@pytest.mark.skipif(RELEASE not in MOST, reason="a figure is set for 4.57 and 5.24")
def test_a_patched_decoder_step_keeps_to_its_figures(small_shaped: Any) -> None:
    with t5fastpatch.patched(small_shaped, PATCHES):
        found = step(small_shaped)
    ops, casts = MOST[RELEASE]
    assert found.ops <= ops
    assert found.casts <= casts


def test_a_patched_decoder_step_waits_for_nothing_of_upstreams_checks(small_shaped: Any) -> None:
    """Stock of 4.26 waits 18 times; from 5.0 on there is one wait in building masks, which is no check."""
    with t5fastpatch.patched(small_shaped, ["skip_inf_check"]):
        found = step(small_shaped)
    assert found.syncs == (0 if RELEASE < (5, 0) else 1)
    assert not {"isinf.default", "clamp.default", "clamp.Tensor"} & set(found.by_op)


@pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
def test_fp16_patched_costs_no_more_ops_than_fp32_stock(kind: zoo.Kind) -> None:
    kind.check_dtype(torch.float16)
    model = kind.build()
    fp32 = census(forward(model, kind.batch()).prepare())
    model = model.half()
    stock = census(forward(model, kind.batch(torch.float16)).prepare())
    with t5fastpatch.patched(model, PATCHES):
        patched = census(forward(model, kind.batch(torch.float16)).prepare())
    assert stock.ops > fp32.ops
    assert patched.ops <= fp32.ops


@pytest.mark.parametrize("patch", PATCHES)
def test_each_patch_alone_saves_ops_where_it_applies(small_shaped: Any, patch: str) -> None:
    stock = step(small_shaped)
    if not t5fastpatch.status(small_shaped)[patch].sites:
        pytest.skip(f"{patch} is already upstream here")
    with t5fastpatch.patched(small_shaped, [patch]):
        patched = step(small_shaped)
    assert patched.ops < stock.ops
    assert patched.casts <= stock.casts
    if patch == "softmax_dtype":
        assert patched.casts == stock.casts - 24  # two in each of six self- and six cross-attentions
