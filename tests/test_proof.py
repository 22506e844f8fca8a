"""What is on a model because of a proof of headroom: how it is decided, what the report says, what withdraws it."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import zoo
from test_contracts import same, tensors
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import t5fastpatch
from t5fastpatch import State, proof
from t5fastpatch.errors import MetaDeviceError, ScaleError, T5FastPatchError, UnprovenError, WrongTypeError
from t5fastpatch.headroom import steady
from t5fastpatch.headroom.places import Headroom, Place
from t5fastpatch.install import setup_on
from t5fastpatch.proof import withdraw

T5, GATED = zoo.BY_NAME["t5"], zoo.BY_NAME["t5-v1.1"]
CHECKS = "skip_inf_check"
SCALES = ("residual_rescale", "residual_fp32")


def small(kind: zoo.Kind = T5) -> Any:
    """A model in fp16 that fits as it is, by the bound from its weights."""
    return kind.build().half()


def large(kind: zoo.Kind = T5, shift: int = 12) -> Any:
    """A model in fp16 that fits at a smaller scale."""
    model = kind.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("wo.weight"):
                parameter.mul_(2.0**shift)
    return model.half()


def mixed(kind: zoo.Kind = T5, shift: int = 12) -> Any:
    """The same as `from_pretrained(dtype=torch.float16)` gives it: `wo` in fp32."""
    model = large(kind, shift)
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("wo.weight"):
                parameter.add_(torch.rand_like(parameter) * 1e-3)  # what half precision does not hold
    return model


def states(report: Any) -> dict[str, State]:
    return {row.patch: row.state for row in report.rows}


def on(model: Any) -> set[str]:
    return {name for name, state in states(t5fastpatch.status(model)).items() if state is State.ON}


def setups(model: Any) -> dict[str, Any]:
    return {name: setup_on(module) for name, module in model.named_modules()}


def outputs(model: Any) -> Any:
    with torch.no_grad():
        return model(**T5.batch(torch.float16), output_hidden_states=True)


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the bound from the weights say something else."""
    real = steady.bound

    def pretend(change: Callable[[Headroom], Headroom]) -> None:
        monkeypatch.setattr(steady, "bound", lambda root, stacks=None: change(real(root, stacks)))

    return pretend


def without(*places: Place) -> Callable[[Headroom], Headroom]:
    def change(found: Headroom) -> Headroom:
        kept = tuple(each for each in found.magnitudes if each.place not in places)
        names = dict.fromkeys(each.stack for each in found.magnitudes)
        return Headroom("weights", kept, found.assumes, dict.fromkeys(names, "nobody knows"))

    return change


# what the default does, case by case


@pytest.mark.parametrize("preset", [None, "safe", "fast", "all", "exact"])
def test_where_the_weights_prove_it_the_checks_go_and_no_bit_changes(preset: str | None) -> None:
    model = small()
    stock = outputs(model)
    report = t5fastpatch.apply(model, preset)
    assert states(report)[CHECKS] is State.ON
    assert "by the weights" in report[CHECKS].why
    assert not on(model) & set(SCALES)
    t5fastpatch.remove(model, [name for name in on(model) if name != CHECKS] or CHECKS)
    if CHECKS not in on(model):
        t5fastpatch.apply(model, "exact")
    assert same(stock, outputs(model))


def test_the_preset_exact_changes_no_bit() -> None:
    model = small()
    stock = outputs(model)
    report = t5fastpatch.apply(model, "exact")
    assert {row.contract for row in report.rows} == {"exact"}
    assert states(report)[CHECKS] is State.ON
    assert same(stock, outputs(model))


