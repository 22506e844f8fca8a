"""`bias_hoist`: the bits of upstream, of masks that are made once and not kept."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch._subclasses import FakeTensorMode

import t5fastpatch
from t5fastpatch import shared_masks
from t5fastpatch.errors import UnexpectedSourceError
from t5fastpatch.findings import finding
from t5fastpatch.patch import State
from t5fastpatch.patches import bias_hoist
from t5fastpatch.registry import get_patch

PATCH = get_patch("bias_hoist")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYERS = 3


def has_pattern() -> bool:
    return finding(PATCH, importlib.import_module("transformers.models.t5.modeling_t5").T5Attention).sites > 0


pytestmark = pytest.mark.skipif(not has_pattern(), reason="this release's T5 does not go through the SDPA function")

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
# The families whose models take SDPA.
KINDS = [kind for kind in zoo.KINDS if kind.family not in ("longt5", "switch_transformers")]
SHARING = [kind for kind in KINDS if kind.family not in ("umt5", "pix2struct")]


def build(name: str = "t5", **more: Any) -> Any:
    return zoo.BY_NAME[name].build(num_layers=LAYERS, num_decoder_layers=LAYERS, **more)


def unpadded(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What upstream's function merges while a test runs."""
    upstream, made = bias_hoist.upstream(), []
    merge = upstream.create_position_bias_mask

    def counted(*args: Any) -> torch.Tensor:
        made.append(merge(*args))
        return made[-1]

    monkeypatch.setattr(upstream, "create_position_bias_mask", counted)
    return made


