"""`sdpa`: written-out attention as one fused call, and written out again where its weights are wanted."""

from __future__ import annotations

import copy
import inspect
import os
import statistics
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from test_contracts import (
    SMOOTH,
    distances,
    every_dtype,
    every_half,
    every_kind,
    floats,
    fp64_logits,
    gradient_error,
    gradients,
    same,
    tensors,
)
from test_masks import HALF, PADDINGS, batch_of, build, error, make_scores_large, mask_of, outputs, playing
from torch import nn
from torch.autograd import forward_ad

import t5fastpatch
from t5fastpatch import registry
from t5fastpatch.measure.census import census
from t5fastpatch.patch import Role, State
from t5fastpatch.patches.sdpa import attention, masked_bias
from t5fastpatch.rewrite import Method

ROOT = Path(__file__).parent.parent
every_smooth_kind = pytest.mark.parametrize("kind", SMOOTH, ids=str)
EVAL = types.SimpleNamespace(training=False, dropout=0.1)


def written_out(kind: zoo.Kind, **more: Any) -> Any:
    """A stock model, of a release whose attention is written out."""
    model = build(kind, **more)
    if t5fastpatch.status(model)["sdpa"].state is not State.APPLIES:
        pytest.skip("this release writes no attention out")
    return model


def heads(*lengths: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> list[torch.Tensor]:
    """Queries, keys, values of these lengths: shape (2, 3, length, 64)."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(2, 3, length, 64, generator=generator) * size).to(dtype) for length in lengths]


def in_fp64(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """T5's attention by its formula, softmax(q.k + b) v."""
    scores = query.double() @ key.double().transpose(-1, -2) + bias.double()
    return scores.softmax(-1) @ value.double()


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The keyword arguments of each call of PyTorch's attention."""
    calls: list[dict[str, Any]] = []
    fused = nn.functional.scaled_dot_product_attention

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return fused(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recorded)
    return calls


@every_dtype
def test_scores_are_not_scaled(dtype: torch.dtype) -> None:
    query, key, value = heads(5, 7, 7, dtype=dtype)
    bias = torch.randn(1, 3, 5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = in_fp64(query, key, value, bias)
    output, weights = attention(EVAL, query, key, value, bias, None, False)
    assert weights is None
    assert (output.double() - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()
    scaled = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    assert torch.cosine_similarity(scaled.double().flatten(), exact.flatten(), dim=0) < 0.95


@every_kind
@pytest.mark.parametrize("padding", PADDINGS)
def test_in_fp32_a_model_gives_what_stock_gives(kind: zoo.Kind, padding: str) -> None:
    model, batch = written_out(kind), batch_of(kind, padding)
    stock = outputs(model, batch)
    t5fastpatch.apply(model, "sdpa")
    for ours, theirs in zip(outputs(model, batch), stock):
        assert ours.dtype == theirs.dtype
        assert error(ours, theirs) < 1e-5


@every_kind
def test_each_attention_is_one_fused_call_with_scale_one(kind: zoo.Kind, fused_calls: list[dict[str, Any]]) -> None:
    model, batch = written_out(kind).half(), batch_of(kind, "left", HALF)
    kind.check_dtype(HALF)
    t5fastpatch.apply(model, "sdpa")
    outputs(model, batch)
    local = 2 * (kind.family == "longt5")  # the encoder's, written out in another way
    assert len(fused_calls) == len(playing(model, Role.ATTENTION)) - local
    assert all(call["scale"] == 1.0 and call["dropout_p"] == 0.0 for call in fused_calls)
    assert all(call["attn_mask"].is_contiguous() and call["attn_mask"].dtype == HALF for call in fused_calls)


@every_smooth_kind
@every_half
def test_it_is_no_further_from_fp64_than_stock(kind: zoo.Kind, dtype: torch.dtype) -> None:
    stock, patched = [], []
    batch = kind.batch(dtype)
    for seed in range(3):
        model = written_out(kind, seed=seed).to(dtype)
        reference = fp64_logits(model, batch)
        with torch.no_grad():
            stock.append(distances(model(**batch)["logits"], reference))
            t5fastpatch.apply(model, "sdpa")
            patched.append(distances(model(**batch)["logits"], reference))
    for quantile in (0.5, 0.9):
        assert torch.cat(patched).quantile(quantile) <= 1.2 * torch.cat(stock).quantile(quantile)


@every_kind
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_on_a_cpu_gradients_in_fp32_keep_every_bit(kind: zoo.Kind, training: bool) -> None:
    model, batch = written_out(kind, dropout_rate=0.1).train(training), batch_of(kind, "right")
    stock = gradients(model, batch)
    t5fastpatch.apply(model, "sdpa")
    assert len(stock) > 20
    # In eval mode, cross-attention's bias has no gradient, and PyTorch a fused kernel.
    for ours, theirs in zip(gradients(model, batch), stock, strict=True):
        assert torch.equal(ours, theirs) if training else (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("kind", [zoo.BY_NAME[name] for name in ("t5-v1.1", "umt5", "pix2struct")], ids=str)
@every_half
def test_half_models_train_as_close_to_fp32_as_stock(kind: zoo.Kind, dtype: torch.dtype) -> None:
    ratios = []
    for seed in range(5):
        model, batch = written_out(kind, seed=seed, dropout_rate=0.0).to(dtype).train(), kind.batch(dtype)
        reference = gradients(copy.deepcopy(model).float(), batch | floats(batch))
        stock, patched = (gradient_error(model, batch, reference, patches) for patches in ([], ["sdpa"]))
        ratios.append(patched / stock)
    assert statistics.median(ratios) <= 1.5


def test_gradients_pass_through_the_fused_kernel() -> None:
    query, key, value = (each.requires_grad_() for each in heads(5, 7, 7))
    bias = torch.randn(1, 3, 5, 7, generator=torch.Generator().manual_seed(1))
    output, _ = attention(EVAL, query, key, value, bias, None, False)
    expected = torch.autograd.grad(in_fp64(query, key, value, bias).sum(), (query, key, value))
    for a, b in zip(torch.autograd.grad(output.sum(), (query, key, value)), expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@every_kind
@every_dtype
def test_attentions_that_are_asked_for_are_stocks(kind: zoo.Kind, dtype: torch.dtype) -> None:
    kind.check_dtype(dtype)
    model, batch = written_out(kind).to(dtype), batch_of(kind, "none", dtype)
    with torch.no_grad():
        stock = model(**batch, output_attentions=True)
        t5fastpatch.apply(model, "sdpa")
        patched = model(**batch, output_attentions=True)
    assert stock.keys() == patched.keys()
    # Switch of 5.12 does not tell its attentions, and gives position biases for weights.
    assert same(stock, patched) or dtype != torch.float32 or kind not in SMOOTH
    for ours, theirs in zip(tensors(patched), tensors(stock), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        # Some releases give position biases too, with masks in them.
        a, b = (each.float().clamp(min=torch.finfo(HALF).min) for each in (ours, theirs))
        assert (a - b).norm() <= 0.02 * b.norm() or kind not in SMOOTH


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_masked_heads_stay_masked(name: str) -> None:
    kind = zoo.BY_NAME[name]
    model, batch = written_out(kind), batch_of(kind, "right")
    if "head_mask" not in inspect.signature(model.forward).parameters:
        pytest.skip("this release has no head masks")
    part = torch.tensor([[0.0, 1.0, 0.5, 1.0], [1.0, 0.0, 1.0, 1.0]])
    masks = dict.fromkeys(("head_mask", "decoder_head_mask", "cross_attn_head_mask"), part)
    whole, stock = outputs(model, batch), outputs(model, {**batch, **masks})
    t5fastpatch.apply(model, "sdpa")
    assert all(map(torch.equal, outputs(model, {**batch, **masks}), stock))
    assert error(stock[0], whole[0]) > 0.01


def test_umt5s_layers_called_alone_give_weights_as_stock_does(fused_calls: list[dict[str, Any]]) -> None:
    model = written_out(zoo.BY_NAME["umt5"])
    layer = model.encoder.block[0].layer[0]
    hidden = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(2, 1, 1, 16).masked_fill(mask_of("right")[:, None, None] == 0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        stock = layer(hidden, attention_mask=mask)
        t5fastpatch.apply(model, "sdpa")
        assert same(stock, layer(hidden, attention_mask=mask))
        assert not fused_calls
        model.encoder.block[0](hidden, attention_mask=mask)
        assert len(fused_calls) == 1


@every_smooth_kind
def test_biases_below_fp16s_range_are_masks_there_and_nothing_else(kind: zoo.Kind) -> None:
    model = written_out(kind, lower_bias=64)  # below fp16's smallest number from 16 on, with the mask
    expected = {padding: outputs(model, batch_of(kind, padding)) for padding in ("right", "left", "all")}
    t5fastpatch.apply(model.half(), ["sdpa", "local_scores"] if kind.family == "longt5" else "sdpa")
    for padding, reference in expected.items():
        attended = mask_of(padding).any(dim=1)
        for ours, theirs in zip(outputs(model, batch_of(kind, padding, HALF)), reference):
            assert ours.isfinite().all()
            assert error(ours[attended], theirs[attended]) < 0.02


@every_kind
def test_scores_that_fp16_cannot_hold_are_finite_and_point_as_in_fp32(kind: zoo.Kind) -> None:
    kind.check_dtype(HALF)
    model = written_out(kind)
    make_scores_large(model)
    wide = copy.deepcopy(model.half()).float()
    t5fastpatch.apply(model, ["sdpa", "local_scores"] if kind.family == "longt5" else "sdpa")
    for padding in ("none", "right", "left"):
        ours = outputs(model, batch_of(kind, padding, HALF))
        assert all(tensor.isfinite().all() for tensor in ours)
        reference = outputs(wide, batch_of(kind, padding))[1]
        assert torch.cosine_similarity(ours[1].float(), reference, dim=-1).median() > 0.98


def test_a_masked_key_stays_masked_whatever_its_score() -> None:
    query, value = torch.full((1, 1, 1, 8), 200.0, dtype=HALF), torch.tensor([[1.0] * 8, [2.0] * 8], dtype=HALF)
    key = torch.stack([torch.full((8,), -100.0), torch.full((8,), 100.0)]).to(HALF)[None, None]
    mask = torch.tensor([0.0, torch.finfo(HALF).min], dtype=HALF)[None, None, None]
    for lower in (0.0, 100.0):
        bias = masked_bias(torch.full((1, 1, 1, 2), -lower, dtype=HALF), mask, HALF)
        for weights in (False, True):
            output, _ = attention(EVAL, query, key, value[None, None], bias, None, weights)
            assert torch.equal(output.flatten(), torch.ones(8, dtype=HALF))


def test_a_row_that_is_masked_altogether_has_no_mask() -> None:
    bias, mask = torch.full((1, 3, 1, 4), -64.0, dtype=HALF), torch.zeros(2, 1, 1, 4, dtype=HALF)
    mask[0] = torch.finfo(HALF).min
    mask[1, ..., 2:] = torch.finfo(HALF).min
    merged = masked_bias(bias, mask, HALF)
    assert torch.equal(merged[0], bias[0])
    assert torch.equal(merged[1, 0, 0], torch.tensor([-64.0, -64.0, -torch.inf, -torch.inf], dtype=HALF))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_a_bias_in_a_wider_range_is_upstreams_sum_in_order(dtype: torch.dtype) -> None:
    bias = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0)).to(dtype).permute(2, 0, 1)[None]
    mask = torch.zeros(2, 1, 1, 7, dtype=dtype)
    mask[1] = torch.finfo(dtype).min
    merged = masked_bias(bias, mask, dtype)
    assert torch.equal(merged, bias + mask)
    assert merged.is_contiguous()
    assert not (bias + mask).is_contiguous()


@every_half
def test_under_autocast_the_bias_is_in_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    mask = torch.zeros(2, 1, 1, 7)
    mask[1] = mask[0, ..., 1:] = torch.finfo(torch.float32).min
    merged = masked_bias(torch.ones(1, 3, 5, 7), mask, dtype)
    assert merged.dtype == dtype
    assert merged[0, ..., 1:].isneginf().all()
    assert (merged[1] == 1).all()


def test_a_mask_of_integers_is_added_as_stock_adds_it() -> None:
    """A caller's mask in four dimensions, which some releases take as it is."""
    bias, mask = torch.ones(1, 3, 5, 7), torch.eye(5, 7, dtype=torch.long)[None, None]
    for dtype in (torch.float32, torch.bfloat16, HALF):
        assert torch.equal(masked_bias(bias.to(dtype), mask, dtype), bias.to(dtype) + mask)


@pytest.mark.parametrize("patches", ["sdpa", "eager_scores", "local_scores"])
def test_half_models_are_differentiated_by_torch_func(patches: str) -> None:
    kind = zoo.BY_NAME["longt5-local"]
    model, batch = build(kind).half(), kind.batch(HALF)
    if t5fastpatch.status(model)[patches].state is not State.APPLIES:
        pytest.skip(f"this release has no place for {patches}")
    embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    slope = torch.func.grad(lambda x: model(inputs_embeds=x, **batch).loss.float())
    stock = slope(embeds).float()
    t5fastpatch.apply(model, patches)
    assert (slope(embeds).float() - stock).norm() <= 0.1 * stock.norm()


@pytest.mark.parametrize("mode", ["torch.func.grad", "torch.func.jvp", "forward mode"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_transforms_and_forward_mode_differentiate_what_stock_lets_them(mode: str, grad: bool) -> None:
    kind = zoo.BY_NAME["t5-v1.1"]
    model, batch = written_out(kind), kind.batch()
    embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach()

    def logits(embeds: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(inputs_embeds=embeds, **batch).logits
        return found

    def derivative() -> torch.Tensor:
        if mode == "torch.func.grad":
            return torch.func.grad(lambda x: logits(x).logsumexp(-1).sum())(embeds).detach()
        if mode == "torch.func.jvp":
            return torch.func.jvp(logits, (embeds,), (torch.ones_like(embeds),))[1].detach()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(embeds, torch.ones_like(embeds))
            return forward_ad.unpack_dual(logits(dual)).tangent.detach()

    with torch.set_grad_enabled(grad):
        stock = derivative()
        t5fastpatch.apply(model, "sdpa")
        assert (derivative() - stock).abs().max() <= 1e-4 * stock.abs().max()


def test_no_keys_at_all_give_no_error() -> None:
    empty = torch.zeros(1, 3, 2, 0, dtype=HALF)
    assert masked_bias(empty, torch.zeros(2, 1, 1, 0, dtype=HALF), HALF).shape == (2, 3, 2, 0)


@every_smooth_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF], ids=lambda dtype: str(dtype)[6:])
def test_autocast_is_as_close_to_fp32_as_with_stock(kind: zoo.Kind, dtype: torch.dtype) -> None:
    model, batch = written_out(kind), batch_of(kind, "none")
    reference = outputs(model, batch)[0]
    with torch.autocast("cpu", dtype):
        stock = outputs(model, batch)[0]
        t5fastpatch.apply(model, "sdpa")
        patched = outputs(model, batch)[0]
    assert patched.dtype == stock.dtype
    assert error(patched, reference) <= 1.3 * error(stock, reference)


def test_it_takes_the_place_of_the_patches_that_it_covers() -> None:
    kind = zoo.BY_NAME["t5"]
    model = written_out(kind).half()
    batch = batch_of(kind, "left", HALF)
    with t5fastpatch.patched(model, "sdpa"):
        alone = outputs(model, batch)
    with t5fastpatch.patched(model, ["eager_scores", "softmax_dtype"]):
        others = outputs(model, batch)
    report = t5fastpatch.apply(model, ["sdpa", "eager_scores", "softmax_dtype"])
    assert all(report[name].state is State.ON for name in ("sdpa", "eager_scores", "softmax_dtype"))
    source = inspect.getsource(type(playing(model, Role.ATTENTION)[0]).forward)
    assert "t5fastpatch_attention" in source
    assert "softmax" not in source
    assert all(map(torch.equal, outputs(model, batch), alone))
    t5fastpatch.remove(model, "sdpa")
    assert all(map(torch.equal, outputs(model, batch), others))


@every_kind
def test_removing_restores_every_bit_and_every_name(kind: zoo.Kind) -> None:
    model, batch = written_out(kind), batch_of(kind, "none")
    stock = outputs(model, batch)
    t5fastpatch.apply(model, "sdpa")
    t5fastpatch.remove(model)
    assert all(map(torch.equal, outputs(model, batch), stock))
    assert not any(name.startswith("t5fastpatch") for module in model.modules() for name in dir(module))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_compiled_umt5s_block_and_its_attention_are_one_graph(training: bool) -> None:
    torch._dynamo.reset()
    model = written_out(zoo.BY_NAME["umt5"], dropout_rate=0.0).train(training)
    t5fastpatch.apply(model, ["sdpa", "skip_inf_check"])
    block = model.encoder.block[0]
    hidden, mask = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 1, 1, 16)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(training):
        expected, found = (call(hidden, attention_mask=mask)[0] for call in (block, compiled))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@every_kind
def test_a_call_does_less_than_stocks(kind: zoo.Kind) -> None:
    kind.check_dtype(HALF)
    model, batch = written_out(kind).half(), batch_of(kind, "left", HALF)
    with torch.no_grad():
        stock = census(lambda: model(**batch))
        t5fastpatch.apply(model, "sdpa")
        patched = census(lambda: model(**batch))
    fused = len(playing(model, Role.ATTENTION)) - 2 * (kind.family == "longt5")
    # Of seven operations one is left; and in fp16 a mask, which UMT5 has in every layer, takes four to make.
    assert patched.ops <= stock.ops - 3 * fused
    assert patched.casts <= stock.casts - 2 * fused


PROCESS_WIDE = """
import torch, transformers
sizes = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
fused, calls = torch.nn.functional.scaled_dot_product_attention, []
def counted(*args, **kwargs):
    calls.append(kwargs["scale"])
    return fused(*args, **kwargs)
torch.nn.functional.scaled_dot_product_attention = counted
for name in ("T5", "UMT5"):
    model = getattr(transformers, name + "ForConditionalGeneration", None)
    if model:
        tokens = torch.arange(2, 18)[None]
        with torch.no_grad():
            model(getattr(transformers, name + "Config")(**sizes)).eval()(input_ids=tokens, labels=tokens)
            print(calls.count(1.0), end=" ")
        calls.clear()
"""


def test_process_wide_every_model_has_it() -> None:
    written_out(zoo.BY_NAME["t5"])
    variables = {**os.environ, "T5FASTPATCH": "sdpa", "TRANSFORMERS_VERBOSITY": "error"}
    program = [sys.executable, "-c", "import t5fastpatch\n" + PROCESS_WIDE]
    done = subprocess.run(program, capture_output=True, text=True, env=variables, cwd=ROOT)
    assert set(done.stdout.split()) == {"6"}, done.stderr


class Strange:
    """An attention that reads more of its scores than their dtype."""

    def forward(self, query_states: Any, key_states: Any, value_states: Any, position_bias: Any) -> Any:
        scores = torch.matmul(query_states, key_states.transpose(3, 2))
        largest = scores.max()
        scores += position_bias
        attn_weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        attn_weights = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)  # type: ignore[attr-defined]
        return torch.matmul(attn_weights, value_states), largest


class StrangeToo:
    """An attention that does something else with its scores before the softmax."""

    def forward(self, query_states: Any, key_states: Any, value_states: Any, position_bias: Any) -> Any:
        scores = torch.matmul(query_states, key_states.transpose(3, 2))
        scores += position_bias
        scores = torch.tanh(scores)
        attn_weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        attn_weights = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)  # type: ignore[attr-defined]
        return torch.matmul(attn_weights, value_states)


@pytest.mark.parametrize(("cls", "why"), [(Strange, "something else"), (StrangeToo, "not followed")])
def test_what_is_only_like_the_pattern_is_refused(cls: type, why: str) -> None:
    found = registry.get_patch("sdpa").find(Method.of(cls), Role.ATTENTION)
    assert found.state is State.REFUSED
    assert why in str(found.refusal)
