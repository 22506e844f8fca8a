"""The bound from the weights: nothing that enters a model may beat it, and what it cannot bound it must name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import transformers
import zoo
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import t5fastpatch
from t5fastpatch.errors import NotT5Error
from t5fastpatch.headroom import norms
from t5fastpatch.headroom.places import Headroom, Place, bits
from t5fastpatch.headroom.stacks import Attention, FeedForward, Stack, stacks_of
from t5fastpatch.headroom.weights import bound

DEMO = Path(t5fastpatch.__file__).parent / "demo_model"
TOKENS_ONLY = {"t5", "t5-v1.1", "mt5", "umt5", "longt5-local", "longt5-global", "switch"}
Peaks = dict[tuple[str, int | None, Place], float]


def table(headroom: Headroom) -> Peaks:
    return {(each.stack, each.layer, each.place): each.value for each in headroom.magnitudes}


def peak(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


@contextlib.contextmanager
def watched(sub_layer: Attention | FeedForward, see: Any) -> Iterator[None]:
    """Hands every tensor of a sub-layer that has a bound to `see(place, tensor)`."""

    def outputs(module: nn.Module, *places: Place) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            for place in places:
                see(place, output[0] if isinstance(output, tuple) else output)

        return module.register_forward_hook(hook)

    def inputs(module: nn.Module, place: Place) -> Any:
        return module.register_forward_pre_hook(lambda _module, args: see(place, args[0]))

    if isinstance(sub_layer, Attention):
        products = (sub_layer.query, sub_layer.key, sub_layer.value)
        handles = [outputs(each, Place.PROJECTIONS) for each in products]
        handles += [outputs(sub_layer.output, Place.ATTENTION), *_scores(sub_layer, see)]
    else:
        handles = [outputs(sub_layer.sparse or sub_layer.dense[0], Place.FEED_FORWARD)]
        for dense in sub_layer.dense:
            handles += [inputs(dense.wo, Place.HIDDEN), outputs(dense.act, Place.GATE)]
    if sub_layer.dropout is not None:
        place = Place.ATTENTION if isinstance(sub_layer, Attention) else Place.FEED_FORWARD
        handles.append(outputs(sub_layer.dropout, place))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scores(attention: Attention, see: Any) -> list[Any]:
    """Every query with every key of the call, whatever the mask leaves of it."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _args: Any, output: torch.Tensor) -> None:
            seen[name] = output.unflatten(-1, (attention.module.n_heads, -1)).transpose(-2, -3)
            if len(seen) == 2:  # releases differ in which comes first
                see(Place.SCORES, seen["query"] @ seen["key"].mT)

        return hook

    def begin(*_: Any) -> None:
        seen.clear()

    of_call = attention.module.register_forward_pre_hook(begin)
    hooks = [getattr(attention, name).register_forward_hook(keep(name)) for name in ("query", "key")]
    return [of_call, *hooks]


def observed(model: nn.Module, calls: Any) -> Peaks:
    """The largest magnitudes by stack, block and place while `calls()` runs; under the names of the bound."""
    peaks: Peaks = defaultdict(float)

    def note(key: tuple[str, int | None, Place]) -> Any:
        def see(_place: Place, tensor: torch.Tensor) -> None:
            peaks[key[0], key[1], _place] = max(peaks[key[0], key[1], _place], peak(tensor))

        return see

    def stream(stack: Stack, layer: int | None) -> Any:
        return lambda _module, args: note((stack.name, layer, Place.STREAM))(Place.STREAM, args[0])

    with contextlib.ExitStack() as hooks:
        for stack in stacks_of(model):
            for number, layer in enumerate(stack.layers):
                for index, each in enumerate(layer):
                    hooks.enter_context(watched(each, note((stack.name, number, Place.STREAM))))
                    before = number if index else number - 1 if number else None
                    hooks.callback(each.norm.register_forward_pre_hook(stream(stack, before)).remove)
            last = stream(stack, len(stack.layers) - 1)
            hooks.callback(stack.final_norm.register_forward_pre_hook(last).remove)
        calls()
    return peaks