def same_both_ways(model: Any, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `call` gives, which must be the same bits with the patch and after it."""
    stock = call()
    with t5fastpatch.patched(model, ["bias_hoist"]):
        assert torch.equal(call(), stock)
    assert torch.equal(call(), stock)
    return stock


@pytest.mark.parametrize("kind", KINDS, ids=str)
@every_dtype
def test_outputs_keep_every_bit(kind: zoo.Kind, dtype: torch.dtype) -> None:
    model, batch = kind.build().to(dtype), kind.batch(dtype)
    assert "sdpa" in (model.config._attn_implementation, getattr(model, "decoder", model).config._attn_implementation)
    for inputs in (batch, unpadded(batch)):
        with torch.no_grad():
            same_both_ways(model, lambda inputs=inputs: model(**inputs)["logits"])
        with torch.inference_mode():
            same_both_ways(model, lambda inputs=inputs: model(**inputs)["logits"])


@pytest.mark.parametrize("kind", SHARING, ids=str)
def test_a_stack_merges_once(kind: zoo.Kind, merges: list[torch.Tensor]) -> None:
    model, batch = build(str(kind)), kind.batch()
    with torch.no_grad():
        model(**batch)
        stock = len(merges)
        t5fastpatch.apply(model, ["bias_hoist"])
        model(**batch)
    # The encoder's, the decoder's, and cross-attention's.
    assert stock == 3 * LAYERS
    assert len(merges) - stock == 3


def test_a_mask_that_each_layer_crops_is_merged_once(merges: list[torch.Tensor]) -> None:
    kind = zoo.BY_NAME["pix2struct"]
    model = kind.build()
    t5fastpatch.apply(model, ["bias_hoist"])
    batch = kind.batch()
    decoder_mask = torch.ones_like(batch["labels"])
    decoder_mask[0, -1] = 0
    with torch.no_grad():
        same_both_ways(model, lambda: model(**batch, decoder_attention_mask=decoder_mask)["logits"])
        merges.clear()
        t5fastpatch.apply(model, ["bias_hoist"])
        model(**batch, decoder_attention_mask=decoder_mask)
    assert len(merges) == 2


def test_umt5_has_a_bias_in_each_layer_but_copies_what_it_merges_no_more(merges: list[torch.Tensor]) -> None:
    model, batch = build("umt5"), zoo.BY_NAME["umt5"].batch()
    t5fastpatch.apply(model, ["bias_hoist"])
    with torch.no_grad():
        model(**batch)
    assert len(merges) == 3 * LAYERS
    assert all(each.is_contiguous() for each in merges)


@pytest.mark.parametrize("name", ["t5", "umt5"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}, {"do_sample": True, "top_k": 5}],
    ids=str,
)
def test_generation_gives_the_same_tokens_and_scores(name: str, options: dict[str, Any]) -> None:
    model = build(name).to(torch.float16)
    left_padded = zoo.right_padded(9).flip(1)

    def generate() -> torch.Tensor:
        torch.manual_seed(3)
        given = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
        found = model.generate(zoo.ids(9, 5), attention_mask=left_padded, **given, **options)
        return torch.cat([found.sequences.flatten().float(), *(each.flatten() for each in found.logits)])

    same_both_ways(model, generate)


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
def test_chunks_into_a_cache_keep_every_bit(cache: str) -> None:
    """The second chunk has fewer queries than keys, as has the first with a static cache, which upstream crops."""
    model = build().to(torch.bfloat16)
    encoded = model.encoder(**zoo.text_inputs())

    def decode() -> torch.Tensor:
        one = getattr(transformers, cache)(config=model.config.get_text_config(decoder=True), **lengths)
        both = transformers.EncoderDecoderCache(one, transformers.DynamicCache(config=model.config))
        keyword = "cache" if "cache" in model.decoder.forward.__code__.co_varnames else "past_key_values"
        chunks = (zoo.ids(3, 1), zoo.ids(2, 2), zoo.ids(1, 3))
        hidden = {"encoder_hidden_states": encoded.last_hidden_state, keyword: both, "use_cache": True}
        return torch.cat([model.decoder(input_ids=chunk, **hidden).last_hidden_state for chunk in chunks], dim=1)

    lengths = {"max_cache_len": 12} if cache == "StaticCache" else {}
    with torch.no_grad():
        same_both_ways(model, decode)


@pytest.mark.parametrize("causal", [True, False, None])
@pytest.mark.parametrize("shape", [(1, 5), (4, 4), (3, 5), (5, 3)], ids=str)
def test_one_call_keeps_upstream_s_causality_and_cropping(causal: bool | None, shape: tuple[int, int]) -> None:
    queries, keys = shape
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, queries, 8), torch.randn(2, 4, keys, 8), torch.randn(2, 4, keys, 8)
    bias = torch.randn(1, queries, keys, 4).permute(0, 3, 1, 2)
    module = build().decoder.block[0].layer[0].SelfAttention
    shown = {"scaling": 1.0, "is_causal": causal, "position_bias": bias}
    masks = [None, torch.rand(2, 1, queries, keys) > 0.5, torch.randn(2, 4, queries, keys), torch.randn(2, 1, 1, keys)]
    for mask in masks:
        stock, _ = bias_hoist.upstream().sdpa_attention_forward(module, query, key, value, mask, **shown)
        for _ in range(2):
            ours, _ = bias_hoist.sdpa_with_shared_mask(module, query, key, value, mask, **shown)
            assert torch.equal(ours, stock)


@pytest.mark.parametrize("frozen", [False, True])
@every_dtype
def test_gradients_keep_every_bit(dtype: torch.dtype, frozen: bool) -> None:
    model, batch = build(dropout_rate=0.1).train().to(dtype), zoo.BY_NAME["t5"].batch()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("relative_attention_bias" not in name)

    def gradients() -> torch.Tensor:
        torch.manual_seed(7)
        model.zero_grad()
        model(**batch).loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    assert same_both_ways(model, gradients).abs().max() > 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_checkpointing_keeps_every_bit(reentrant: bool, frozen: bool) -> None:
    model, batch = build().train(), zoo.BY_NAME["t5"].batch()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and "relative_attention_bias" in name))

    def gradients() -> torch.Tensor:
        torch.manual_seed(7)
        model.zero_grad()
        model(**batch).loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    same_both_ways(model, gradients)


def test_nothing_outlives_the_forward() -> None:
    model, batch = build(), zoo.BY_NAME["t5"].batch()
    t5fastpatch.apply(model, ["bias_hoist"])
    with torch.no_grad():
        model(**batch)
        model(**unpadded(batch))
    with torch.inference_mode():
        model(**batch)
    assert len(bias_hoist._merged._made) == 0


def attention_and_inputs() -> tuple[Any, dict[str, Any]]:
    """The second layer's self-attention, and a bias and a mask to call it with."""
    attention = build().encoder.block[1].layer[0].SelfAttention
    torch.manual_seed(1)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, :, 3:] = False
    return attention, {"hidden_states": torch.randn(2, 5, 32), "mask": mask, "position_bias": torch.randn(1, 4, 5, 5)}


@pytest.mark.parametrize("changed", ["mask", "position_bias"])
def test_what_is_changed_in_place_is_merged_again(changed: str) -> None:
    attention, inputs = attention_and_inputs()

    def calls() -> list[torch.Tensor]:
        given = {**inputs, changed: inputs[changed].clone()}
        first = attention(**given)[0]
        given[changed][:, :, :, 1] = 0
        return [first, attention(**given)[0]]

    with torch.no_grad():
        stock = calls()
        with t5fastpatch.patched(attention, ["bias_hoist"]):
            ours = calls()
    assert not torch.equal(*stock)
    assert all(map(torch.equal, stock, ours))


def test_a_second_mask_beside_the_same_bias_is_merged_anew() -> None:
    attention, inputs = attention_and_inputs()
    masks = [inputs["mask"], ~inputs["mask"], None, inputs["mask"].float(), inputs["mask"]]

    def calls() -> torch.Tensor:
        return torch.stack([attention(**{**inputs, "mask": mask})[0] for mask in masks])

    with torch.no_grad():
        same_both_ways(attention, calls)


