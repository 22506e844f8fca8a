"""The patches of the fast path, one by one and together: bits, gradients, caches, searches, compilers, memory."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import pickle
from typing import Any

import pytest
import torch
import transformers
import zoo
from test_contracts import (
    GENERATES,
    SMOOTH,
    distances,
    every_dtype,
    every_half,
    every_kind,
    fp64_logits,
    gradients,
    same,
)

import t5fastpatch
from t5fastpatch.measure.census import peak_live_bytes
from t5fastpatch.measure.workloads import (
    cache_keyword,
    decoder_step,
    encoder,
    encoder_forward,
    encoder_inputs,
    forward,
)
from t5fastpatch.patch import Contract
from t5fastpatch.registry import get_patch

FAST_PATH = ["gelu", "bucket_cache", "sdpa", "bias_hoist", "cross_bias_skip", "mask_sync", "fused_qkv", "fused_gate"]
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
EXACT = [name for name in FAST_PATH if get_patch(name).contract is Contract.EXACT]

all_together = pytest.mark.parametrize("patches", [EXACT, FAST_PATH, "all"], ids=["exact", "fast path", "all"])


def patch(model: Any, patches: Any) -> None:
    """Applies what has a place; a family may have none for some of the names, or for any."""
    if patches != "all":
        patches = [row.patch for row in t5fastpatch.status(model).rows if row.patch in patches and row.sites]
    if patches:
        t5fastpatch.apply(model, patches)


def applied(model: Any, patches: Any) -> Any:
    patch(model, patches)
    return model


def unrolled(model: Any, batch: dict[str, Any], chunks: tuple[int, ...]) -> list[torch.Tensor]:
    """The logits of decoder inputs given in chunks of these lengths, with a cache."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    tokens = zoo.ids(sum(chunks), 5, batch["labels"].shape[0])
    keyword = cache_keyword(model)
    logits, cache = [], {}
    with torch.no_grad():
        context = {
            "encoder_outputs": encoder(model)(**encoder_inputs(batch)),
            "attention_mask": inputs["attention_mask"],
        }
        for chunk in tokens.split(list(chunks), dim=1):
            output = model(decoder_input_ids=chunk, use_cache=True, **context, **cache)
            cache = {keyword: getattr(output, keyword)}
            logits.append(output["logits"])
    return logits


@every_kind
@every_dtype
def test_exact_patches_keep_every_bit(kind: zoo.Kind, dtype: torch.dtype) -> None:
    kind.check_dtype(dtype)
    model, batch = kind.build(dropout_rate=0.1).to(dtype), kind.batch(dtype)
    with torch.no_grad():
        stock = model(**batch)
    steps, slopes = unrolled(model, batch, (3, 1, 1, 2)), gradients(model.train(), batch)
    patch(model, EXACT)
    assert same(slopes, gradients(model, batch))
    model.eval()
    with torch.no_grad():
        assert same(stock, model(**batch))
    assert same(steps, unrolled(model, batch, (3, 1, 1, 2)))


@pytest.mark.parametrize("kind", SMOOTH, ids=str)
@every_half
def test_all_together_are_no_further_from_fp64_than_stock(kind: zoo.Kind, dtype: torch.dtype) -> None:
    kind.check_dtype(dtype)
    stock, patched = [], []
    batch = kind.batch(dtype)
    for seed in range(6):
        model = kind.build(seed).to(dtype)
        reference = fp64_logits(model, batch)
        with torch.no_grad():
            stock.append(distances(model(**batch)["logits"], reference))
            patched.append(distances(applied(model, "all")(**batch)["logits"], reference))
    for quantile in (0.5, 0.9):
        assert torch.cat(patched).quantile(quantile) <= 1.2 * torch.cat(stock).quantile(quantile)


@every_kind
def test_in_fp32_a_decoder_fed_in_chunks_agrees_with_stock(kind: zoo.Kind) -> None:
    model, batch = kind.build(), kind.batch()
    for chunks in ((3, 1, 1, 2), (1, 4), (1,) * 6):
        stock = unrolled(model, batch, chunks)
        with t5fastpatch.patched(model, "all"):
            patched = unrolled(model, batch, chunks)
        for a, b in zip(stock, patched, strict=True):
            assert a.shape == b.shape
            assert (a - b).abs().max() <= 1e-4 * a.abs().max()


@pytest.mark.parametrize("kind", GENERATES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 1}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True, "top_k": 20}],
    ids=["greedy", "beams", "two beams", "sampling"],
)
def test_searches_find_the_same_tokens_in_fp32(kind: zoo.Kind, options: dict[str, Any]) -> None:
    model, batch = kind.build(), kind.batch()
    batch.pop("labels")
    found = []
    for patches in (None, "all"):
        with t5fastpatch.patched(model, patches) if patches else contextlib.nullcontext():
            torch.manual_seed(0)
            found.append(model.generate(**batch, **{"do_sample": False, **options}, max_new_tokens=8, min_new_tokens=8))
    assert torch.equal(*found)


