"""`fused_qkv` and `fused_gate`: fewer products, and weights that nobody can tell from upstream's."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from test_contracts import same
from torch import nn

import t5fastpatch
from t5fastpatch import State, fusion
from t5fastpatch.headroom.stacks import Attention, stacks_of
from t5fastpatch.measure.workloads import decoder_step, encoder_forward

BOTH = ["fused_qkv", "fused_gate"]
GATED = zoo.BY_NAME["t5-v1.1"]


@pytest.fixture(params=zoo.KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> zoo.Kind:
    return request.param


def outputs(model: Any, kind: zoo.Kind = GATED, dtype: torch.dtype = torch.float32) -> Any:
    with torch.no_grad():
        return model(**kind.batch(dtype))


def products(call: Any) -> int:
    """How many matrix products of two dims a call takes: those of linears."""
    counted = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal counted
            counted += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Count():
        call()
    return counted


def attentions(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "q") or hasattr(each, "query")]


def gated(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "wi_1")]


def in_blocks(module: nn.Module) -> bool:
    """LongT5's local attention and transient-global attention, which stay as they are."""
    return type(module).__name__ in ("LongT5LocalAttention", "LongT5TransientGlobalAttention")


def sets_of_weights(model: nn.Module) -> list[list[nn.Parameter]]:
    names = (("q", "k", "v"), ("query", "key", "value"), ("wi_0", "wi_1"))
    modules = [module for module in model.modules() if not in_blocks(module)]
    found = [[getattr(module, name, None) for name in each] for module in modules for each in names]
    return [[linear.weight for linear in linears] for linears in found if None not in linears]


def are_joined(model: nn.Module) -> list[bool]:
    """Whether the weights of each set lie one behind the other."""
    return [
        all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in itertools.pairwise(weights))
        for weights in sets_of_weights(model)
    ]


def storages_are_their_own(model: nn.Module) -> bool:
    return all(
        weight.untyped_storage().nbytes() == weight.nbytes and weight.storage_offset() == 0
        for weights in sets_of_weights(model)
        for weight in weights
    )


