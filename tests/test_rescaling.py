"""Rescaling by a power of two changes no bit in fp32, whatever is asked of the model, and keeps fp16 finite."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import transformers
import zoo
from test_contracts import gradients, same
from torch import nn

import t5fastpatch
from t5fastpatch import registry
from t5fastpatch.errors import UnprovenError
from t5fastpatch.headroom.places import Scaling
from t5fastpatch.install import setup_on
from t5fastpatch.patch import State
from t5fastpatch.rescaling import scaled_product

every_kind = pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
BOTH = ["residual_rescale", "residual_fp32"]
both = pytest.mark.parametrize("patch", BOTH)
T5, GATED = zoo.BY_NAME["t5"], zoo.BY_NAME["t5-v1.1"]
SCALE = 2.0**-6


def rescaled(model: Any, patch: str = "residual_rescale", scale: float = SCALE) -> Any:
    t5fastpatch.apply(model, patch, scale=scale)
    return model


def asked(kind: zoo.Kind, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {**kind.batch(dtype), "output_hidden_states": True, "output_attentions": attentions(kind)}


def attentions(kind: zoo.Kind) -> bool:
    # Where attention runs through SDPA, asking for its weights takes another path in stock, with a warning.
    return kind.family != "pix2struct"


@st.composite
def configurations(draw: st.DrawFn) -> tuple[zoo.Kind, dict[str, Any]]:
    kind = draw(st.sampled_from([each for each in zoo.KINDS if hasattr(transformers, each.model)]))
    depth = draw(st.integers(1, 4))
    if kind.family == "pix2struct":
        return kind, {}
    return kind, {
        "num_layers": depth,
        "num_decoder_layers": draw(st.integers(1, 4)),
        "feed_forward_proj": draw(st.sampled_from(["relu", "gelu", "gated-gelu", "gated-silu"])),
        "tie_word_embeddings": draw(st.booleans()),
        "dropout_rate": 0.1,
    }


def padded(batch: dict[str, Any], lengths: tuple[int, int], left: bool) -> dict[str, Any]:
    mask = torch.zeros_like(batch["attention_mask"])
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    return {**batch, "attention_mask": mask if left else mask.flip(1)}


@hypothesis.settings(max_examples=20, derandomize=True)
@hypothesis.given(
    configurations(),
    st.sampled_from(BOTH),
    st.integers(0, 12),
    st.tuples(st.integers(1, 16), st.integers(1, 16)),
    st.booleans(),
)
def test_in_fp32_no_bit_of_outputs_and_gradients_changes(
    built: tuple[zoo.Kind, dict[str, Any]], patch: str, shift: int, lengths: tuple[int, int], left: bool
) -> None:
    kind, more = built
    model, batch = kind.build(**more), padded(asked(kind), lengths, left)
    with torch.no_grad():
        stock = model(**batch)
    stock_gradients = gradients(model.train(), batch)
    rescaled(model.eval(), patch, 2.0**-shift)
    with torch.no_grad():
        assert same(stock, model(**batch))
    assert same(stock_gradients, gradients(model.train(), batch))


@hypothesis.settings(max_examples=8, derandomize=True)
@hypothesis.given(configurations(), st.integers(0, 12))
def test_in_bf16_no_bit_changes_either(built: tuple[zoo.Kind, dict[str, Any]], shift: int) -> None:
    kind, more = built
    if kind.family == "switch_transformers" and transformers.__version__ == "5.0.0":
        return  # stock raises
    model, batch = kind.build(**more).to(torch.bfloat16), asked(kind, torch.bfloat16)
    with torch.no_grad():
        stock = model(**batch)
        assert same(stock, rescaled(model, scale=2.0**-shift)(**batch))


def test_a_scale_of_one_changes_no_bit_in_fp16_either() -> None:
    model, batch = T5.build().half(), asked(T5)
    with torch.no_grad():
        stock = model(**batch)
        patched = rescaled(model, scale=1.0)(**batch)
    assert same(stock, patched)


ENCODERS = ["T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel", "LongT5EncoderModel", "UdopEncoderModel"]


@both
@pytest.mark.parametrize("name", [*ENCODERS, "SwitchTransformersEncoderModel", "Pix2StructVisionModel"])
def test_encoders_alone_give_the_same_bits(name: str, patch: str) -> None:
    prefix = name.removesuffix("EncoderModel").removesuffix("VisionModel")
    family = {"SwitchTransformers": "switch", "LongT5": "longt5-local", "T5": "t5", "MT5": "mt5", "UMT5": "umt5"}
    whole = zoo.BY_NAME[family.get(prefix, prefix.lower())]
    config = (lambda: zoo.pix2struct_config().vision_config) if prefix == "Pix2Struct" else whole.config
    kind = zoo.Kind(name, whole.family, name, config, whole.inputs)
    model = kind.build()
    batch = {**asked(kind), "labels": None}
    del batch["labels"]
    with torch.no_grad():
        stock = model(**batch)
        assert same(stock, rescaled(model, patch)(**batch))


@pytest.mark.parametrize(
    "name", ["T5Model", "T5ForQuestionAnswering", "T5ForSequenceClassification", "T5ForTokenClassification"]
)
def test_other_heads_give_the_same_bits(name: str) -> None:
    kind = zoo.Kind(name, "t5", name, T5.config)
    model, inputs = kind.build(), zoo.text_inputs()
    inputs["input_ids"][:, -1] = 1  # a classification head wants an end of sequence
    if name == "T5Model":
        inputs["decoder_input_ids"] = zoo.ids(6, 3)
    with torch.no_grad():
        stock = model(**inputs)
        assert same(stock, rescaled(model)(**inputs))


@both
def test_states_and_embeddings_of_the_caller_give_the_same_bits(patch: str) -> None:
    model, inputs = T5.build(), zoo.text_inputs()
    states = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(5))
    decoded = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(6))
    mask = {"attention_mask": inputs["attention_mask"]}
    calls = [
        {"encoder_outputs": (states,), "labels": zoo.ids(6, 3), **mask},
        {"inputs_embeds": states, "labels": zoo.ids(6, 3), **mask},
        {**inputs, "decoder_inputs_embeds": decoded},
        {"encoder_outputs": (states,), "decoder_inputs_embeds": decoded, **mask},
    ]
    with torch.no_grad():
        stock = [model(**call) for call in calls]
        rescaled(model, patch)
        assert all(same(before, model(**call)) for before, call in zip(stock, calls))


@pytest.mark.parametrize("name", ["t5", "longt5-local", "longt5-global", "udop"])
def test_a_plain_tuple_gives_the_same_bits(name: str) -> None:
    kind = zoo.BY_NAME[name]
    model, batch = kind.build(), {**asked(kind), "return_dict": False}
    with torch.no_grad():
        stock = model(**batch)
        assert same(stock, rescaled(model)(**batch))


@pytest.mark.parametrize("return_dict", [False, True])
def test_router_logits_are_no_hidden_states(return_dict: bool) -> None:
    encoder = zoo.BY_NAME["switch"].build().get_encoder()
    batch = {**zoo.text_inputs(), "output_router_logits": True, "output_hidden_states": True}
    with torch.no_grad():
        stock = encoder(**batch, return_dict=return_dict)
        assert same(stock, rescaled(encoder)(**batch, return_dict=return_dict))


def step_by_step(model: Any) -> list[torch.Tensor]:
    """Logits of single decoder steps, each on the cache of those before."""
    inputs, decoded = zoo.text_inputs(), zoo.ids(5, 3)
    cache, logits = None, []
    with torch.no_grad():
        states = model.get_encoder()(**inputs)
        for step in range(5):
            outputs = model(
                encoder_outputs=states,
                attention_mask=inputs["attention_mask"],
                decoder_input_ids=decoded[:, step : step + 1],
                past_key_values=cache,
                use_cache=True,
            )
            cache = outputs.past_key_values
            logits.append(outputs.logits)
    return logits


@both
@pytest.mark.parametrize("name", ["t5", "t5-v1.1", "umt5", "longt5-global"])
def test_steps_on_a_cache_give_the_same_bits(name: str, patch: str) -> None:
    model = zoo.BY_NAME[name].build()
    stock = step_by_step(model)
    assert same(stock, step_by_step(rescaled(model, patch)))


GENERATION = {
    "beam search": {"num_beams": 3, "length_penalty": 0.6},
    "sampling": {"do_sample": True, "top_k": 20},
    "greedy, with everything": {
        "return_dict_in_generate": True,
        "output_hidden_states": True,
        "output_scores": True,
        "output_attentions": True,
    },
}


@pytest.mark.parametrize("way", GENERATION)
@pytest.mark.parametrize("name", ["t5-v1.1", "mt5", "longt5-local", "pix2struct"])
def test_generation_gives_the_same_tokens_and_bits(name: str, way: str) -> None:
    kind = zoo.BY_NAME[name]
    model, inputs = kind.build(), kind.inputs()
    settings = {**GENERATION[way], "max_new_tokens": 6, "min_length": 6}

    def generated() -> Any:
        torch.manual_seed(3)
        return model.generate(**inputs, **settings)

    stock = generated()
    rescaled(model)
    patched = generated()
    if isinstance(stock, torch.Tensor):
        assert torch.equal(stock, patched)
    else:
        assert torch.equal(stock.sequences, patched.sequences)
        assert same(dict(stock), dict(patched))


@both
@pytest.mark.parametrize("name", ["t5", "t5-v1.1", "switch", "longt5-global"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, patch: str) -> None:
    kind = zoo.BY_NAME[name]
    model, batch = kind.build(dropout_rate=0.1).train(), kind.batch()
    model.gradient_checkpointing_enable()
    stock = gradients(model, batch)
    rescaled(model, patch)
    assert same(stock, gradients(model, batch))


@both
def test_the_state_dict_is_upstreams_key_by_key(patch: str) -> None:
    model = GATED.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = rescaled(model, patch).state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@both
def test_what_is_saved_and_pickled_is_the_stock_model(patch: str, tmp_path: Path) -> None:
    model, batch = GATED.build(), GATED.batch()
    with torch.no_grad():
        stock = model(**batch).logits
        rescaled(model, patch)
        model.save_pretrained(tmp_path)
        saved = type(model).from_pretrained(tmp_path)
        pickled = pickle.loads(pickle.dumps(model))
        for each in (saved, pickled):
            assert t5fastpatch.status(each)[patch].state is not State.ON
            assert torch.equal(each(**batch).logits, stock)


def test_copies_are_rescaled_and_independent() -> None:
    model, batch = T5.build(), asked(T5)
    with torch.no_grad():
        stock = model(**batch)
        twin = copy.deepcopy(rescaled(model))
        t5fastpatch.remove(model)
        assert setup_on(twin.encoder).scaling == Scaling(SCALE, SCALE)
        assert same(stock, twin(**batch))


class LoRA(nn.Module):
    """An adapter as peft has it: a linear beside the linear that it holds."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(seed)
        self.a = nn.Parameter(torch.randn(4, base.in_features, generator=generator) / 8)
        self.b = nn.Parameter(torch.randn(base.out_features, 4, generator=generator) / 8)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.a.t() @ self.b.t()

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.base_layer.weight += self.b @ self.a
        return self.base_layer


