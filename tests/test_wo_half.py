"""`wo_half`: models from `from_pretrained(dtype=torch.float16)` in one dtype, and the true fp32 weights not lost."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from test_contracts import same
from torch import nn

import t5fastpatch
from t5fastpatch import State
from t5fastpatch.errors import UnprovenError
from t5fastpatch.headroom.stacks import stacks_of
from t5fastpatch.measure.census import census
from t5fastpatch.patches import wo_half

T5, GATED = zoo.BY_NAME["t5"], zoo.BY_NAME["t5-v1.1"]


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def from_pretrained(folder: Path, name: str, dtype: torch.dtype = torch.float16) -> Any:
    cls = getattr(transformers, name)
    key = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    return cls.from_pretrained(folder, **{key: dtype}).eval()


@pytest.fixture(params=["t5", "t5-v1.1", "mt5"])
def kind(request: pytest.FixtureRequest) -> zoo.Kind:
    return zoo.BY_NAME[request.param]


@pytest.fixture
def model(kind: zoo.Kind, tmp_path: Path) -> Any:
    """A model as upstream loads it, its `wo` in fp32."""
    loaded = from_pretrained(saved(kind.build(), tmp_path / "stock"), kind.model)
    assert all(each.dtype == torch.float32 for each in wo_weights(loaded))
    return loaded


def dense_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "wo") and hasattr(module, "act")]


def wo_weights(model: nn.Module) -> list[nn.Parameter]:
    return [dense.wo.weight for dense in dense_modules(model)]


def outputs(model: Any, kind: zoo.Kind = T5) -> Any:
    with torch.no_grad():
        return model(**kind.batch(torch.float16))


def flops_by_dtype(model: Any, kind: zoo.Kind) -> dict[str, int]:
    with torch.no_grad():
        return dict(census(lambda: model(**kind.batch(torch.float16))).flops_by_dtype)


def on(report: Any) -> list[str]:
    return [row.patch for row in report.rows if row.state is State.ON]


def test_it_brings_every_block_to_one_dtype_and_fp32_products_to_none(model: Any, kind: zoo.Kind) -> None:
    assert flops_by_dtype(model, kind)["float32"] > 0
    report = t5fastpatch.apply(model)
    assert report["wo_half"].state is State.ON
    for stack in stacks_of(model):
        assert {each.dtype for each in stack.module.parameters()} == {torch.float16}
    assert set(flops_by_dtype(model, kind)) == {"float16"}


@pytest.mark.parametrize("preset", ["fast", "accurate"])
def test_presets_bring_fp32_products_to_none(model: Any, kind: zoo.Kind, preset: str) -> None:
    t5fastpatch.apply(model, preset)
    assert set(flops_by_dtype(model, kind)) == {"float16"}
    assert outputs(model, kind).logits.isfinite().all()


def test_only_the_router_of_switch_stays_in_fp32(tmp_path: Path) -> None:
    kind = zoo.BY_NAME["switch"]
    kind.check_dtype(torch.float16)
    model = from_pretrained(saved(kind.build(), tmp_path), kind.model)
    t5fastpatch.apply(model)
    wide = {name for name, each in model.named_parameters() if each.dtype == torch.float32}
    assert all("router" in name for name in wide)


def test_results_stay_near_those_of_fp32(kind: zoo.Kind, tmp_path: Path) -> None:
    stock = kind.build()
    model = from_pretrained(saved(stock, tmp_path), kind.model)
    with torch.no_grad():
        exact = stock(**kind.batch()).logits
    mixed = outputs(model, kind).logits
    t5fastpatch.apply(model)
    half = outputs(model, kind).logits
    assert (half - exact).abs().mean() <= 2 * (mixed - exact).abs().mean() + 1e-3


def test_state_dict_and_what_is_saved_hold_the_true_weights(model: Any, kind: zoo.Kind, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    t5fastpatch.apply(model)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(same(before[name], after[name]) for name in before)
    again = from_pretrained(saved(model, tmp_path / "patched"), kind.model).state_dict()
    assert all(same(before[name], again[name]) for name in before)
    part = model.encoder.block[0].layer[-1].state_dict(prefix="here.")
    assert part["here.DenseReluDense.wo.weight"].dtype == torch.float32


def test_removing_restores_every_bit_in_the_same_parameters(model: Any, kind: zoo.Kind) -> None:
    stock, parameters = outputs(model, kind), wo_weights(model)
    before = [each.detach().clone() for each in parameters]
    attributes = [set(vars(module)) for module in model.modules()]
    t5fastpatch.apply(model)
    assert all(each is parameter for each, parameter in zip(wo_weights(model), parameters))
    t5fastpatch.remove(model)
    assert all(each is parameter for each, parameter in zip(wo_weights(model), parameters))
    assert all(same(each.detach(), was) for each, was in zip(parameters, before))
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert same(stock, outputs(model, kind))


def test_applying_twice_keeps_the_true_weights(model: Any) -> None:
    before = [each.detach().clone() for each in wo_weights(model)]
    t5fastpatch.apply(model)
    t5fastpatch.apply(model)
    t5fastpatch.remove(model)
    assert all(same(each.detach(), was) for each, was in zip(wo_weights(model), before))


def test_by_name_it_is_refused_without_a_proof(tmp_path: Path) -> None:
    large = T5.build()
    with torch.no_grad():
        for each in wo_weights(large):
            each.mul_(2.0**13)
    model = from_pretrained(saved(large, tmp_path), T5.model)
    with pytest.raises(UnprovenError, match=r"wo_half.*65504"):
        t5fastpatch.apply(model, "wo_half")
    assert {each.dtype for each in wo_weights(model)} == {torch.float32}
    assert t5fastpatch.apply(model, ["residual_rescale", "wo_half"])["wo_half"].state is State.ON
    assert {each.dtype for each in wo_weights(model)} == {torch.float16}


class Wrapped(nn.Module):
    """A linear of someone else's, around upstream's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.base_layer(x)
        return states


