"""`cross_bias_skip`: on a CPU the bits of upstream, of cross-attention without its zeros."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch.overrides import TorchFunctionMode

import t5fastpatch
from t5fastpatch.findings import finding
from t5fastpatch.patch import Role, State
from t5fastpatch.patches import cross_bias_skip
from t5fastpatch.registry import get_patch
from t5fastpatch.rewrite import Method

PATCH = get_patch("cross_bias_skip")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYERS = 3

T5 = importlib.import_module("transformers.models.t5.modeling_t5")
# Two edits where an attention function gets the bias, one where the forward adds it to the scores itself.
INTERFACE = finding(PATCH, T5.T5Attention).sites == 2
interface = pytest.mark.skipif(not INTERFACE, reason="this release's T5 has no attention function")
written_out = pytest.mark.skipif(INTERFACE, reason="this release's T5 has an attention function")

every_kind = pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def build(name: str = "t5", **more: Any) -> Any:
    return zoo.BY_NAME[name].build(num_layers=LAYERS, num_decoder_layers=LAYERS, **more)


def same_both_ways(model: Any, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `call` gives, which must be the same bits with the patch and after it."""
    stock = call()
    with t5fastpatch.patched(model, ["cross_bias_skip"]):
        assert torch.equal(call(), stock)
    assert torch.equal(call(), stock)
    return stock


def encoded(model: Any, mask: torch.Tensor) -> dict[str, Any]:
    """An encoder's output, of which cross-attention sees what `mask` lets it, and labels."""
    torch.manual_seed(2)
    hidden = torch.randn(*mask.shape, 32, dtype=model.dtype)
    return {"encoder_outputs": (hidden,), "attention_mask": mask, "labels": zoo.ids(6, 3)}


def masks() -> dict[str, torch.Tensor]:
    none = torch.ones(2, 16, dtype=torch.long)
    altogether = zoo.right_padded(16)
    altogether[1] = 0
    return {"none": none, "right": zoo.right_padded(16), "left": zoo.right_padded(16).flip(1), "altogether": altogether}


@every_kind
@every_dtype
def test_outputs_keep_every_bit(kind: zoo.Kind, dtype: torch.dtype) -> None:
    kind.check_dtype(dtype)
    model, batch = kind.build().to(dtype), kind.batch(dtype)

    def outputs() -> torch.Tensor:
        found = model(**batch, output_hidden_states=True)
        return torch.cat([each.flatten() for each in (found["logits"], *found["decoder_hidden_states"])])

    with torch.no_grad():
        assert same_both_ways(model, outputs).isfinite().all()
    with torch.inference_mode():
        same_both_ways(model, outputs)


@pytest.mark.parametrize("mask", masks())
@every_dtype
def test_every_mask_gives_the_same_bits(mask: str, dtype: torch.dtype) -> None:
    """Rows that are masked altogether attend to everything, as upstream's do."""
    model = build().to(dtype)
    inputs = encoded(model, masks()[mask])
    with torch.no_grad():
        assert same_both_ways(model, lambda: model(**inputs)["logits"]).isfinite().all()


@pytest.mark.parametrize("name", ["t5", "umt5", "pop2piano"])
@every_dtype
def test_gradients_keep_every_bit(name: str, dtype: torch.dtype) -> None:
    model, batch = build(name, dropout_rate=0.1).train().to(dtype), zoo.BY_NAME[name].batch()

    def gradients() -> torch.Tensor:
        torch.manual_seed(7)
        model.zero_grad()
        model(**batch).loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    assert same_both_ways(model, gradients).abs().max() > 0
    model.eval()
    same_both_ways(model, gradients)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_keeps_every_bit(reentrant: bool) -> None:
    model, batch = build().train(), zoo.BY_NAME["t5"].batch()
    if "gradient_checkpointing_kwargs" in inspect.signature(model.gradient_checkpointing_enable).parameters:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    else:
        model.gradient_checkpointing_enable()
    model.shared.register_forward_hook(lambda module, args, output: output.requires_grad_(True))

    def gradients() -> torch.Tensor:
        torch.manual_seed(7)
        model.zero_grad()
        model(**batch).loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    same_both_ways(model, gradients)