@pytest.mark.parametrize("preset", [None, "safe", "fast", "all"])
def test_where_a_scale_is_needed_it_is_taken_and_the_checks_go(preset: str | None) -> None:
    model = large()
    report = t5fastpatch.apply(model, preset)
    assert states(report)["residual_rescale"] is states(report)[CHECKS] is State.ON
    assert "scale 2^-" in report["residual_rescale"].why
    assert "by the weights" in report["residual_rescale"].why
    assert "by the weights" in report[CHECKS].why
    assert "residual_fp32" not in on(model)
    assert all(each.isfinite().all() for each in tensors(outputs(model)))


def test_the_preset_accurate_keeps_an_fp32_stream() -> None:
    model = large()
    report = t5fastpatch.apply(model, "accurate")
    assert states(report)["residual_fp32"] is states(report)[CHECKS] is State.ON
    assert "residual_rescale" not in states(report)
    assert outputs(model).encoder_hidden_states[1].dtype == torch.float32


def test_where_only_the_branches_are_bounded_the_stream_is_fp32(bounded: Any) -> None:
    bounded(without(Place.STREAM))
    model = large()
    report = t5fastpatch.apply(model)
    assert states(report)["residual_fp32"] is State.ON
    assert states(report)["residual_rescale"] is State.UNSAFE
    assert "nobody knows" in report["residual_rescale"].why
    assert states(report)[CHECKS] is State.ON


def test_where_nothing_is_bounded_nothing_that_needs_it_is_on(bounded: Any) -> None:
    bounded(without(*Place))
    model = mixed()
    report = t5fastpatch.apply(model)
    assert not on(model) & {CHECKS, "wo_half", "residual_fp32"}
    assert states(report)[CHECKS] is states(report)["wo_half"] is State.UNSAFE
    assert "nobody knows" in report[CHECKS].why


def test_a_patch_that_needs_a_proof_is_refused_by_name_without_one(bounded: Any) -> None:
    bounded(without(*Place))
    model = mixed()
    before = setups(model)
    with pytest.raises(UnprovenError, match=r"wo_half.*nobody knows"):
        t5fastpatch.apply(model, "wo_half")
    assert setups(model) == before


def test_batches_prove_what_the_weights_do_not(bounded: Any) -> None:
    bounded(without(*Place))
    model = large()
    report = t5fastpatch.apply(model, batches=[T5.batch(torch.float16)])
    assert states(report)["residual_rescale"] is states(report)[CHECKS] is State.ON
    for name in ("residual_rescale", CHECKS):
        assert "by the data" in report[name].why
        assert "by the weights" not in report[name].why


def test_a_given_scale_is_taken_as_given_and_judged() -> None:
    enough, little = large(), large()
    report = t5fastpatch.apply(enough, scale=2.0**-8)
    assert "scale 2^-8 as given" in report["residual_rescale"].why
    assert states(report)[CHECKS] is State.ON
    report = t5fastpatch.apply(little, scale=0.5)
    assert states(report)["residual_rescale"] is State.ON
    assert states(report)[CHECKS] is State.UNSAFE
    assert "fp16 holds 65504" in report[CHECKS].why


def test_the_report_says_what_a_proof_takes_for_granted() -> None:
    report = t5fastpatch.apply(small())
    assert any("embeddings" in each for each in report.assumes)


# what withdraws it


def whole(model: Any) -> None:
    model.load_state_dict(model.state_dict())