class IA3(nn.Module):
    """A learned factor for each output, or for each input of a feed-forward."""

    def __init__(self, base: nn.Linear, seed: int, of_inputs: bool = False) -> None:
        super().__init__()
        self.base_layer, self.of_inputs = base, of_inputs
        size = base.in_features if of_inputs else base.out_features
        self.weight = base.weight
        self.factor = nn.Parameter(torch.rand(size, generator=torch.Generator().manual_seed(seed)) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x * self.factor) if self.of_inputs else self.base_layer(x) * self.factor


class Opaque(nn.Module):
    """A linear without a `weight`, as some quantized ones are."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.packed = base.weight.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed.t()


def linears(model: nn.Module, *names: str) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in names and isinstance(child, nn.Linear)
    ]


def adapt(model: nn.Module, adapter: Any, *names: str) -> nn.Module:
    for seed, (parent, name, child) in enumerate(linears(model, *names)):
        setattr(parent, name, adapter(child, seed))
    return model


@pytest.mark.parametrize("order", ["adapter, then patch", "patch, then adapter"])
@pytest.mark.parametrize("name", ["t5", "t5-v1.1", "switch"])
@pytest.mark.parametrize(
    ("adapter", "names"),
    [
        (LoRA, ("q", "v", "o")),
        (LoRA, ("wi", "wi_1", "wo")),
        (LoRA, ("wi_0", "wo")),
        (IA3, ("k", "v", "o", "wi", "wi_1")),
        (functools.partial(IA3, of_inputs=True), ("wo",)),
        (Opaque, ("q", "o", "wi_0", "wi_1", "wi")),
    ],
)
def test_adapted_linears_give_the_same_bits(adapter: Any, names: tuple[str, ...], name: str, order: str) -> None:
    kind = zoo.BY_NAME[name]
    batch = kind.batch()
    with torch.no_grad():
        stock = adapt(kind.build(), adapter, *names)(**batch)
        model = kind.build()
        if order.startswith("patch"):
            adapt(rescaled(model), adapter, *names)
        else:
            rescaled(adapt(model, adapter, *names))
        assert same(stock, model(**batch))


def test_gradients_of_an_adapter_are_the_same_bits() -> None:
    model, batch = adapt(GATED.build(), LoRA, "q", "v", "o", "wi_1", "wo").train(), GATED.batch()
    stock = gradients(model, batch)
    assert same(stock, gradients(rescaled(model), batch))


def test_an_adapter_may_be_merged_afterwards() -> None:
    model, batch = adapt(GATED.build(), LoRA, "o", "wo"), GATED.batch()
    rescaled(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRA):
                setattr(parent, name, child.merged())
    with torch.no_grad():
        patched = model(**batch)
        t5fastpatch.remove(model)
        assert same(model(**batch), patched)


@pytest.mark.parametrize("order", ["quantize, then patch", "patch, then quantize"])
@pytest.mark.parametrize("name", ["t5", "t5-v1.1"])
def test_a_dynamically_quantized_model_stays_near_stock(name: str, order: str) -> None:
    if torch.backends.quantized.engine == "none":
        pytest.skip("this build of PyTorch quantizes nothing")
    model, inputs = zoo.BY_NAME[name].build().get_encoder(), zoo.text_inputs()
    quantize = functools.partial(torch.ao.quantization.quantize_dynamic, qconfig_spec={nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        stock = model(**inputs).last_hidden_state
        t5fastpatch.apply(model, "wo_without_weight")  # some releases ask for the dtype of wo's weight
        model = rescaled(quantize(model)) if order.startswith("quantize") else quantize(rescaled(model))
        patched = model(**inputs).last_hidden_state
    cosine = torch.nn.functional.cosine_similarity(stock, patched, dim=-1)
    assert setup_on(model).scaling.stream == SCALE
    assert cosine.min() > 0.97


def test_hooks_on_the_linears_are_called() -> None:
    model, batch = T5.build(), T5.batch()
    calls: list[str] = []
    for _, name, linear in linears(model, "o", "wo"):
        linear.register_forward_hook(lambda module, inputs, output, name=name: calls.append(name))
    rescaled(model)
    with torch.no_grad():
        patched = model(**batch)
        assert len(calls) == len(linears(model, "o", "wo"))
        t5fastpatch.remove(model)
        assert same(model(**batch), patched)


@pytest.mark.parametrize("order", ["offload, then patch", "patch, then offload"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights_give_the_same_bits(order: str, where: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, batch = GATED.build(), GATED.batch()
    with torch.no_grad():
        stock = model(**batch)

    def offload() -> None:
        if where == "cpu":
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))

    if order.startswith("patch"):
        rescaled(model)
        offload()
    else:
        offload()
        rescaled(model)
    with torch.no_grad():
        assert same(stock, model(**batch))
        t5fastpatch.remove(model)
        assert same(stock, model(**batch))


def partition(module: nn.Module, owner: nn.Module) -> None:
    """The weight of `module` is there only while `owner` runs, as DeepSpeed's third stage has it."""
    weight = module.weight
    full = weight.data.clone()

    def gather(*_: Any) -> None:
        weight.data = full

    def release(*_: Any) -> None:
        weight.data = torch.empty(0)

    release()
    owner.register_forward_pre_hook(gather)
    owner.register_forward_hook(release)


