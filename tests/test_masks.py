"""Scores, masks and biases beyond fp16's range, and a `wo` without a weight: fp16 gives what fp32 gives."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import t5fastpatch
from t5fastpatch import registry
from t5fastpatch.families import role_of
from t5fastpatch.findings import upstream_class
from t5fastpatch.measure.census import census
from t5fastpatch.patch import Role, State
from t5fastpatch.rewrite import Method
from t5fastpatch.scores import attention_scores, wide_bias, wide_scores

ROOT = Path(__file__).parent.parent
SCORES = ["eager_scores", "local_scores"]
HALF = torch.float16
PADDINGS = ("none", "right", "left", "all")

every_kind = pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
# A rounding may flip a router's choice, and with it the whole output: compared where nothing jumps.
every_smooth_kind = pytest.mark.parametrize(
    "kind", [kind for kind in zoo.KINDS if kind.family != "switch_transformers"], ids=str
)


def mask_of(padding: str, length: int = 16) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    if padding == "right":
        mask[1, 3:] = 0
    elif padding == "left":
        mask[1, :-3] = 0
    elif padding == "all":
        mask[1] = 0
    return mask


def build(kind: zoo.Kind, lower_bias: float = 0.0, **more: Any) -> Any:
    """A model with eager attention whose weights fp16 holds exactly, and whose position biases are lowered."""
    model = kind.build(**more)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.sub_(lower_bias)
    for each in model.modules():  # in 5.17 a model's own setting does not reach its stacks
        if hasattr(each, "set_attn_implementation"):
            each.set_attn_implementation("eager")
    return model.half().float()


def playing(model: nn.Module, role: Role) -> list[Any]:
    """The modules of a model that play a role."""
    pairs = ((module, upstream_class(type(module))) for module in model.modules())
    return [module for module, cls in pairs if cls is not None and role_of(cls) is role]


def batch_of(kind: zoo.Kind, padding: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The kind's batch, its floats such as every dtype holds and multiplies exactly."""
    batch = {name: (x * 8).round() / 8 if x.is_floating_point() else x for name, x in kind.batch(dtype).items()}
    return {**batch, "attention_mask": mask_of(padding)}


def outputs(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    """The logits, and what the encoder gives for every token, padding too."""
    with torch.no_grad():
        result = model(**batch)
    return [result.logits, result.encoder_last_hidden_state]


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours.float() - reference).norm() / reference.norm())


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors(list(value.values()))
    return [each for part in value or () for each in tensors(part)] if isinstance(value, tuple | list) else []


def make_scores_large(model: nn.Module) -> None:
    with torch.no_grad():
        for attention in playing(model, Role.ATTENTION):
            for name in ("q", "k", "query", "key"):
                if hasattr(attention, name):
                    getattr(attention, name).weight.mul_(300)


@every_smooth_kind
def test_whatever_is_padded_fp16_is_near_fp32(kind: zoo.Kind) -> None:
    model = build(kind, lower_bias=64)  # below fp16's smallest number from 16 on
    expected = {padding: outputs(model, batch_of(kind, padding)) for padding in PADDINGS}
    t5fastpatch.apply(model.half(), SCORES)
    for padding in PADDINGS:
        for ours, reference in zip(outputs(model, batch_of(kind, padding, HALF)), expected[padding]):
            assert ours.isfinite().all()
            assert error(ours, reference) < 0.02


@every_kind
def test_scores_that_fp16_cannot_hold_are_finite_and_point_as_in_fp32(kind: zoo.Kind) -> None:
    kind.check_dtype(HALF)
    model = build(kind)
    make_scores_large(model)
    wide = copy.deepcopy(model.half()).float()
    batch = batch_of(kind, "none", HALF)
    assert not all(tensor.isfinite().all() for tensor in outputs(model, batch))
    t5fastpatch.apply(model, SCORES)
    for padding in PADDINGS:
        ours = outputs(model, batch_of(kind, padding, HALF))
        assert all(tensor.isfinite().all() for tensor in ours)
        # Such a softmax picks one key, and a rounding may pick another where two are close; a router too.
        reference = outputs(wide, batch_of(kind, padding))[1]
        assert torch.cosine_similarity(ours[1].float(), reference, dim=-1).median() > 0.98