@pytest.mark.parametrize("name", ["t5", "umt5"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"use_cache": False}, {"do_sample": True, "top_k": 5}], ids=str
)
def test_generation_gives_the_same_tokens_and_scores(name: str, options: dict[str, Any]) -> None:
    model = build(name)
    left_padded = zoo.right_padded(9).flip(1)

    def generate() -> torch.Tensor:
        torch.manual_seed(3)
        given = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_scores": True}
        found = model.generate(zoo.ids(9, 5), attention_mask=left_padded, **given, **options)
        return torch.cat([found.sequences.flatten().float(), *(each.flatten() for each in found.scores)])

    same_both_ways(model, generate)


def test_attentions_are_handed_out_as_ever() -> None:
    model, batch = build(**({"attn_implementation": "eager"} if INTERFACE else {})), zoo.BY_NAME["t5"].batch()

    def attentions() -> torch.Tensor:
        found = model(**batch, output_attentions=True)
        assert len(found.cross_attentions) == len(found.decoder_attentions) == LAYERS
        return torch.cat([each.flatten() for each in (*found.cross_attentions, *found.decoder_attentions)])

    with torch.no_grad():
        same_both_ways(model, attentions)


def test_a_compiled_model_is_one_graph_with_the_same_bits() -> None:
    model, batch = build(), zoo.BY_NAME["t5"].batch()
    inputs = {"encoder_hidden_states": torch.randn(2, 16, 32), "encoder_attention_mask": batch["attention_mask"]}
    inputs["input_ids"] = batch["labels"]
    with torch.no_grad():
        stock = model.decoder(**inputs, use_cache=False).last_hidden_state
        t5fastpatch.apply(model, ["cross_bias_skip"])
        compiled = torch.compile(model.decoder, backend="eager", fullgraph=transformers.__version__ > "5")
        assert torch.equal(compiled(**inputs, use_cache=False).last_hidden_state, stock)
    assert len(cross_bias_skip._additive._made) == 0