@pytest.mark.parametrize("by", ["the linear itself", "its parent"])
@pytest.mark.parametrize("name", ["t5", "t5-v1.1"])
def test_weights_that_are_gathered_for_a_call_give_the_same_bits(name: str, by: str) -> None:
    kind = zoo.BY_NAME[name]
    model, batch = kind.build(), kind.batch()
    with torch.no_grad():
        stock = model(**batch)
        for parent, _, linear in linears(model, "o", "wi", "wi_0", "wi_1", "wo"):
            partition(linear, linear if by == "the linear itself" else parent)
        assert same(stock, model(**batch))
        assert same(stock, rescaled(model)(**batch))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_gives_the_same_results(dtype: torch.dtype) -> None:
    model, batch = GATED.build(), GATED.batch()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        stock = model(**batch).logits
        patched = rescaled(model)(**batch).logits
    assert patched.dtype == stock.dtype
    if dtype == torch.bfloat16:
        assert torch.equal(stock, patched)
    else:
        assert torch.allclose(stock.float(), patched.float(), atol=0.05, rtol=0.02)


def overflowing(factor: float = 60.0) -> tuple[Any, dict[str, Any]]:
    """A gated model whose hidden products and sums pass 65504 by far, in fp32."""
    model = GATED.build()
    with torch.no_grad():
        for _, name, linear in linears(model, "wi_0", "wi_1", "wo"):
            linear.weight *= factor * (4 if name == "wo" else 1)
    return model, zoo.text_inputs()