def test_a_model_on_the_meta_device_tells_the_shape() -> None:
    kind = zoo.BY_NAME["t5-v1.1"]
    model, batch = applied(kind.build(), FAST_PATH), kind.batch()
    batch.pop("attention_mask")  # recent releases look into it
    with torch.no_grad():
        shape = model(**batch).logits.shape
        found = model.to("meta")(**{name: value.to("meta") for name, value in batch.items()}).logits
    assert (found.shape, found.is_meta) == (shape, True)


@pytest.mark.parametrize("padding", ["left", "none", "one of two", "a batch of one"])
def test_padding_on_any_side(padding: str) -> None:
    kind = zoo.BY_NAME["t5-v1.1"]
    model, batch = kind.build(), kind.batch()
    mask = torch.ones_like(batch["attention_mask"])
    if padding == "left":
        mask[0, :5] = 0
    elif padding == "one of two":
        mask[1] = 0  # nothing but padding
        mask[1, -1] = 1
    batch["attention_mask"] = mask
    if padding == "a batch of one":
        batch = {name: value[:1] for name, value in batch.items()}
    with torch.no_grad():
        stock = model(**batch)["logits"]
        patched = applied(model, "all")(**batch)["logits"]
    assert (stock - patched).abs().max() <= 1e-4 * stock.abs().max()


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("kind", [zoo.BY_NAME[name] for name in ("t5-v1.1", "umt5", "udop")], ids=str)
def test_gradient_checkpointing_gives_stocks_gradients(kind: zoo.Kind, reentrant: bool) -> None:
    model, batch = kind.build(dropout_rate=0.0).train(), kind.batch()
    try:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    except TypeError:  # a release that knows the reentrant mode only
        model.gradient_checkpointing_enable()
    stock = gradients(model, batch)
    patch(model, EXACT)
    assert same(stock, gradients(model, batch))
    patch(model, "all")
    for a, b in zip(stock, gradients(model, batch), strict=True):
        assert (a - b).norm() <= 1e-4 * a.norm()


def holds_its_mask_twice() -> bool:
    """Whether upstream's SDPA copies the merged mask; where it does not, one that is kept is more than it has."""
    module = importlib.import_module("transformers.integrations.sdpa_attention")
    return "contiguous()" in inspect.getsource(module.create_position_bias_mask)


# Those of headroom hold some things in fp32, and joined gates both products.
MORE_MEMORY = {"fused_gate"} if RELEASE < (5, 15) or holds_its_mask_twice() else {"fused_gate", "bias_hoist"}
WITHOUT_HEADROOM = ["skip_inf_check", "softmax_dtype", "layer_norm", *(set(FAST_PATH) - MORE_MEMORY)]


@pytest.mark.parametrize("kind", [kind for kind in zoo.KINDS if kind.inputs is zoo.text_inputs], ids=str)
@every_dtype
@pytest.mark.parametrize("length", [16, 160])
def test_no_call_takes_more_memory_than_stock(kind: zoo.Kind, dtype: torch.dtype, length: int) -> None:
    kind.check_dtype(dtype)
    model = kind.build(d_model=128, d_kv=32, d_ff=512).to(dtype)  # in the proportions of T5
    batch = {**zoo.text_inputs(length), "labels": zoo.ids(6, 3)}
    calls = [forward(model, batch), encoder_forward(model, batch), decoder_step(model, batch)]
    with torch.no_grad():
        stock = [peak_live_bytes(call.prepare()) for call in calls]
        patch(model, WITHOUT_HEADROOM)
        for call in calls:
            call.prepare()()  # tables and masks that are kept
        patched = [peak_live_bytes(call.prepare()) for call in calls]
    assert all(ours <= theirs for ours, theirs in zip(patched, stock)), (patched, stock)


@all_together
def test_inference_mode_before_and_after_training(patches: Any) -> None:
    kind = zoo.BY_NAME["t5-v1.1"]
    model, batch = applied(kind.build(dropout_rate=0.0), patches), kind.batch()
    with torch.inference_mode():
        before = model(**batch)["logits"].clone()
    slopes = gradients(model, batch)
    assert len(slopes) > 20
    with torch.inference_mode():
        assert torch.equal(before, model(**batch)["logits"])


@all_together
def test_a_copy_a_pickle_and_the_model_itself_afterwards(patches: Any) -> None:
    kind = zoo.BY_NAME["t5-v1.1"]
    model, batch = kind.build(), kind.batch()
    weights = {name: (value.clone(), value.stride()) for name, value in model.state_dict().items()}
    with torch.no_grad():
        stock = model(**batch)["logits"]
        patched = applied(model, patches)(**batch)["logits"]
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(patched, twin(**batch)["logits"])
        assert torch.equal(stock, loaded(**batch)["logits"])
        t5fastpatch.remove(model)
        assert torch.equal(stock, model(**batch)["logits"])
        assert torch.equal(patched, twin(**batch)["logits"])
    for each in (model, loaded, twin):
        for name, value in each.state_dict().items():
            assert torch.equal(value, weights[name][0])
            assert value.stride() == weights[name][1]
    assert not vars(model).keys() ^ vars(loaded).keys()