class Calls(TorchFunctionMode):
    """What SDPA is given, and how many masks are made."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_masks: list[torch.Tensor | None] = []
        self.made = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.attn_masks.append(kwargs["attn_mask"])
        self.made += func is torch.where
        return func(*args, **kwargs)


@interface
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_cross_attention_gets_the_padding_mask_or_none_at_all(name: str) -> None:
    model = build(name).to(torch.float16)
    t5fastpatch.apply(model, ["cross_bias_skip"])
    for mask, expected in (("right", (2, 1, 6, 16)), ("none", None)):
        inputs = encoded(model, masks()[mask])
        with torch.no_grad(), Calls() as calls:
            model(**inputs)
        cross = calls.attn_masks[1::2]
        assert len(cross) == LAYERS
        assert [each if each is None else tuple(each.shape) for each in cross] == [expected] * LAYERS
        assert all(each is cross[0] for each in cross)
    assert len(cross_bias_skip._additive._made) == 0


@interface
def test_masks_of_other_kinds_give_the_same_bits() -> None:
    attention = build().decoder.block[0].layer[1].EncDecAttention
    torch.manual_seed(0)
    inputs = {"hidden_states": torch.randn(2, 3, 32), "key_value_states": torch.randn(2, 5, 32)}
    per_head, additive = torch.rand(2, 4, 3, 5) > 0.4, torch.randn(2, 1, 1, 5)
    every = [per_head, per_head[:, :1], per_head[:1, :, :1], additive, additive.half(), (additive > 0).long(), None]

    def calls() -> torch.Tensor:
        return torch.stack([attention(**inputs, mask=mask)[0] for mask in every for _ in range(2)])

    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            same_both_ways(attention, calls)


@interface
def test_a_mask_changed_in_place_is_made_anew() -> None:
    attention = build().decoder.block[0].layer[1].EncDecAttention
    torch.manual_seed(0)
    inputs = {"hidden_states": torch.randn(2, 3, 32), "key_value_states": torch.randn(2, 5, 32)}

    def calls() -> torch.Tensor:
        mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
        before = attention(**inputs, mask=mask)[0]
        mask[..., 2] = False
        return torch.stack([before, attention(**inputs, mask=mask)[0]])

    with torch.no_grad():
        before, after = same_both_ways(attention, calls)
    assert not torch.equal(before, after)


@interface
def test_a_caller_s_own_mask_is_read_anew_in_every_forward() -> None:
    """In inference mode too, where tensors have no versions."""
    model = build()
    inputs = {"encoder_hidden_states": torch.randn(2, 5, 32), "input_ids": zoo.ids(3, 1), "use_cache": False}

    def calls() -> torch.Tensor:
        mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
        before = model.decoder(**inputs, encoder_attention_mask=mask).last_hidden_state
        mask[..., 2] = False
        return torch.stack([before, model.decoder(**inputs, encoder_attention_mask=mask).last_hidden_state])

    with torch.inference_mode():
        before, after = same_both_ways(model, calls)
    assert not torch.equal(before, after)


@interface
def test_other_attention_functions_get_their_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def own(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append((mask.dtype if mask is not None else None, kwargs["position_bias"].shape))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    model = build()
    t5fastpatch.apply(model, ["cross_bias_skip"])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", own)
    with torch.no_grad():
        model(**encoded(model, masks()["right"]))
    assert seen[1::2] == [(torch.bool, (1, 4, 6, 16))] * LAYERS


@interface
def test_a_self_attention_that_is_called_alone_keeps_its_zeros() -> None:
    attention = build().decoder.block[1].layer[0].SelfAttention
    t5fastpatch.apply(attention, ["cross_bias_skip"])
    with torch.no_grad():
        _, bias, _ = attention(torch.randn(2, 3, 32))
    assert bias.shape == (1, 4, 3, 3)


@written_out
def test_the_sum_of_zeros_and_mask_is_as_large_as_the_mask() -> None:
    """Which in 5.x has a row for each query, and in 4.x one; there the heads are kept, to be pruned."""
    model = build()
    biases: list[tuple[int, ...]] = []
    for block in model.decoder.block:
        attention = block.layer[1].EncDecAttention
        attention.register_forward_hook(lambda module, args, output: biases.append(tuple(output[-1].shape)))
    t5fastpatch.apply(model, ["cross_bias_skip"])
    with torch.no_grad():
        model(**encoded(model, masks()["right"]))
    assert biases == [(2, 1, 6, 16) if transformers.__version__ > "5" else (2, 4, 1, 16)] * LAYERS


@written_out
def test_pruned_heads_keep_every_bit() -> None:
    model = build()
    attention = model.decoder.block[1].layer[1].EncDecAttention
    if not hasattr(attention, "prune_heads"):
        pytest.skip("this release prunes no heads")
    attention.prune_heads({1, 2})
    with torch.no_grad():
        same_both_ways(model, lambda: model(**encoded(model, masks()["right"]))["logits"])


def test_the_encoder_s_own_attentions_are_left_alone() -> None:
    longt5 = importlib.import_module("transformers.models.longt5.modeling_longt5")
    assert finding(PATCH, longt5.LongT5LocalAttention).state is State.UPSTREAM
    assert finding(PATCH, longt5.LongT5TransientGlobalAttention).state is State.UPSTREAM


def without_mask(call: ast.Call) -> None:
    del call.args[4]


def with_two_masks(call: ast.Call) -> None:
    call.args[4] = ast.BinOp(call.args[4], ast.Add(), call.args[4])


def of_another_function(call: ast.Call) -> None:
    call.func = ast.Name("attend")


@interface
@pytest.mark.parametrize("change", [without_mask, with_two_masks, of_another_function])
def test_a_call_that_is_not_as_known_is_refused(change: Callable[[ast.Call], None]) -> None:
    method = Method.of(T5.T5Attention)
    tree = copy.deepcopy(method.tree)
    (call,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and "position_bias" in map(_name, node.keywords)
    ]
    change(call)
    found = PATCH.find(dataclasses.replace(method, tree=tree), Role.ATTENTION)
    assert found.state is State.REFUSED
    assert "attention function" in str(found.refusal)


def _name(keyword: ast.keyword) -> str | None:
    return keyword.arg