def encoded(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        states: torch.Tensor = model.get_encoder()(**inputs).last_hidden_state
    return states


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).min().item()


@both
def test_in_fp16_what_overflows_in_stock_is_finite_and_near_fp32(patch: str) -> None:
    model, inputs = overflowing()
    true = encoded(model, inputs)
    model.half()
    assert cosine(encoded(model, inputs), true) < 0.9
    rescaled(model, patch, 2.0**-12)
    assert cosine(encoded(model, inputs), true) > 0.9999


ROWS, WIDE = 8, 256


def product(bias: bool = False, seed: int = 0) -> tuple[nn.Linear, torch.Tensor]:
    """A linear and an input in fp16, the product far beyond 65504."""
    torch.manual_seed(seed)
    linear = nn.Linear(WIDE, 64, bias=bias)
    with torch.no_grad():
        linear.weight.mul_(1000)
    return linear.half(), (torch.randn(2, ROWS, WIDE) * 500).half()


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_that_overflows_is_scaled_before_it_is_rounded(bias: bool) -> None:
    linear, x = product(bias)
    with torch.no_grad():
        exact = copy.deepcopy(linear).double()(x.double()) * SCALE
        assert linear(x).isinf().sum() > 100
        scaled = scaled_product(linear, x, SCALE)
    assert scaled.dtype == torch.float16
    assert ((scaled.double() - exact).abs() <= 1e-3 * exact.abs() + 0.05).all()