def test_a_masked_key_stays_masked_whatever_its_score() -> None:
    """fp16's smallest number is no mask among scores as large: fp32's takes its place."""
    query, mask = torch.full((1, 1, 1, 8), 200.0, dtype=HALF), torch.zeros(1, 1, 1, 2, dtype=HALF)
    key = torch.stack([torch.full((8,), -100.0), torch.full((8,), 100.0)]).to(HALF)[None, None]
    mask[..., 1] = torch.finfo(HALF).min
    for bias in (mask, mask - 100, mask + 100):
        scores = attention_scores(query, key) + wide_bias(bias)
        assert torch.equal(scores.softmax(-1).flatten(), torch.tensor([1.0, 0.0]))


def test_a_bias_that_is_no_mask_keeps_its_values_and_wider_dtypes_are_left_alone() -> None:
    bias = torch.tensor([0.0, -1000.0, -3e4, 3e4, 6e-8], dtype=HALF)
    assert torch.equal(wide_bias(bias), bias.float())
    for dtype in (torch.float32, torch.bfloat16):
        bias = torch.full((3,), torch.finfo(dtype).min, dtype=dtype)
        assert wide_bias(bias) is bias


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_other_dtypes_keep_every_bit(kind: zoo.Kind, dtype: torch.dtype) -> None:
    kind.check_dtype(dtype)
    model, batch = build(kind).to(dtype), batch_of(kind, "left", dtype)
    wanted = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        stock = tensors(model(**batch, **wanted))
        t5fastpatch.apply(model, [*SCORES, "wo_without_weight"])
        patched = tensors(model(**batch, **wanted))
    assert len(stock) == len(patched) > 5
    assert all(torch.equal(a, b) for a, b in zip(stock, patched))


def gradients(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    model(**batch).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@every_kind
def test_in_fp32_gradients_in_training_keep_every_bit(kind: zoo.Kind) -> None:
    model, batch = build(kind, dropout_rate=0.1).train(), batch_of(kind, "right")
    stock = gradients(model, batch)
    t5fastpatch.apply(model, [*SCORES, "wo_without_weight"])
    patched = gradients(model, batch)
    assert len(stock) == len(patched) > 20
    assert all(torch.equal(a, b) for a, b in zip(stock, patched))


@every_smooth_kind
def test_in_fp16_gradients_are_near_those_of_fp32(kind: zoo.Kind) -> None:
    # A ReLU jumps, in its gradient.
    smooth = {} if kind.family == "pix2struct" else {"feed_forward_proj": "gated-gelu"}
    model = build(kind, dropout_rate=0.0, **smooth).train()
    expected = torch.cat([each.flatten() for each in gradients(model, batch_of(kind, "right"))])
    t5fastpatch.apply(model.half(), SCORES)
    ours = torch.cat([each.flatten() for each in gradients(model, batch_of(kind, "right", HALF))])
    assert ours.isfinite().all()
    assert error(ours, expected) < 0.05


def test_the_gradient_of_the_scores_is_that_of_a_product_without_a_factor() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, length, 8, generator=generator).to(HALF).requires_grad_() for length in (4, 5))
    gradient = torch.randn(2, 3, 4, 5, generator=generator) * 1000  # 2^12 times this is beyond fp16
    found = torch.autograd.grad(wide_scores(query, key), (query, key), gradient)
    expected = torch.autograd.grad(query @ key.transpose(-1, -2), (query, key), gradient.half())
    for a, b in zip(found, expected):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=2e-3, atol=1)