def test_eager_attention_and_registered_ones_get_bias_and_mask_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def own(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append((mask, kwargs["position_bias"]))
        return bias_hoist.upstream().sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    model, batch = build(), zoo.BY_NAME["t5"].batch()
    t5fastpatch.apply(model, ["bias_hoist"])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", own)
    with torch.no_grad():
        model(**batch)
    assert len(seen) == 3 * LAYERS
    assert all(bias is not None and (mask is None or mask.dtype == torch.bool) for mask, bias in seen)
    eager = zoo.BY_NAME["t5"].build(attn_implementation="eager")
    with torch.no_grad():
        same_both_ways(eager, lambda: eager(**batch)["logits"])


def test_two_threads_share_nothing() -> None:
    models = [build(seed=seed) for seed in (1, 2)]
    batch = zoo.BY_NAME["t5"].batch()
    with torch.no_grad():
        stock = [model(**batch)["logits"] for model in models]
    found: list[list[bool]] = [[], []]

    def work(index: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                found[index].append(torch.equal(models[index](**batch)["logits"], stock[index]))

    for model in models:
        t5fastpatch.apply(model, ["bias_hoist"])
    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[True] * 5] * 2


def test_a_compiled_model_is_one_graph_with_the_same_bits() -> None:
    model, batch = build(), zoo.BY_NAME["t5"].batch()
    with torch.no_grad():
        stock = model(**batch)["logits"]
        t5fastpatch.apply(model, ["bias_hoist"])
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(**batch)["logits"], stock)
    assert len(bias_hoist._merged._made) == 0


def test_fake_tensors_are_not_kept() -> None:
    with FakeTensorMode(), torch.no_grad():
        model, batch = build(), zoo.BY_NAME["t5"].batch()
        t5fastpatch.apply(model, ["bias_hoist"])
        attention, _ = model.encoder.block[0].layer[0].SelfAttention, model(**batch)
        *_, bias, _ = attention(torch.randn(2, 5, 32))
        assert len(bias_hoist._merged._made) == 0
        assert bias.shape == (1, 4, 5, 5)


def test_function_transforms_take_upstream_s_way() -> None:
    attention, inputs = attention_and_inputs()
    bias = inputs.pop("position_bias")

    def output(scale: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = attention(**inputs, position_bias=bias * scale)[0]
        return result

    scales = torch.tensor([0.5, 1.0, 2.0])
    with torch.no_grad():
        same_both_ways(attention, lambda: torch.func.vmap(output)(scales))
    same_both_ways(attention, lambda: torch.func.jacrev(output)(scales[0]))


def test_a_trace_merges_the_bias_that_it_is_given() -> None:
    attention, inputs = attention_and_inputs()
    t5fastpatch.apply(attention.requires_grad_(False), ["bias_hoist"])

    def call(hidden_states: torch.Tensor, bias: torch.Tensor) -> Any:
        return attention(hidden_states, mask=inputs["mask"], position_bias=bias)[0]

    given = inputs["hidden_states"], inputs["position_bias"]
    with torch.no_grad():
        traced = torch.jit.trace(call, given)
        assert torch.equal(traced(*given), call(*given))
        other = given[0], given[1] + 1
        assert torch.equal(traced(*other), call(*other))


def test_an_sdpa_function_that_takes_masks_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = bias_hoist.upstream()
    attend = upstream.sdpa_attention_forward

    def halves_masks(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return attend(module, query, key, value, None if mask is None else mask / 2, **kwargs)

    bias_hoist.check_upstream(attend)
    monkeypatch.setattr(upstream, "sdpa_attention_forward", halves_masks)
    with pytest.raises(UnexpectedSourceError, match="otherwise"):
        bias_hoist.check_upstream(halves_masks)
    monkeypatch.delattr(upstream, "create_position_bias_mask")
    with pytest.raises(UnexpectedSourceError, match="create_position_bias_mask"):
        bias_hoist.check_upstream(lambda: None)


@pytest.mark.parametrize("keys", [1, 7, 8, 13])
def test_aligned_rows_begin_at_multiples_of_eight(keys: int) -> None:
    mask = torch.randn(2, 4, keys, 3).transpose(2, 3)
    aligned = shared_masks.with_aligned_rows(mask)
    assert torch.equal(aligned, mask)
    assert aligned.stride(-1) == 1
    assert all(stride % 8 == 0 for stride in aligned.stride()[:-1])
    assert shared_masks.laid_out(mask).is_contiguous()


def test_families_without_the_interface_are_left_alone() -> None:
    module = importlib.import_module("transformers.models.longt5.modeling_longt5")
    assert finding(PATCH, module.LongT5LocalAttention).state is State.UPSTREAM