def assert_held(peaks: Peaks, headroom: Headroom) -> None:
    bounds = table(headroom)
    assert peaks
    for (stack, layer, place), seen in peaks.items():
        gate_of_ungated = place is Place.GATE and (stack, layer, place) not in bounds
        unbounded = place is Place.STREAM and stack in headroom.unproven
        if not gate_of_ungated and not unbounded:
            assert seen <= bounds[stack, layer, place], (stack, layer, place)


def scaled(model: Any, scale: float) -> Any:
    with torch.no_grad():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.weight.mul_(scale)
    return model


@pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
@hypothesis.settings(max_examples=3, derandomize=True)
@hypothesis.given(scale=st.sampled_from([1e-2, 0.3, 1.0, 10.0, 1e2]), seed=st.integers(0, 99), training=st.booleans())
def test_no_input_of_any_family_beats_the_bound(kind: zoo.Kind, scale: float, seed: int, training: bool) -> None:
    model = scaled(kind.build(seed), scale).train(training)
    headroom = bound(model)
    with torch.no_grad():
        assert_held(observed(model, lambda: model(**kind.batch())), headroom)
    entries = {stack.name for stack in stacks_of(model) if stack.entry != "tokens"}
    assert set(headroom.unproven) == entries
    assert (kind.name in TOKENS_ONLY) == (not entries)