@pytest.mark.parametrize("shape", [(0, WIDE), (2, 0, WIDE), (1, WIDE), (WIDE,), (2, 3, 4, WIDE)], ids=str)
def test_a_product_has_the_shape_of_the_linear_it_stands_for(shape: tuple[int, ...]) -> None:
    linear, x = nn.Linear(WIDE, 64, bias=False), torch.randn(shape)
    assert torch.equal(scaled_product(linear, x, SCALE), linear(x) * SCALE)


class Products(nn.Module):
    """A scaled product and what follows one: a residual sum."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + scaled_product(self.linear, x, SCALE)


def compiled(module: nn.Module, *arguments: torch.Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True)


def exported(module: nn.Module, *arguments: torch.Tensor) -> Any:
    return torch.export.export(module, arguments).module()


def loosely_exported(module: nn.Module, *arguments: torch.Tensor) -> Any:
    return torch.export.export(module, arguments, strict=False).module()


def decomposed(module: nn.Module, *arguments: torch.Tensor) -> Any:
    return torch.export.export(module, arguments).run_decompositions().module()


def traced(module: nn.Module, *arguments: torch.Tensor) -> Any:
    return torch.jit.trace(module, arguments)


@pytest.mark.parametrize("way", [compiled, exported, loosely_exported, decomposed, traced])
@pytest.mark.parametrize("rows", [1, 8])
def test_no_compiler_rounds_before_it_scales(way: Any, rows: int) -> None:
    linear, x = product()
    x = x[:1, :rows]
    with torch.no_grad():
        exact = copy.deepcopy(linear).double()(x.double()) * SCALE
        result = way(Products(linear), x, torch.zeros(1, rows, 64).half())(x, torch.zeros(1, rows, 64).half())
    assert ((result.double() - exact).abs() <= 1e-3 * exact.abs() + 0.05).all()


@pytest.mark.parametrize("way", [compiled, exported, decomposed])
def test_a_whole_encoder_compiles_to_one_graph_and_stays_finite(way: Any) -> None:
    model, inputs = overflowing()
    true = encoded(model, inputs)
    encoder = model.half().get_encoder()
    # Without the checks, which break the graph in some releases.
    t5fastpatch.apply(encoder, ["residual_rescale", "skip_inf_check"], scale=2.0**-12)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            states: torch.Tensor = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
            return states

    arguments = (inputs["input_ids"], inputs["attention_mask"])
    with torch.no_grad():
        states = way(Encoder(), *arguments)(*arguments)
    assert cosine(states, true) > 0.9999


@pytest.mark.parametrize(
    "scaling", [Scaling(2.0**-8, 2.0**-3), Scaling(2.0**-8, 1.0), Scaling(2.0**-8, 0.5, True)], ids=str
)
@pytest.mark.parametrize("kind", [T5, GATED], ids=str)
def test_the_hidden_product_and_the_sums_have_scales_of_their_own(kind: zoo.Kind, scaling: Scaling) -> None:
    model, batch = kind.build(), kind.batch()
    patch = registry.get_patch("residual_fp32" if scaling.wide else "residual_rescale")
    dense = model.encoder.block[0].layer[-1].DenseReluDense
    with torch.no_grad():
        stock, stock_branch, stock_hidden = model(**batch), *branch_and_hidden(model, dense)
        rescaled(model, patch.name)
        _at(model, patch, scaling)
        assert same(stock, model(**batch))
        branch, hidden = branch_and_hidden(model, dense)
    assert torch.equal(branch, stock_branch * scaling.stream)
    assert torch.equal(hidden, stock_hidden * scaling.hidden)


def branch_and_hidden(model: Any, dense: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a feed-forward adds, and what its `wo` multiplies."""
    seen: dict[str, torch.Tensor] = {}
    hooks = [dense.register_forward_hook(lambda module, inputs, output: seen.update(branch=output))]
    # Not on wo: one with a hook has its input scaled.
    hooks.append(dense.dropout.register_forward_hook(lambda module, inputs, output: seen.update(hidden=output)))
    model.get_encoder()(**zoo.text_inputs())
    for hook in hooks:
        hook.remove()
    return seen["branch"], seen["hidden"]