@pytest.mark.parametrize("size", [1e-2, 1.0, 30.0, 3000.0])
@pytest.mark.parametrize("shape", [(2, 4, 1, 8), (2, 4, 17, 64), (2, 3, 4, 8, 8)], ids=str)
def test_wide_scores_are_a_rounding_of_fp16_from_exact(size: float, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = ((torch.randn(shape, generator=generator) * size).to(HALF) for _ in range(2))
    scores, exact = wide_scores(query, key), query.double() @ key.double().transpose(-1, -2)
    assert (scores.dtype, scores.shape) == (torch.float32, exact.shape)
    # fp16's rounding, that of its smallest numbers, and what fp32 loses to cancellation.
    lost = 1e-6 * (query.double().abs() @ key.double().abs().transpose(-1, -2))
    assert ((scores - exact).abs() <= 2**-11 * exact.abs() + 2**-13 + lost).all()


@pytest.mark.parametrize("name", ["t5", "umt5", "longt5-local", "longt5-global"])
def test_with_the_other_patches_too(name: str) -> None:
    kind = zoo.BY_NAME[name]
    model = build(kind)
    expected = outputs(model, batch_of(kind, "left"))
    report = t5fastpatch.apply(model.half(), [*SCORES, "softmax_dtype", "layer_norm", "skip_inf_check"])
    assert report["eager_scores"].state is State.ON
    for ours, reference in zip(outputs(model, batch_of(kind, "left", HALF)), expected):
        assert error(ours, reference) < 0.02


def test_they_are_part_of_the_default() -> None:
    report = t5fastpatch.apply(zoo.BY_NAME["longt5-local"].build())
    assert all(report[name].state is State.ON for name in (*SCORES, "wo_without_weight"))


@every_kind
def test_attentions_have_stocks_shapes_and_dtype(kind: zoo.Kind) -> None:
    kind.check_dtype(HALF)
    model, batch = build(kind).half(), batch_of(kind, "none", HALF)
    written_out = t5fastpatch.status(model)["eager_scores"].sites > 2
    if written_out and kind.family in ("pix2struct", "switch_transformers", "udop"):
        pytest.skip("stock of the releases before 5.15 gives position biases among the attentions")
    with torch.no_grad():
        stock = tensors(model(**batch, output_attentions=True))
        t5fastpatch.apply(model, SCORES)
        patched = tensors(model(**batch, output_attentions=True))
    assert [(each.shape, each.dtype) for each in stock] == [(each.shape, each.dtype) for each in patched]


def test_a_masked_head_stays_masked() -> None:
    kind = zoo.BY_NAME["t5"]
    model = build(kind)
    if "head_mask" not in inspect.signature(model.forward).parameters:
        pytest.skip("this release has no head masks")
    heads = torch.tensor([[0.0, 1.0, 0.5, 1.0], [1.0, 0.0, 1.0, 1.0]])
    masks = dict.fromkeys(("head_mask", "decoder_head_mask", "cross_attn_head_mask"), heads)
    expected = outputs(model, {**batch_of(kind, "right"), **masks})
    t5fastpatch.apply(model.half(), SCORES)
    for ours, reference in zip(outputs(model, {**batch_of(kind, "right", HALF), **masks}), expected):
        assert error(ours, reference) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ["t5", "longt5-local", "longt5-global"])
def test_removing_restores_every_bit_and_every_name(name: str, dtype: torch.dtype) -> None:
    kind = zoo.BY_NAME[name]
    model, batch = build(kind).to(dtype), batch_of(kind, "none", dtype)
    stock = outputs(model, batch)
    t5fastpatch.apply(model, [*SCORES, "wo_without_weight"])
    t5fastpatch.remove(model)
    assert all(torch.equal(a, b) for a, b in zip(stock, outputs(model, batch)))
    assert not any(name.startswith("t5fastpatch") for module in model.modules() for name in dir(module))