def test_every_family_takes_fewer_products(kind: zoo.Kind) -> None:
    model = kind.build()
    stock = products(lambda: model(**kind.batch()))
    t5fastpatch.apply(model, BOTH)
    late = t5fastpatch.status(model)["fused_qkv"].sites == 2  # older UMT5 takes the query after key and value
    parts = [part for stack in stacks_of(model) for layer in stack.layers for part in layer]
    attention = [each for each in parts if isinstance(each, Attention) and not in_blocks(each.module)]
    saved = [1 if each.cross or late else 2 for each in attention]
    saved += [1 for module in model.modules() if hasattr(module, "wi_1")]
    assert stock - products(lambda: model(**kind.batch())) == sum(saved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_is_no_further_from_fp64_than_stock(kind: zoo.Kind, dtype: torch.dtype) -> None:
    kind.check_dtype(dtype)
    model = kind.build()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(**kind.batch(torch.float64)).logits
    model = model.to(dtype)
    stock = outputs(model, kind, dtype).logits
    t5fastpatch.apply(model, BOTH)
    fused = outputs(model, kind, dtype).logits
    assert fused.dtype == stock.dtype
    errors = [
        (each.double() - exact).abs().flatten().quantile(torch.tensor([0.5, 0.99]).double()) for each in (stock, fused)
    ]
    assert (errors[1] <= 1.1 * errors[0] + 1e-7).all()


def test_a_decoder_step_takes_two_products_fewer_a_layer() -> None:
    model = zoo.BY_NAME["t5"].build()
    batch = zoo.BY_NAME["t5"].batch()

    def taken() -> int:
        with torch.no_grad():
            return products(decoder_step(model, batch).prepare())

    stock = taken()
    t5fastpatch.apply(model, "fused_qkv")
    assert stock - taken() == 2 * len(model.decoder.block)


@pytest.mark.parametrize("cache", [True, False])
def test_generation_gives_the_same_tokens(cache: bool) -> None:
    model = GATED.build()
    inputs = zoo.text_inputs()
    arguments = {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2, "use_cache": cache}
    stock = model.generate(**inputs, **arguments)
    t5fastpatch.apply(model, BOTH)
    assert torch.equal(stock, model.generate(**inputs, **arguments))


def test_training_is_upstreams_to_the_bit(kind: zoo.Kind) -> None:
    model = kind.build()
    twin = copy.deepcopy(model)
    t5fastpatch.apply(model, BOTH)
    for each in (model, twin):
        each(**kind.batch()).loss.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_the_parameters_are_the_same_objects_and_values(kind: zoo.Kind) -> None:
    model = kind.build()
    parameters = dict(model.named_parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    t5fastpatch.apply(model, BOTH)
    assert all(are_joined(model))
    assert all(parameters[name] is each for name, each in model.named_parameters())
    assert before.keys() == model.state_dict().keys()
    assert all(same(before[name], value) for name, value in model.state_dict().items())


def test_each_weight_has_a_storage_of_its_own() -> None:
    """Views of one storage would pass for duplicates, and savers drop those."""
    model = GATED.build()
    t5fastpatch.apply(model, BOTH)
    assert storages_are_their_own(model)
    keys = [each.untyped_storage().data_ptr() for weights in sets_of_weights(model) for each in weights]
    assert len(set(keys)) == len(keys)


def test_removing_gives_each_weight_memory_of_its_own() -> None:
    model = GATED.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    t5fastpatch.apply(model, BOTH)
    memory = weakref.ref(fusion._joined[attentions(model)[0]].matrix.untyped_storage())
    t5fastpatch.remove(model)
    gc.collect()
    assert memory() is None
    assert not any(module in fusion._joined for module in model.modules())
    assert all(same(before[name], value) for name, value in model.state_dict().items())


def test_save_pretrained_writes_what_upstream_writes(kind: zoo.Kind, tmp_path: Path) -> None:
    model = kind.build()
    model.save_pretrained(tmp_path / "stock")
    t5fastpatch.apply(model, BOTH)
    model.save_pretrained(tmp_path / "patched")
    again = type(model).from_pretrained(tmp_path / "patched").eval()
    theirs = type(model).from_pretrained(tmp_path / "stock").state_dict()
    assert all(same(theirs[name], value) for name, value in again.state_dict().items())
    files = [
        sorted((each.name, each.stat().st_size) for each in (tmp_path / folder).glob("*.*"))
        for folder in ("stock", "patched")
    ]
    assert files[0] == files[1]


def test_a_safetensors_file_holds_every_weight(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = GATED.build()
    t5fastpatch.apply(model, BOTH)
    layer = model.encoder.block[0]
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    assert safetensors.load_file(tmp_path / "layer.safetensors").keys() == layer.state_dict().keys()


def test_torch_save_of_one_weight_writes_that_weight_alone() -> None:
    model = GATED.build()
    sizes = []
    for _ in range(2):
        file = io.BytesIO()
        torch.save(attentions(model)[0].k.weight, file)
        sizes.append(len(file.getvalue()))
        t5fastpatch.apply(model, BOTH)
    assert sizes[0] == sizes[1]


def test_a_pickle_is_upstreams_and_a_copy_stays_joined() -> None:
    model = GATED.build()
    t5fastpatch.apply(model, BOTH)
    patched, count = outputs(model), products(lambda: model(**GATED.batch()))
    again, twin = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    assert t5fastpatch.status(again)["fused_qkv"].state is not State.ON
    assert all(are_joined(twin))
    assert products(lambda: twin(**GATED.batch())) == count
    assert same(patched, outputs(twin))
    with torch.no_grad():
        for each in twin.parameters():
            each.zero_()
    assert same(patched, outputs(model))


@pytest.mark.parametrize("move", [lambda model: model.half(), lambda model: model.to(torch.bfloat16).to("cpu")])
def test_a_cast_model_stays_joined_and_keeps_no_old_memory(move: Any) -> None:
    model = GATED.build()
    t5fastpatch.apply(model, BOTH)
    memory = weakref.ref(fusion._joined[attentions(model)[0]].matrix)
    move(model)
    gc.collect()
    assert memory() is None
    assert all(are_joined(model))
    assert storages_are_their_own(model)


def test_loading_and_optimizers_change_what_is_multiplied() -> None:
    model, other = GATED.build(), GATED.build(seed=1)
    t5fastpatch.apply(model, BOTH)
    model.load_state_dict(other.state_dict())
    assert all(are_joined(model))
    assert torch.allclose(outputs(model).logits, outputs(other).logits, atol=1e-5)
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        each(**GATED.batch()).loss.backward()
        optimizer.step()
    assert all(are_joined(model))
    assert torch.allclose(outputs(model).logits, outputs(other).logits, atol=1e-4)


def test_weights_that_are_replaced_are_multiplied_and_the_old_let_go() -> None:
    model, other = GATED.build(), GATED.build(seed=1)
    t5fastpatch.apply(model, BOTH)
    memory = weakref.ref(fusion._joined[attentions(model)[0]].matrix)
    for ours, theirs in zip(model.parameters(), other.parameters()):
        ours.data = theirs.data.clone()
    assert same(outputs(model), outputs(other))
    gc.collect()
    assert memory() is None


class Doubled(nn.Linear):
    """A linear of someone else's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["k", "wi_1"])
def test_a_linear_of_another_class_is_called(name: str, before: bool) -> None:
    model, other = GATED.build(), GATED.build()
    if not before:
        t5fastpatch.apply(model, BOTH)
    for each in (model, other):
        for module in list(each.modules()):
            if hasattr(module, name):
                linear = getattr(module, name)
                twice = Doubled(linear.in_features, linear.out_features, bias=False).eval()
                twice.weight = linear.weight
                setattr(module, name, twice)
    if before:
        t5fastpatch.apply(model, BOTH)
    assert torch.equal(outputs(model).logits, outputs(other).logits)


def test_hooks_of_a_linear_are_called() -> None:
    model = GATED.build()
    t5fastpatch.apply(model, BOTH)
    seen: list[Any] = []
    linears = [attentions(model)[0].v, gated(model)[0].wi_1]
    handles = [each.register_forward_hook(lambda *arguments: seen.append(arguments[0])) for each in linears]
    count = products(lambda: model(**GATED.batch()))
    assert seen == linears
    for each in handles:
        each.remove()
    assert products(lambda: model(**GATED.batch())) < count


def test_a_stack_without_plain_linears_needs_it_not() -> None:
    model = GATED.build().half()
    for module in attentions(model.decoder):
        module.v = nn.Sequential(module.v)
    report = t5fastpatch.apply(model)
    assert report["fused_qkv"].state is State.ON
    assert "decoder: no q, k, v that are plain linears" in report["fused_qkv"].why
    assert all(joined for each in attentions(model.encoder) for joined in are_joined(each))


def test_presets_join_only_what_pays() -> None:
    model = GATED.build()
    assert t5fastpatch.apply(model)["fused_qkv"].state is State.NEEDLESS
    report = t5fastpatch.apply(model.half())
    assert report["fused_qkv"].state is State.ON
    assert report["fused_gate"].state is State.NEEDLESS
    assert "by its name alone" in report["fused_gate"].why


def test_weights_in_a_flat_buffer_are_left_there() -> None:
    """Optimizers that flatten the parameters would train a buffer that nobody reads."""
    model = GATED.build()
    flat = torch.cat([each.data.flatten() for each in model.parameters()])
    place = 0
    for each in model.parameters():
        each.data = flat[place : place + each.numel()].view(each.shape)
        place += each.numel()
    before = [each.data_ptr() for each in model.parameters()]
    t5fastpatch.apply(model, BOTH)
    assert before == [each.data_ptr() for each in model.parameters()]


def test_weights_that_layers_share_stay_shared() -> None:
    model, other = GATED.build(), GATED.build()
    for each in (model, other):
        first = each.encoder.block[0].layer[0].SelfAttention
        for name in "qkv":
            getattr(each.encoder.block[1].layer[0].SelfAttention, name).weight = getattr(first, name).weight
    t5fastpatch.apply(model, BOTH)
    assert (
        model.encoder.block[1].layer[0].SelfAttention.q.weight is model.encoder.block[0].layer[0].SelfAttention.q.weight
    )
    assert torch.allclose(outputs(model).logits, outputs(other).logits, atol=1e-5)
    t5fastpatch.remove(model)
    assert same(outputs(model), outputs(other))


@pytest.mark.parametrize("rescaling", ["residual_rescale", "residual_fp32"])
@pytest.mark.parametrize("first", [True, False])
def test_on_a_rescaled_stack_rescaling_wins(rescaling: str, first: bool) -> None:
    alone, together = GATED.build(), GATED.build()
    t5fastpatch.apply(alone, rescaling, scale=2**-4)
    for name in [rescaling, "fused_gate"] if first else ["fused_gate", rescaling]:
        t5fastpatch.apply(together, name, scale=2**-4)
    assert same(outputs(alone), outputs(together))
    t5fastpatch.remove(together, rescaling)
    assert torch.allclose(outputs(together).logits, outputs(GATED.build()).logits, atol=1e-5)
    assert products(lambda: together(**GATED.batch())) < products(lambda: alone(**GATED.batch()))


def test_the_default_on_a_model_that_outgrows_fp16_is_finite() -> None:
    model = GATED.build()
    with torch.no_grad():
        for each in gated(model):
            each.wi_1.weight.mul_(2.0**12)
    model.half()
    report = t5fastpatch.apply(model, ["safe", "fused_gate"])
    assert report["residual_rescale"].state is State.ON
    assert report["fused_gate"].state is State.ON
    assert outputs(model, dtype=torch.float16).logits.isfinite().all()


def test_autocast_and_tracing_go_upstreams_way() -> None:
    model = GATED.build()
    inputs = zoo.text_inputs()
    stock = products(lambda: model.encoder(**inputs))
    t5fastpatch.apply(model, BOTH)

    def autocast() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.encoder(**inputs)

    assert products(autocast) == stock
    dense = gated(model)[0]
    traced = torch.jit.trace(dense, torch.ones(1, 2, 32))
    assert str(traced.inlined_graph).count("aten::linear") == 3


@pytest.mark.parametrize("names", [BOTH, ["safe"]], ids=str)
def test_a_compiled_model_keeps_one_graph(names: list[str]) -> None:
    model = GATED.build()
    t5fastpatch.apply(model, names)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model.encoder, backend=backend, fullgraph=True)
    with torch.no_grad():
        inputs = zoo.text_inputs()
        given, expected = compiled(**inputs), model.encoder(**inputs)
    assert len(graphs) == 1
    assert torch.allclose(given[0], expected[0], atol=1e-5)


@pytest.mark.parametrize("name", BOTH)
def test_the_peak_is_stocks_but_for_the_linear_half_beside_the_activation(name: str) -> None:
    model = GATED.build()
    batch = GATED.batch()
    peaks = []
    for _ in range(2):
        with torch.no_grad():
            peaks.append(peak(encoder_forward(model, batch).prepare()))
        t5fastpatch.apply(model, name)
    hidden_product = 2 * 16 * 64 * 4
    assert peaks[1] - peaks[0] <= (hidden_product if name == "fused_gate" else 0)


def peak(call: Any) -> int:
    """Bytes of tensors alive at once, at most, among those that a call makes."""
    live = most = 0
    known: set[int] = set()

    def gone(key: int, size: int) -> None:
        nonlocal live
        known.discard(key)
        live -= size

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal live, most
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, tuple | list) else [result]:
                if isinstance(each, torch.Tensor):
                    storage = each.untyped_storage()
                    if storage._cdata not in known:
                        known.add(storage._cdata)
                        live += storage.nbytes()
                        most = max(most, live)
                        weakref.finalize(storage, gone, storage._cdata, storage.nbytes())
            return result

    with Watch():
        call()
    return most