@hypothesis.settings(max_examples=25, derandomize=True)
@hypothesis.given(
    width=st.sampled_from([8, 24, 48]),
    hidden=st.sampled_from([8, 96]),
    heads=st.sampled_from([1, 3]),
    activation=st.sampled_from(["relu", "gated-gelu", "gated-silu", "gelu_new"]),
    scale=st.sampled_from([1e-2, 1.0, 1e2]),
    gain=st.sampled_from([0.02, 1.0, 30.0]),
    dropout=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_no_shape_of_a_model_beats_the_bound(
    width: int, hidden: int, heads: int, activation: str, scale: float, gain: float, dropout: float, seed: int
) -> None:
    shape = {"d_model": width, "d_ff": hidden, "num_heads": heads, "d_kv": 4, "dropout_rate": dropout}
    kind = zoo.BY_NAME["t5"]
    model = scaled(kind.build(seed, **shape, feed_forward_proj=activation, num_layers=1), scale).train()
    with torch.no_grad():
        for stack in stacks_of(model):
            for layer in stack.layers:
                for each in layer:
                    each.norm.weight.mul_(gain)
        assert_held(observed(model, lambda: model(**kind.batch())), bound(model))


@pytest.mark.parametrize("kind", [kind for kind in zoo.KINDS if kind.name != "longt5-local"], ids=str)
def test_fp16_keeps_to_the_bound_of_the_fp32_weights(kind: zoo.Kind) -> None:
    kind.check_dtype(torch.float16)
    model = kind.build()
    headroom = bound(model)
    with torch.no_grad():
        model.half()
        assert_held(observed(model, lambda: model(**kind.batch(torch.float16))), headroom)
        assert_held(observed(model, lambda: model(**kind.batch(torch.float16))), bound(model))


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_tokens_that_no_expert_takes_keep_to_the_bound(scale: float) -> None:
    kind = zoo.BY_NAME["switch"]
    model = scaled(kind.build(expert_capacity=1, router_jitter_noise=0.5), scale).train()
    with torch.no_grad():
        assert_held(observed(model, lambda: model(**kind.batch())), bound(model))


def ascended(stack: Stack, sub_layer: Attention | FeedForward, place: Place, steps: int = 100) -> float:
    """The largest magnitude that gradient ascent finds on the states that enter a sub-layer, from eight starts."""
    torch.manual_seed(0)
    states = torch.randn(8, 8, stack.final_norm.weight.shape[0], requires_grad=True)
    optimizer = torch.optim.Adam([states], lr=0.1)
    best = 0.0
    seen: list[torch.Tensor] = []
    module = sub_layer.module if isinstance(sub_layer, Attention) else sub_layer.dense[0]
    arguments = {"mask": torch.ones(8, 8)} if "Global" in type(module).__name__ else {}
    if isinstance(sub_layer, Attention):
        arguments |= zoo.block_arguments(module, 8)
    with watched(sub_layer, lambda where, tensor: seen.append(tensor) if where is place else None):
        for _ in range(steps):
            seen.clear()
            module(sub_layer.norm(states), **arguments)
            largest = torch.stack([each.abs().flatten(1).amax(1) for each in seen]).amax(0)
            best = max(best, peak(largest))
            optimizer.zero_grad()
            (-largest / largest.detach()).sum().backward()
            optimizer.step()
    return best


# Of the bound, at least this much is found: the bounds of single products are as tight as can be.
ATTAINED = {
    Place.PROJECTIONS: 0.7, Place.GATE: 0.7, Place.SCORES: 0.7, Place.HIDDEN: 0.7, Place.ATTENTION: 0.3,
    Place.FEED_FORWARD: 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", ["t5", "t5-v1.1", "longt5-global"])
@pytest.mark.parametrize("place", [place for place in Place if place not in (Place.STREAM, Place.LOGITS)], ids=str)
def test_gradient_ascent_on_what_enters_a_sub_layer_never_beats_the_bound(name: str, place: Place) -> None:
    model = zoo.BY_NAME[name].build()
    stack = stacks_of(model)[0]
    bounds = table(bound(model))
    if (stack.name, 0, place) not in bounds:
        pytest.skip("only a gated feed-forward has a gate")
    index = 0 if place in (Place.PROJECTIONS, Place.SCORES, Place.ATTENTION) else 1
    found = ascended(stack, stack.layers[0][index], place)
    assert ATTAINED[place] * bounds[stack.name, 0, place] < found <= bounds[stack.name, 0, place]


def test_no_choice_of_tokens_beats_the_bound_of_the_stream() -> None:
    model = zoo.BY_NAME["t5-v1.1"].build()
    encoder, bounds = model.encoder, table(bound(model))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(zoo.VOCABULARY, (64, 6), generator=generator)

    def peaks(ids: torch.Tensor) -> torch.Tensor:
        found = encoder(input_ids=ids, output_hidden_states=True).hidden_states
        return torch.stack([each.abs().flatten(1).amax(1) for each in found[:-1]]).amax(0)

    with torch.no_grad():
        for _ in range(20):  # keep the better half, change one token of each
            best = tokens[peaks(tokens).topk(32).indices]
            mutants = best.clone()
            column = torch.randint(6, (32, 1), generator=generator)
            mutants.scatter_(1, column, torch.randint(zoo.VOCABULARY, (32, 1), generator=generator))
            tokens = torch.cat([best, mutants])
        assert_held(observed(model, lambda: encoder(input_ids=tokens)), bound(model))
        assert peak(peaks(tokens)) <= bounds["encoder", 1, Place.STREAM]


def test_a_callers_embeddings_as_large_as_the_assumption_says_keep_to_the_bound() -> None:
    model = zoo.BY_NAME["t5"].build()
    headroom, largest = bound(model), peak(model.shared.weight)
    assert f"of at most {largest:.9g}" in headroom.assumes["encoder"][-1]
    embeddings = largest * torch.randn(2, 5, 32).sign()
    with torch.no_grad():
        peaks = observed(model, lambda: model.encoder(inputs_embeds=embeddings))
    assert_held(peaks, headroom)
    assert peaks["encoder", None, Place.STREAM] == pytest.approx(largest)


@hypothesis.settings(max_examples=40, derandomize=True)
@hypothesis.given(
    rows=st.integers(1, 80), columns=st.integers(1, 60), scale=st.integers(-12, 12), decay=st.floats(0, 2),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_certified_norm_is_no_less_than_the_norm_and_hardly_more(
    rows: int, columns: int, scale: int, decay: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix, other = torch.randn(2, rows, columns, dtype=torch.float64, generator=generator) * 10.0**scale
    matrix *= torch.arange(1, rows + 1).double()[:, None] ** -decay
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    assert exact <= norms.squared_norm(norms.grams(matrix.split(7))) ** 0.5 <= 1.05 * exact
    paired = float(torch.linalg.matrix_norm(matrix.T @ other, 2))
    assert paired <= float(norms.largest_pairing(matrix @ matrix.T, other @ other.T)) <= 1.1 * paired


def test_a_wide_matrix_is_bounded_by_blocks_of_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "WIDEST", 16)
    monkeypatch.setattr(norms, "BLOCK", 8)
    matrix = torch.randn(40, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    blocks = norms.grams([matrix])
    assert [len(each) for each in blocks] == [8, 8, 4]
    assert exact <= norms.squared_norm(blocks) ** 0.5 <= 3**0.5 * 1.05 * exact


def test_the_embedded_model_cannot_overflow() -> None:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(DEMO).eval()
    headroom = bound(model)
    assert not headroom.unproven
    assert min(bits(each.value) for each in headroom.magnitudes) > 5
    ids = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_held(observed(model, lambda: model(input_ids=ids, labels=ids)), headroom)


@pytest.mark.parametrize("name", ["t5", "switch", "longt5-global"])
def test_a_patched_model_has_the_bound_of_the_unpatched_one(name: str) -> None:
    model = zoo.BY_NAME[name].build()
    before = bound(model)
    t5fastpatch.apply(model)
    assert bound(model) == before


def test_half_weights_have_the_bound_of_the_same_weights_in_fp32() -> None:
    model = zoo.BY_NAME["t5-v1.1"].build().bfloat16()
    model.encoder.block[0].layer[1].DenseReluDense.wo.float()
    half = table(bound(model))
    assert half == pytest.approx(table(bound(model.float())), rel=1e-12)


def test_sums_of_blocks_of_states_that_fp16_cannot_hold_are_no_proof() -> None:
    model = zoo.BY_NAME["longt5-global"].build()
    largest = 65504 / (32**0.5 * 4)  # d_model and block size
    with torch.no_grad():
        model.encoder.block[0].layer[0].layer_norm.weight.fill_(0.9 * largest)
    assert not bound(model).unproven
    with torch.no_grad():
        model.encoder.block[0].layer[0].layer_norm.weight.fill_(1.1 * largest)
    assert "sums of blocks" in bound(model).unproven["encoder"]


def test_a_head_that_scales_its_states_has_smaller_logits() -> None:
    plain, tied = (zoo.BY_NAME["t5"].build(tie_word_embeddings=tied) for tied in (False, True))
    with torch.no_grad():
        plain.load_state_dict(tied.state_dict())
        plain.lm_head.weight.copy_(tied.lm_head.weight)
    logits = [table(bound(each))["decoder", None, Place.LOGITS] for each in (plain, tied)]
    assert logits[1] == pytest.approx(logits[0] / 32**0.5)
    for model in (plain, tied):
        with torch.no_grad():
            largest = peak(model(**zoo.BY_NAME["t5"].batch()).logits)
        assert 0.05 * table(bound(model))["decoder", None, Place.LOGITS] < largest
        assert largest <= table(bound(model))["decoder", None, Place.LOGITS]


def test_autocast_around_it_changes_nothing() -> None:
    model = zoo.BY_NAME["t5-v1.1"].build()
    with torch.autocast("cpu", torch.float16):
        assert bound(model) == bound(model)
        inside = bound(model)
    assert inside == bound(model)


def test_an_encoder_alone_has_no_logits() -> None:
    model = transformers.T5EncoderModel(zoo.BY_NAME["t5"].config())
    headroom = bound(model)
    assert not headroom.unproven
    assert not list(headroom.of("encoder", Place.LOGITS))


def test_only_hidden_products_that_rescaling_reaches_are_not_fixed() -> None:
    fixed = {
        projection: {each.fixed for each in bound(model).magnitudes if each.place is Place.HIDDEN}
        for projection in ("relu", "gated-gelu", "gelu")
        for model in [zoo.BY_NAME["t5"].build(feed_forward_proj=projection)]
    }
    assert fixed == {"relu": {False}, "gated-gelu": {False}, "gelu": {True}}


def test_accelerates_offloaded_weights_are_read_where_they_lie() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = zoo.BY_NAME["t5"].build()
    before = bound(model)
    offloaded = accelerate.cpu_offload(model, execution_device="cpu")
    assert offloaded.encoder.block[0].layer[0].SelfAttention.q.weight.is_meta
    assert table(bound(offloaded)) == table(before)


class Adapter(nn.Module):
    """What stands in a linear's place where a library adapts or quantizes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return 3 * self.base(states)


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def adapted(attention: Any, feed_forward: Any) -> None:
    attention.SelfAttention.q = Adapter(attention.SelfAttention.q)


def parametrized(attention: Any, feed_forward: Any) -> None:
    parametrize.register_parametrization(attention.SelfAttention.v, "weight", Twice())


def biased(attention: Any, feed_forward: Any) -> None:
    attention.SelfAttention.o.bias = nn.Parameter(torch.ones(32))


def broken(attention: Any, feed_forward: Any) -> None:
    feed_forward.DenseReluDense.wo.weight.data[3, 4] = torch.nan


def huge(attention: Any, feed_forward: Any) -> None:
    attention.SelfAttention.k.weight.data[0, 0] = 1e5


def meta(attention: Any, feed_forward: Any) -> None:
    feed_forward.DenseReluDense.wi.to("meta")


def another_norm(attention: Any, feed_forward: Any) -> None:
    feed_forward.layer_norm = nn.LayerNorm(32)


def enormous_gain(attention: Any, feed_forward: Any) -> None:
    attention.layer_norm.weight.data.fill_(1e4)


def odd_activation(attention: Any, feed_forward: Any) -> None:
    feed_forward.DenseReluDense.act = nn.Softplus()


def own_forward(attention: Any, feed_forward: Any) -> None:
    feed_forward.forward = lambda hidden_states, *_: 2 * hidden_states


def full_dropout(attention: Any, feed_forward: Any) -> None:
    feed_forward.dropout.p = 1.0


def sequential(attention: Any, feed_forward: Any) -> None:
    feed_forward.DenseReluDense = nn.Sequential(nn.Linear(32, 32))


REASONS = {
    adapted: "layer.0.SelfAttention.q is a Adapter",
    parametrized: "not the family's own|not a plain nn.Linear|Parametriz",
    biased: "SelfAttention.o is an nn.Linear with a bias",
    broken: "DenseReluDense.wo holds NaN or infinity",
    huge: "SelfAttention.k holds 1e.05, which fp16 cannot hold",
    meta: "its weights are on the meta device",
    another_norm: "is a LayerNorm, not the family's RMS norm",
    enormous_gain: "the output of .*layer_norm can reach",
    odd_activation: "has an activation .Softplus.",
    own_forward: "layer.1 has a forward of its own",
    full_dropout: "dropout of 1",
    sequential: "block 1 is not one self-attention and one feed-forward",
}


@pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)
def test_what_cannot_be_bounded_is_named(change: Any) -> None:
    model = zoo.BY_NAME["t5"].build()
    change(*model.encoder.block[1].layer)
    headroom = bound(model)
    assert set(headroom.unproven) == {"encoder"}
    with pytest.raises(AssertionError, match=REASONS[change]):
        raise AssertionError(headroom.unproven["encoder"])
    assert not list(headroom.of("encoder", Place.STREAM))
    assert list(headroom.of("decoder", Place.STREAM))


def test_a_decoder_that_reads_a_stranger_is_not_proven() -> None:
    model = zoo.BY_NAME["t5"].build()
    stacks = [dataclasses.replace(stack, source=None) for stack in stacks_of(model)]
    assert bound(model, stacks).unproven == {
        "decoder": "its cross-attention reads an encoder that is not of its family"
    }


def test_broken_embeddings_leave_only_the_stream_without_a_bound() -> None:
    model = zoo.BY_NAME["t5"].build()
    model.shared.weight.data[5, 5] = torch.inf
    headroom = bound(model)
    assert "holds NaN or infinity" in headroom.unproven["encoder"]
    assert list(headroom.of("encoder", Place.ATTENTION))
    assert not list(headroom.of("encoder", Place.STREAM))


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(NotT5Error, match="no encoder or decoder"):
        bound(nn.Linear(2, 2))