def test_copies_keep_the_patch_and_pickles_are_upstreams() -> None:
    kind = zoo.BY_NAME["t5"]
    model, batch = build(kind).half(), batch_of(kind, "all", HALF)
    t5fastpatch.apply(model, SCORES)
    assert torch.equal(outputs(model, batch)[0], outputs(copy.deepcopy(model), batch)[0])
    names = pickle.dumps(playing(model, Role.ATTENTION)[0])
    assert b"t5fastpatch" not in names
    assert not hasattr(pickle.load(io.BytesIO(names)), "t5fastpatch_scores")


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["t5", "longt5-local", "longt5-global"])
def test_compiled_the_attention_is_one_graph(name: str, training: bool) -> None:
    torch._dynamo.reset()
    model = build(zoo.BY_NAME[name], dropout_rate=0.0).half().train(training)
    t5fastpatch.apply(model, SCORES)
    attention = playing(model.get_encoder(), Role.ATTENTION)[0]
    hidden = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0)).to(HALF)
    arguments = {"hidden_states": hidden, **zoo.block_arguments(attention, 16)}
    if name == "longt5-global":
        arguments["mask"] = torch.ones(1, 16, dtype=torch.long)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(compiled(**arguments)[0], attention(**arguments)[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_the_factor_still_acts_before_the_rounding(backend: str) -> None:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    query, key = ((torch.randn(2, 3, 4, 8, generator=generator) * 300).to(HALF) for _ in range(2))
    scores = torch.compile(wide_scores, fullgraph=True, backend=backend)(query, key)
    exact = query.double() @ key.double().transpose(-1, -2)
    assert exact.abs().max() > 65504
    torch.testing.assert_close(scores.double(), exact, rtol=2e-3, atol=1)


class Opaque(nn.Module):
    """A linear that keeps its weight under another name, as quantized ones do."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = nn.Parameter(linear.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.packed)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=lambda dtype: str(dtype)[6:])
def test_a_wo_without_a_weight_gives_what_one_with_it_gives(kind: zoo.Kind, dtype: torch.dtype) -> None:
    kind.check_dtype(dtype)
    model, batch = build(kind).to(dtype), batch_of(kind, "none", dtype)
    expected = outputs(model, batch)
    dense = playing(model, Role.FEED_FORWARD)
    assert dense
    for each in dense:
        each.wo = Opaque(each.wo)
    with pytest.raises(AttributeError, match="weight"):
        outputs(model, batch)
    t5fastpatch.apply(model, ["wo_without_weight"])
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, batch), expected))


@pytest.mark.parametrize("name", ["t5", "t5-v1.1"])
def test_a_wo_in_fp32_still_gets_fp32(name: str) -> None:
    model = build(zoo.BY_NAME[name]).half()
    t5fastpatch.apply(model, ["wo_without_weight"])
    (dense, *_) = playing(model, Role.FEED_FORWARD)
    dense.wo.float()
    assert dense(torch.ones(1, 2, 32, dtype=HALF)).dtype == torch.float32


PROCESS_WIDE = """
import torch, transformers
config = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
torch.manual_seed(0)
model = transformers.T5EncoderModel(transformers.T5Config(**config)).eval().half()
for each in model.modules():
    if hasattr(each, "set_attn_implementation"):
        each.set_attn_implementation("eager")
for block in model.encoder.block:
    attention = block.layer[0].SelfAttention
    attention.q.weight.data.mul_(300)
    attention.k.weight.data.mul_(60)
print(bool(model(torch.arange(2, 18)[None])[0].isfinite().all()), end="")
"""


def test_process_wide_the_class_has_the_functions_that_its_forward_calls() -> None:
    variables = {**os.environ, "T5FASTPATCH": "eager_scores", "TRANSFORMERS_VERBOSITY": "error"}
    program = [sys.executable, "-c", "import t5fastpatch\n" + PROCESS_WIDE]
    done = subprocess.run(program, capture_output=True, text=True, env=variables, cwd=ROOT)
    assert done.stdout == "True", done.stderr


def test_in_fp32_no_call_does_more_than_stocks() -> None:
    for name in ("t5", "longt5-local", "longt5-global"):
        kind = zoo.BY_NAME[name]
        model, batch = build(kind), batch_of(kind, "left")
        with torch.no_grad():
            stock = census(lambda model=model, batch=batch: model(**batch))
            t5fastpatch.apply(model, SCORES)
            patched = census(lambda model=model, batch=batch: model(**batch))
        assert patched.ops <= stock.ops


def test_sdpa_does_not_run_them() -> None:
    kind = zoo.BY_NAME["t5"]
    model = kind.build().half()
    if not getattr(model, "_supports_sdpa", False):
        pytest.skip("this release has no SDPA for T5")
    model.set_attn_implementation("sdpa")
    batch = batch_of(kind, "left", HALF)
    stock = outputs(model, batch)
    t5fastpatch.apply(model, SCORES)
    assert all(torch.equal(a, b) for a, b in zip(stock, outputs(model, batch)))


class Strange:
    """An attention that has the einsum of LongT5's, and no cast of the weights after it."""

    def forward(self, query_states: Any, key_states: Any) -> Any:
        scores = torch.einsum("...qhd,...khd->...hqk", query_states, key_states)
        return scores


class StrangeToo:
    """An attention that multiplies queries and keys, and adds no bias."""

    def forward(self, query_states: Any, key_states: Any, value_states: Any) -> Any:
        scores = torch.matmul(query_states, key_states.transpose(3, 2))
        attn_weights = nn.functional.dropout(scores)
        return torch.matmul(attn_weights, value_states)


class StrangeDense:
    """A feed-forward that reads the weight for something else."""

    def forward(self, hidden_states: Any) -> Any:
        return self.wo(hidden_states * self.wo.weight.mean())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "cls", "why"),
    [
        ("local_scores", Strange, "not cast"),
        ("eager_scores", StrangeToo, "not followed by one bias"),
        ("wo_without_weight", StrangeDense, "outside of the known cast"),
    ],
)
def test_what_is_only_like_the_pattern_is_refused(name: str, cls: type, why: str) -> None:
    patch = registry.get_patch(name)
    found = patch.find(Method.of(cls), *patch.roles)
    assert found.state is State.REFUSED
    assert why in str(found.refusal)