def assigned(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def partly(model: Any) -> None:
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    model.load_state_dict({name: model.state_dict()[name]}, strict=False)


def only_the_table(model: Any) -> None:
    model.load_state_dict({"shared.weight": model.state_dict()["shared.weight"]}, strict=False)


def into_the_decoder(model: Any) -> None:
    model.decoder.load_state_dict(model.decoder.state_dict())


def into_a_norm(model: Any) -> None:
    model.encoder.final_layer_norm.load_state_dict(model.encoder.final_layer_norm.state_dict())


def into_an_attention(model: Any) -> None:
    attention = model.encoder.block[0].layer[0].SelfAttention
    attention.load_state_dict(attention.state_dict())


def new_linear(model: Any) -> None:
    model.decoder.block[1].layer[0].SelfAttention.v = nn.Linear(32, 32, bias=False).half()


def new_parameter(model: Any) -> None:
    norm = model.encoder.block[1].layer[0].layer_norm
    norm.weight = nn.Parameter(norm.weight.detach() * 2)


def new_adapter(model: Any) -> None:
    attention = model.encoder.block[0].layer[0].SelfAttention
    attention.q = nn.Sequential(attention.q, nn.Identity())


def copied_block(model: Any) -> None:
    model.encoder.block.append(copy.deepcopy(model.encoder.block[1]))


def new_activation(model: Any) -> None:
    model.decoder.block[1].layer[-1].DenseReluDense.act = nn.Softplus()


def more_tokens(model: Any) -> None:
    model.resize_token_embeddings(zoo.VOCABULARY + 8)


LOADS = [whole, assigned, partly, only_the_table, into_the_decoder, new_linear, new_parameter, new_adapter, more_tokens]
LOADS += [into_a_norm, into_an_attention, copied_block, new_activation]
every_load = pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)