def _at(model: nn.Module, patch: Any, scaling: Scaling) -> None:
    from t5fastpatch.install import exchange_classes, patched_class

    exchange_classes(
        [
            (module, patched_class(module, setup_on(module).plus(patch, scaling=scaling), ()))
            for module in model.modules()
            if patch in setup_on(module).patches
        ]
    )


class OtherAttention(transformers.models.t5.modeling_t5.T5Attention):  # type: ignore[misc]
    """An attention with a forward of its own: nobody knows what it multiplies."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OtherDense(transformers.models.t5.modeling_t5.T5DenseActDense):  # type: ignore[misc]
    """A feed-forward of someone else's."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.wo(self.act(self.wi(hidden_states)))
        return states


class OtherNorm(nn.Module):
    """An RMS norm of someone else's."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def put_other_attention(model: Any) -> None:
    model.encoder.block[1].layer[0].SelfAttention.__class__ = OtherAttention


def put_other_dense(model: Any) -> None:
    model.decoder.block[0].layer[-1].DenseReluDense.__class__ = OtherDense


def put_other_norm(model: Any) -> None:
    layer = model.encoder.block[1].layer[0]
    layer.layer_norm = OtherNorm(layer.layer_norm)


def put_other_final_norm(model: Any) -> None:
    model.decoder.final_layer_norm = OtherNorm(model.decoder.final_layer_norm)


PUT = [put_other_attention, put_other_dense, put_other_norm, put_other_final_norm]


@both
@pytest.mark.parametrize("put", PUT, ids=lambda put: put.__name__[4:])
def test_a_stack_with_a_part_that_is_not_upstreams_is_left_alone(put: Any, patch: str) -> None:
    """Half a rescaled stack would compute nonsense."""
    model, batch = T5.build(), T5.batch()
    put(model)
    with torch.no_grad():
        stock = model(**batch)
        report = t5fastpatch.apply(model, patch, scale=SCALE)
        scaled = {name for name in ("encoder", "decoder") if setup_on(model.get_submodule(name)).scaling.stream != 1}
        assert scaled == {"decoder" if put in (put_other_attention, put_other_norm) else "encoder"}
        assert "Other" in report[patch].why or "other sub-layers" in report[patch].why
        assert same(stock, model(**batch))


@both
def test_an_encoder_alone_with_such_a_part_is_refused(patch: str) -> None:
    model = T5.build()
    put_other_attention(model)
    encoder = model.get_encoder()
    before = [type(module) for module in encoder.modules()]
    with pytest.raises(UnprovenError, match=patch):
        t5fastpatch.apply(encoder, patch, scale=SCALE)
    assert [type(module) for module in encoder.modules()] == before