class Packed(nn.Module):
    """A linear whose weight is nothing that can be read."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.packed = base.weight.detach().clone()

    def weight(self) -> torch.Tensor:
        return self.packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() @ self.packed.float().t()).to(x.dtype)


@pytest.mark.parametrize("wrapper", [Wrapped, Packed])
@pytest.mark.parametrize("names", [("wo",), ("wi", "wi_0", "wi_1")], ids=str)
def test_wrapped_and_quantized_linears_are_left_alone(
    model: Any, kind: zoo.Kind, wrapper: type, names: tuple[str, ...]
) -> None:
    for dense in dense_modules(model):
        for name in names:
            if hasattr(dense, name):
                setattr(dense, name, wrapper(getattr(dense, name)))
    t5fastpatch.apply(model, "wo_without_weight")  # some releases ask for the dtype of wo's weight
    stock = outputs(model, kind)
    report = t5fastpatch.apply(model)
    assert report["wo_half"].state is not State.ON
    assert all(type(dense.wo) is (wrapper if "wo" in names else nn.Linear) for dense in dense_modules(model))
    t5fastpatch.remove(model, [name for name in on(report) if name != "wo_without_weight"])
    assert same(stock, outputs(model, kind))


def test_copies_have_weights_of_their_own(model: Any, kind: zoo.Kind) -> None:
    before = [each.detach().clone() for each in wo_weights(model)]
    t5fastpatch.apply(model)
    twin, patched = copy.deepcopy(model), outputs(model, kind)
    t5fastpatch.remove(model)
    assert same(patched, outputs(twin, kind))
    t5fastpatch.remove(twin)
    assert all(same(each.detach(), was) for each, was in zip(wo_weights(twin), before))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(wo_weights(twin), wo_weights(model)))


def test_a_pickle_holds_the_true_weights(model: Any, kind: zoo.Kind) -> None:
    stock, attributes = outputs(model, kind), [set(vars(module)) for module in model.modules()]
    before = model.state_dict()
    t5fastpatch.apply(model)
    again = pickle.loads(pickle.dumps(model))
    assert [set(vars(module)) for module in again.modules()] == attributes
    assert all(same(before[name], value) for name, value in again.state_dict().items())
    assert same(stock, outputs(again, kind))


def test_torch_save_holds_the_true_weights(model: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    t5fastpatch.apply(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert all(same(before[name], value) for name, value in torch.load(file).items())


def test_what_training_changes_is_what_is_saved(model: Any, kind: zoo.Kind) -> None:
    """The kept fp32 weights stand for those of half precision only as long as these are what they were."""
    before = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("wo.weight")}
    t5fastpatch.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**kind.batch(torch.float16)).loss.backward()
    optimizer.step()
    after = model.state_dict()
    for name, weight in before.items():
        trained, half = model.get_parameter(name).detach(), weight.half()
        changed = trained != half
        assert changed.any()
        assert torch.equal(after[name][changed], trained.float()[changed])
        assert torch.equal(after[name][~changed], weight[~changed])
    t5fastpatch.remove(model)
    assert all(torch.equal(model.state_dict()[name], after[name]) for name in before)


def test_an_optimizer_made_before_trains_the_same_parameters(model: Any, kind: zoo.Kind) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(**kind.batch(torch.float16)).loss.backward()
    t5fastpatch.apply(model)
    before = [each.detach().clone() for each in wo_weights(model)]
    model(**kind.batch(torch.float16)).loss.backward()
    optimizer.step()
    assert all(not torch.equal(each, was) for each, was in zip(wo_weights(model), before))
    t5fastpatch.remove(model)
    model(**kind.batch(torch.float16)).loss.backward()
    optimizer.step()
    assert all(each.grad.dtype == each.dtype == torch.float32 for each in wo_weights(model))


def test_a_load_into_wo_itself_is_what_is_saved(model: Any) -> None:
    t5fastpatch.apply(model)
    name = "encoder.block.0.layer.1.DenseReluDense.wo"
    loaded = torch.full_like(model.get_submodule(name).weight, 0.1, dtype=torch.float32)
    model.get_submodule(name).load_state_dict({"weight": loaded})
    assert torch.equal(model.state_dict()[f"{name}.weight"].half(), loaded.half())


def test_moving_the_model_moves_the_weights(model: Any) -> None:
    before = model.state_dict()
    t5fastpatch.apply(model)
    model.to("cpu").float()
    assert all(torch.equal(value.float(), before[name].float()) for name, value in model.state_dict().items())
    t5fastpatch.remove(model)
    assert all(torch.equal(value.float(), before[name].float()) for name, value in model.state_dict().items())


def test_in_bfloat16_the_same_holds(kind: zoo.Kind, tmp_path: Path) -> None:
    model = from_pretrained(saved(kind.build(), tmp_path), kind.model, torch.bfloat16)
    dtypes = {each.dtype for each in wo_weights(model)}
    t5fastpatch.apply(model)
    if torch.float32 not in dtypes:
        assert all(not hasattr(dense, wo_half._KEPT) for dense in dense_modules(model))
    assert {each.dtype for each in wo_weights(model)} == {torch.bfloat16}


def test_a_model_of_one_dtype_needs_it_not(kind: zoo.Kind) -> None:
    for model in (kind.build(), kind.build().half()):
        report = t5fastpatch.apply(model)
        assert report["wo_half"].state is State.NEEDLESS
        assert "no fp32 linear" in report["wo_half"].why