@every_load
def test_new_weights_or_modules_withdraw_the_proof(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = mixed()
    t5fastpatch.apply(model)
    assert {CHECKS, "wo_half", "residual_rescale"} <= on(model)
    scalings = {name: setup.scaling for name, setup in setups(model).items()}
    capsys.readouterr()
    load(model)
    said = capsys.readouterr().err
    assert not on(model) & {CHECKS, "wo_half"}
    after = {name: setup.scaling for name, setup in setups(model).items()}
    assert all(after[name] == scaling for name, scaling in scalings.items() if name in after)
    assert model.encoder.block[0].layer[-1].DenseReluDense.wo.weight.dtype == torch.float32
    assert said.count("t5fastpatch:") == 1
    assert "skip_inf_check, wo_half taken off" in said


def test_loaded_weights_arrive_in_full_precision() -> None:
    model, other = mixed(), mixed()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name.endswith("wo.weight"):
                parameter.mul_(1.001)
    t5fastpatch.apply(model)
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    t5fastpatch.remove(model)
    assert same(outputs(model), outputs(other))


def test_a_scale_stays_exact_when_its_proof_is_gone() -> None:
    model = T5.build()
    t5fastpatch.apply(model, "residual_rescale", scale=2.0**-5)
    other = T5.build(seed=1)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert same(model(**T5.batch()), other(**T5.batch()))


def test_it_may_be_proven_again() -> None:
    model = mixed()
    first = states(t5fastpatch.apply(model))
    whole(model)
    assert states(t5fastpatch.apply(model)) == first


def test_what_was_put_on_by_name_is_not_withdrawn() -> None:
    model = small()
    t5fastpatch.apply(model, CHECKS)
    t5fastpatch.apply(model)
    whole(model)
    assert CHECKS in on(model)


def test_what_is_named_later_is_not_withdrawn_either() -> None:
    model = small()
    t5fastpatch.apply(model)
    t5fastpatch.apply(model, CHECKS)
    whole(model)
    assert CHECKS in on(model)


def test_removing_the_scale_takes_off_what_rests_on_it() -> None:
    model = mixed()
    t5fastpatch.apply(model)
    report = t5fastpatch.remove(model, "residual_rescale")
    assert {"residual_rescale", CHECKS, "wo_half"} <= set(states(report))
    assert not on(model) & {"residual_rescale", CHECKS, "wo_half"}


def test_another_scale_takes_off_what_it_does_not_prove() -> None:
    model = mixed()
    t5fastpatch.apply(model)
    report = t5fastpatch.apply(model, "residual_rescale", scale=1.0)
    assert states(report)[CHECKS] is states(report)["wo_half"] is State.UNSAFE
    assert not on(model) & {CHECKS, "wo_half"}


def test_another_scale_keeps_what_it_proves_as_well() -> None:
    model = mixed()
    t5fastpatch.apply(model)
    t5fastpatch.apply(model, "residual_rescale", scale=2.0**-9)
    assert {CHECKS, "wo_half"} <= on(model)
    whole(model)
    assert not on(model) & {CHECKS, "wo_half"}


def test_another_scale_for_a_while_leaves_everything_as_it_was() -> None:
    model = mixed()
    t5fastpatch.apply(model)
    before, stock = setups(model), outputs(model)
    with t5fastpatch.patched(model, "residual_rescale", scale=1.0):
        assert not on(model) & {CHECKS, "wo_half"}
    assert setups(model) == before
    assert same(stock, outputs(model))
    whole(model)
    assert not on(model) & {CHECKS, "wo_half"}


def test_a_proof_for_a_while_leaves_nothing() -> None:
    model = mixed()
    before, stock = setups(model), outputs(model)
    with t5fastpatch.patched(model):
        assert {CHECKS, "wo_half"} <= on(model)
    assert setups(model) == before
    assert same(stock, outputs(model))


@pytest.mark.parametrize("preset", ["fast", "accurate", "safe"])
def test_rivals_never_meet_on_one_stack(preset: str) -> None:
    for first in SCALES:
        model = large()
        t5fastpatch.apply(model, first, scale=2.0**-9)
        report = t5fastpatch.apply(model, preset)
        assert on(model) & set(SCALES) == {first}
        others = {row.patch: row.state for row in report.rows if row.patch in set(SCALES) - {first}}
        assert set(others.values()) <= {State.CONFLICT, State.NEEDLESS}


def test_a_fallback_is_needless_where_the_first_is_on() -> None:
    report = t5fastpatch.apply(large())
    assert states(report)["residual_fp32"] is State.NEEDLESS
    assert "residual_rescale is enough" in report["residual_fp32"].why


# copies, threads, memory


@every_load
def test_a_copy_has_a_proof_of_its_own(load: Any) -> None:
    model = mixed()
    t5fastpatch.apply(model)
    before, stock = setups(model), outputs(model)
    twin = copy.deepcopy(model)
    assert on(twin) == on(model)
    load(twin)
    assert not on(twin) & {CHECKS, "wo_half"}
    assert twin.encoder.block[0].layer[-1].DenseReluDense.wo.weight.dtype == torch.float32
    assert setups(model) == before
    assert same(stock, outputs(model))


def test_a_copy_keeps_its_proof_when_the_original_loses_it() -> None:
    model = mixed()
    t5fastpatch.apply(model)
    twin = copy.deepcopy(model)
    stock = outputs(twin)
    whole(model)
    assert {CHECKS, "wo_half"} <= on(twin)
    assert same(stock, outputs(twin))


def test_a_part_that_is_proven_again_by_itself_takes_the_rest_with_it() -> None:
    """A decoder's proof is one of the encoder that it reads, too."""
    model = mixed()
    t5fastpatch.apply(model)
    t5fastpatch.apply(model.encoder)
    norm = model.encoder.final_layer_norm
    norm.weight = nn.Parameter(norm.weight.detach() * 2)
    assert not on(model) & {CHECKS, "wo_half"}


def test_a_model_may_be_held_by_another_module() -> None:
    model = mixed()
    t5fastpatch.apply(model)
    nn.Sequential(model)
    nn.ModuleList([model.encoder])
    assert {CHECKS, "wo_half"} <= on(model)


MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "meta device": lambda: torch.device("meta"),
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_it_may_be_applied_and_removed_in_any_mode(mode: str) -> None:
    model, stock = mixed(), outputs(mixed())
    with MODES[mode]():
        t5fastpatch.apply(model)
    assert {CHECKS, "wo_half", "residual_rescale"} <= on(model)
    model(**T5.batch(torch.float16)).loss.backward()
    with MODES[mode]():
        t5fastpatch.remove(model)
    model(**T5.batch(torch.float16)).loss.backward()
    assert same(stock, outputs(model))


def test_nothing_keeps_a_proven_model_alive() -> None:
    model = mixed()
    t5fastpatch.apply(model)
    references = [weakref.ref(module) for module in model.modules()]
    known = len(proof._resting)
    del model
    gc.collect()
    assert not any(reference() for reference in references)
    assert len(proof._resting) < known


def test_threads_that_load_and_apply_leave_one_of_the_two() -> None:
    model = mixed()
    failures: list[BaseException] = []

    def repeat(action: Callable[[], Any]) -> None:
        try:
            for _ in range(5):
                action()
        except BaseException as error:
            failures.append(error)

    actions = [lambda: t5fastpatch.apply(model), lambda: whole(model), lambda: t5fastpatch.status(model)]
    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    proven = {bool(setup.proven) for name, setup in setups(model).items() if name.endswith("DenseReluDense")}
    assert len(proven) == 1
    withdraw(model.encoder.block[0])
    assert not on(model) & {CHECKS, "wo_half"}


# what a user may get wrong


@pytest.mark.parametrize(
    "scale", [3, 0, -1, -0.5, float("nan"), float("inf"), 2**5, 2.0**-40, "big", True, None, 1 + 0j, torch.tensor(0.5)]
)
@pytest.mark.parametrize("patches", ["residual_rescale", "residual_fp32", None])
def test_a_scale_that_is_none_changes_nothing(scale: Any, patches: str | None) -> None:
    model = large()
    before = setups(model)
    with pytest.raises(ScaleError, match="scale"):
        t5fastpatch.apply(model, patches, scale=scale)
    assert setups(model) == before


@pytest.mark.parametrize(
    "batches", [3, "text", [3], ["text"], [{"no_such_input": 1}], [{}], [], torch.zeros(2, 2), [None]]
)
def test_batches_that_are_none_change_nothing(batches: Any) -> None:
    model = large()
    before = setups(model)
    with pytest.raises(T5FastPatchError, match="batch"):
        t5fastpatch.apply(model, batches=batches)
    assert setups(model) == before


@pytest.mark.parametrize("where", ["shared.weight", "encoder.block.1.layer.1.DenseReluDense.wo.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_or_infinity_in_the_weights_proves_nothing(where: str, value: float) -> None:
    model = large()
    with torch.no_grad():
        model.get_parameter(where)[3, 3] = value
    report = t5fastpatch.apply(model)
    assert "NaN or infinity" in report["residual_rescale"].why
    assert not any(setup.proven for name, setup in setups(model).items() if name.startswith("encoder"))


def test_a_model_of_fake_tensors_proves_nothing() -> None:
    with FakeTensorMode():
        model = transformers.T5ForConditionalGeneration(T5.config())
        report = t5fastpatch.apply(model)
    assert states(report)[CHECKS] is State.UNSAFE
    assert "not a plain floating tensor" in report[CHECKS].why


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(T5.config())
    before = setups(model)
    with pytest.raises(MetaDeviceError):
        t5fastpatch.apply(model)
    assert setups(model) == before


def test_batches_of_a_pipeline_of_several_models_are_refused() -> None:
    class Pipeline:
        components = {"text_encoder": large(), "other": large()}

    with pytest.raises(WrongTypeError, match="by itself"):
        t5fastpatch.apply(Pipeline(), batches=[T5.batch(torch.float16)])


def test_each_model_of_a_pipeline_is_judged_by_its_own_weights() -> None:
    class Pipeline:
        components = {"text_encoder": small(), "text_encoder_2": large()}

    t5fastpatch.apply(Pipeline())
    first, second = Pipeline.components.values()
    assert "residual_rescale" not in on(first)
    assert CHECKS in on(first)
    assert {"residual_rescale", CHECKS} <= on(second)
