"""Headroom as observed on data, what is decided by it, and the command that reports both."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
import zoo

import t5fastpatch
from t5fastpatch.cli import main
from t5fastpatch.errors import NotT5Error, T5FastPatchError, WrongTypeError
from t5fastpatch.headroom.data import observe
from t5fastpatch.headroom.decision import decide
from t5fastpatch.headroom.places import Headroom, Magnitude, Place, Scaling
from t5fastpatch.headroom.sentences import read_lines
from t5fastpatch.headroom.stacks import Attention, stacks_of

T5 = zoo.BY_NAME["t5"]
Key = tuple[str, "int | None", Place]


def observed(model: Any, *batches: Any) -> dict[Key, float]:
    found = observe(model, batches).magnitudes
    keyed = {(each.stack, each.layer, each.place): each.value for each in found}
    assert len(keyed) == len(found)
    return keyed


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0  # an expert that no token chose


def overflowing(kind: zoo.Kind = T5, factor: float = 1e5) -> Any:
    """A model in fp16, whose first encoder block adds far more than fp16 holds, by weights that fp16 holds."""
    model = kind.build()
    with torch.no_grad():
        model.encoder.block[0].layer[-1].DenseReluDense.wo.weight.mul_(factor)
    return model.half()


def everything(model: Any) -> dict[str, Any]:
    """All that observing might change: objects by identity, tensors by their bytes too."""
    return {
        "parameters": [(id(each), each.dtype, each.requires_grad) for each in model.parameters()],
        "bytes": [each.detach().flatten().contiguous().view(torch.uint8).tolist() for each in model.parameters()],
        "modules": [(id(each), type(each), each.training) for each in model.modules()],
        "hooks": [(dict(each._forward_hooks), dict(each._forward_pre_hooks)) for each in model.modules()],
        "own": [sorted(vars(each)) for each in model.modules()],
        "configs": (model.config.to_json_string(), model.generation_config.to_json_string()),
        "attention": [
            getattr(each.config, "_attn_implementation", None) for each in model.modules() if hasattr(each, "config")
        ],
        "random": torch.get_rng_state().tolist(),
    }


def calls_of(model: Any, batch: dict[str, Any]) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """By the module's name, what each module of the model was called with and gave, in fp32."""
    calls: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)

    def hook_on(name: str, module: torch.nn.Module) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if args and isinstance(first, torch.Tensor):
                calls[name].append((args[0].clone(), first.clone()))

        return module.register_forward_hook(hook)

    handles = [hook_on(name, module) for name, module in model.named_modules()]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return calls


OUTPUTS = {
    r"[.](q|k|v|query|key|value)$": Place.PROJECTIONS,
    r"([.]o|attention[.]output)$": Place.ATTENTION,
    r"[.]wi_0$": Place.GATE,
    r"[.](wi|wi_1)$": Place.HIDDEN,
    r"[.]wo$": Place.FEED_FORWARD,
    r"[.](block|layer)[.]\d+$": Place.STREAM,
}
INPUTS = {r"[.]wo$": Place.HIDDEN}


@pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
def test_observed_is_what_plain_hooks_see_in_fp32(kind: zoo.Kind) -> None:
    model, peaks = kind.build(), defaultdict[Key, float](float)
    names = [stack.name for stack in stacks_of(model)]
    for name, calls in calls_of(model, kind.batch()).items():
        stack = next((each for each in names if name.startswith(f"{each}.")), None)
        number = re.search(r"[.](?:block|layer)[.](\d+)", name)
        layer = int(number[1]) if number else None
        places = [(place, 1) for end, place in OUTPUTS.items() if stack and number and re.search(end, name)]
        places += [(place, 0) for end, place in INPUTS.items() if stack and re.search(end, name)]
        if name.endswith("lm_head"):
            stack, places = names[-1], [(Place.LOGITS, 1)]
        for place, which in places:
            peak = max(largest(call[which]) for call in calls)
            peaks[stack, layer, place] = max(peaks[stack, layer, place], peak)
        if re.search(r"[.](block|layer)[.]0$", name) and name.count("layer.") <= ("block" not in name):
            peaks[stack, None, Place.STREAM] = largest(calls[0][0])
    found = observed(model, kind.batch())
    blocks = {key[:2] for key in found if key[1] is not None}
    assert {key[:2] for key in found if key[2] is Place.SCORES} == blocks
    found = {key: value for key, value in found.items() if key[2] is not Place.SCORES}
    for key in [key for key in peaks if kind.name == "pix2struct" and key[2] is Place.STREAM]:
        # Its vision layer holds both sub-layers: no module's output is the stream between them.
        assert found.pop(key) >= peaks.pop(key) * (1 - 1e-5)
    assert found == pytest.approx(dict(peaks), rel=1e-5)


@pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
def test_scores_are_the_largest_product_and_at_most_the_bias_above_it(kind: zoo.Kind) -> None:
    model = kind.build()
    calls, found = calls_of(model, kind.batch()), observed(model, kind.batch())
    names = {module: name for name, module in model.named_modules()}
    bias = sum(largest(each) for name, each in model.named_parameters() if "relative_attention_bias" in name)
    for stack in stacks_of(model):
        for layer, sub_layers in enumerate(stack.layers):
            attentions = [each for each in sub_layers if isinstance(each, Attention)]
            products = []
            for each in attentions:
                (queries,), keys = (
                    [output.unflatten(-1, (-1, 8)).transpose(1, 2) for _, output in calls[names[part]]]
                    for part in (each.query, each.key)
                )
                products += [largest(queries @ every.transpose(2, 3)) for every in keys]
            value = found[stack.name, layer, Place.SCORES]
            assert value <= max(products) * (1 + 1e-5) + bias
            if kind.family != "longt5":  # whose local attention multiplies neighbours only
                assert value >= max(products) * (1 - 1e-5)


@pytest.mark.parametrize("kind", [T5, zoo.BY_NAME["umt5"]], ids=str)
def test_a_model_in_fp16_is_observed_at_its_true_magnitude(kind: zoo.Kind) -> None:
    model = overflowing(kind)
    before = everything(model)
    found = observed(model, kind.batch())
    assert everything(model) == before
    assert 65504 < found["encoder", 0, Place.FEED_FORWARD] < math.inf
    assert found["encoder", 1, Place.STREAM] > 65504
    assert found == pytest.approx(observed(copy.deepcopy(model).float(), kind.batch()), rel=1e-5)


def test_a_model_with_wo_in_fp32_and_one_in_bf16_are_observed_as_they_are() -> None:
    model = overflowing()
    for each in model.modules():
        if hasattr(each, "wo"):
            each.wo.float()
    before = everything(model)
    found = observed(model, T5.batch())
    assert everything(model) == before
    assert found == pytest.approx(observed(copy.deepcopy(model).float(), T5.batch()), rel=1e-5)
    model = T5.build().bfloat16()
    assert observed(model, T5.batch()) == pytest.approx(observed(copy.deepcopy(model).float(), T5.batch()), rel=1e-5)


def test_neither_autocast_nor_a_training_model_changes_what_is_observed() -> None:
    model = overflowing().train()
    before = everything(model)
    expected = observed(model, T5.batch())
    with torch.autocast("cpu", torch.float16):
        assert observed(model, T5.batch()) == expected
    assert everything(model) == before


@pytest.mark.parametrize("where", ["wo", "SelfAttention", "lm_head"])
def test_after_an_exception_in_a_batch_everything_is_as_before(where: str) -> None:
    model = overflowing().train()
    t5fastpatch.apply(model, ["skip_inf_check"])
    armed: list[bool] = []

    def fail(*_: Any) -> None:
        if armed:
            raise RuntimeError("out of luck\nat length")

    def batches() -> Iterator[dict[str, Any]]:
        yield T5.batch()
        armed.append(True)
        yield T5.batch()

    [each for name, each in model.named_modules() if name.endswith(where)][-1].register_forward_hook(fail)
    before = everything(model)
    with pytest.raises(T5FastPatchError, match=r"run on batch 2 \(RuntimeError: out of luck\)"):
        observe(model, batches())
    assert everything(model) == before


@pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
def test_a_patched_model_is_observed_as_the_unpatched_one(kind: zoo.Kind) -> None:
    model = kind.build().half()
    expected = observed(model, kind.batch())
    t5fastpatch.apply(model, ["all", "skip_inf_check"])
    before = everything(model)
    ran: list[str] = []
    block = next(each for each in model.modules() if "t5fastpatch" in vars(type(each)))
    block.register_forward_pre_hook(lambda module, _: ran.append("patched" if patches(module) else "stock"))
    assert observed(model, kind.batch()) == expected
    assert set(ran) == {"stock"}
    block._forward_pre_hooks.clear()
    assert everything(model) == before


def patches(module: Any) -> bool:
    return "t5fastpatch" in vars(type(module))


def test_a_model_without_decoder_inputs_generates() -> None:
    model = T5.build().half()
    before = everything(model)
    found = observed(model, T5.inputs())
    assert {stack for stack, _, _ in found} == {"encoder", "decoder"}
    assert everything(model) == before


def test_several_batches_are_observed_together_and_ids_alone_are_a_batch() -> None:
    model, tokens = T5.build(), T5.inputs()["input_ids"]
    ids, labels = observed(model, tokens), observed(model, T5.batch())
    for key, value in observed(model, tokens, T5.batch()).items():
        # Scores are the largest product plus the largest bias, not always of the same batch.
        assert value >= max(ids[key], labels[key]) if key[2] is Place.SCORES else value == max(ids[key], labels[key])


def test_an_encoder_alone_and_a_model_inside_another_are_observed() -> None:
    config = T5.config()
    torch.manual_seed(0)
    encoder = transformers.T5EncoderModel(config).eval()
    assert {stack for stack, _, _ in observed(encoder, zoo.ids(5, 1))} == {"encoder"}
    model = T5.build()
    part = observe(model.encoder, [zoo.text_inputs()])
    assert {each.stack for each in part.magnitudes} == {type(model.encoder).__name__}


def test_a_stack_that_no_batch_reaches_is_said_to_be_unproven() -> None:
    both = torch.nn.ModuleDict({"read": T5.build().encoder, "unused": T5.build().encoder})
    both.forward = both["read"].forward  # type: ignore[method-assign]
    found = observe(both, [T5.inputs()])
    assert found.unproven == {"unused": "no batch reached it"}
    assert set(found.assumes) == {"read"}


def test_infinities_and_nan_are_infinite_where_they_are() -> None:
    for value in (math.inf, math.nan):
        model = T5.build()
        with torch.no_grad():
            model.decoder.block[1].layer[0].SelfAttention.v.weight[3, 3] = value
        found = observed(model, T5.batch())
        assert found["decoder", 1, Place.PROJECTIONS] == math.inf
        assert found["decoder", 1, Place.STREAM] == math.inf
        assert all(value < math.inf for (stack, layer, _), value in found.items() if stack == "encoder" or layer == 0)


def test_offloaded_weights_come_and_go_as_ever() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = overflowing()
    expected = observed(model, T5.batch())
    accelerate.cpu_offload(model, torch.device("cpu"))
    dtypes = [(each.dtype, each.device.type) for each in model.parameters()]
    assert "meta" in {device for _, device in dtypes}
    assert observed(model, T5.batch()) == expected
    assert [(each.dtype, each.device.type) for each in model.parameters()] == dtypes
    assert observed(model, T5.batch()) == expected


def test_attention_that_pytorch_does_not_see_is_eager_for_the_while() -> None:
    model = T5.build()
    if not hasattr(model.config, "_attn_implementation"):
        pytest.skip("this release has eager attention only")
    expected = observed(model, T5.batch())
    for each in (model, model.encoder, model.decoder):
        each.config._attn_implementation = "a kernel of the hub's"
    before = everything(model)
    assert observed(model, T5.batch()) == pytest.approx(expected, rel=1e-5)
    assert everything(model) == before


def test_what_is_no_batch_is_an_error_that_says_so() -> None:
    model = T5.build()
    with pytest.raises(WrongTypeError, match="put it into a list"):
        observe(model, T5.batch())
    with pytest.raises(WrongTypeError, match="batch 1 is a list: give a dict"):
        observe(model, [[1, 2]])
    with pytest.raises(T5FastPatchError, match="no batch"):
        observe(model, [])
    with pytest.raises(T5FastPatchError, match=r"batch 1 \(IndexError"):
        observe(model, [{"input_ids": torch.tensor([[9999]]), "labels": torch.tensor([[1]])}])
    with pytest.raises(T5FastPatchError, match=r"not generate from batch 1 .* with labels or decoder_input_ids"):
        observe(model, [{"input_ids": torch.tensor([[9999]])}])
    with pytest.raises(NotT5Error, match="no stack"):
        observe(torch.nn.Linear(1, 1), [zoo.ids(3, 1)])


def headroom(source: str, **values: float) -> Headroom:
    """Magnitudes of an encoder's two blocks, by place, 1 where not given; fixed hidden products as HIDDEN_FIXED."""
    places = {"STREAM": 1.0, "ATTENTION": 1.0, "FEED_FORWARD": 1.0, "HIDDEN": 1.0, "PROJECTIONS": 1.0, **values}
    found = (
        Magnitude("encoder", layer, Place[name.removesuffix("_FIXED")], value, name.endswith("_FIXED"))
        for layer in range(2)
        for name, value in places.items()
    )
    return Headroom(source, tuple(found))


def encoder() -> Any:
    return stacks_of(T5.build().encoder)[0]


def decided(*headrooms: Headroom) -> Any:
    return decide(dataclasses.replace(encoder(), name="encoder"), *headrooms)


def test_what_the_weights_prove_needs_no_data() -> None:
    fits = headroom("weights", STREAM=6e4, HIDDEN=10.0, SCORES=70.0)
    assert decided(fits).rests_on == decided(fits).others_rest_on == "weights"
    assert decided(fits).scaling == Scaling()
    assert decided(headroom("weights", STREAM=65504.0 * 4, HIDDEN=65504.0 * 2)).scaling == Scaling(1 / 4, 1 / 2)


def test_data_count_with_bits_to_spare_where_the_weights_prove_nothing() -> None:
    loose = headroom("weights", STREAM=1e12, HIDDEN=1e9, SCORES=1e6)
    seen = headroom("data", STREAM=65504.0, HIDDEN=100.0, SCORES=20.0)
    decision = decided(loose, seen)
    assert (decision.rests_on, decision.others_rest_on, decision.margin_bits) == ("data", "data", 3.0)
    assert decision.scaling == Scaling(1 / 64, 1.0)
    assert "small values lose bits" in decision.why_not[0]
    assert decided(loose).rests_on == ""


@pytest.mark.parametrize("place", ["GATE", "PROJECTIONS", "HIDDEN_FIXED"])
def test_what_no_rescaling_reaches_is_judged_beside(place: str) -> None:
    decision = decided(headroom("weights", STREAM=10.0, **{place: 1e6}))
    assert (decision.rests_on, decision.others_rest_on) == ("", "")
    assert "at any scale" in decision.why_not[0]
    decision = decided(headroom("weights", STREAM=10.0, SCORES=1e6))
    assert (decision.rests_on, decision.others_rest_on) == ("weights", "")


def test_an_infinite_magnitude_is_decided_by_nothing() -> None:
    decision = decided(headroom("data", STREAM=math.inf))
    assert decision.rests_on == ""
    assert decision.scaling is None


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound from the weights that is a hundred times what one batch shows."""

    def fake(root: Any, stacks: Any = None) -> Headroom:
        seen = observe(root, [{"input_ids": zoo.ids(5, 1) % 30, "labels": zoo.ids(5, 2) % 30}], stacks)
        found = tuple(dataclasses.replace(each, value=each.value * 100) for each in seen.magnitudes)
        return Headroom("weights", found, {"encoder": ("embeddings from the table",)})

    monkeypatch.setitem(sys.modules, "t5fastpatch.headroom.weights", types.SimpleNamespace(bound=fake))


@pytest.mark.usefixtures("bound")
def test_the_report_names_what_is_at_risk_and_what_comes_of_the_scale() -> None:
    report = t5fastpatch.check(overflowing(), [T5.batch()])
    text = str(report)
    assert "encoder: fits into fp16 once rescaled, which rests on the weights" in text
    assert "decoder: fits into fp16 as it is, which rests on the weights" in text
    assert "at risk in stock fp16 by the data: residual stream (blocks 0-1); feed-forward output (block 0)" in text
    assert "proposed scale: 2^-" in text
    assert "the bound figures assume: embeddings from the table" in text
    assert report.stacks == ("encoder", "decoder")
    assert {each.place for each in report.at_risk("encoder")["data"]} == {Place.STREAM, Place.FEED_FORWARD}
    scaling = report.decisions["encoder"].scaling
    plain = json.loads(report.to_json(allow_nan=False))
    for each in plain["stacks"][0]["weights"]["magnitudes"]:
        assert each["after"] <= 65504
        if each["place"] == Place.STREAM.value:
            assert each["after"] == each["value"] * scaling.stream


@pytest.mark.usefixtures("bound")
def test_each_source_is_reported_alone_too() -> None:
    model = T5.build()
    assert t5fastpatch.check(model).observed is None
    report = t5fastpatch.check(model, [T5.batch()], bound=False)
    assert report.bound is None
    assert "bound" not in str(report)
    assert report.decisions["encoder"].rests_on == "data"
    with pytest.raises(T5FastPatchError, match="nothing to check"):
        t5fastpatch.check(model, bound=False)
    with pytest.raises(WrongTypeError, match="not a str"):
        t5fastpatch.check("t5-small")
    with pytest.raises(NotT5Error, match="no stack"):
        t5fastpatch.check(torch.nn.Linear(1, 1))


def test_infinite_numbers_are_plain_json() -> None:
    model = T5.build()
    with torch.no_grad():
        model.shared.weight.fill_(math.nan)
    report = t5fastpatch.check(model, [T5.batch()], bound=False)
    assert '"value": "inf"' in report.to_json(allow_nan=False)
    assert "nothing shows that it fits into fp16" in str(report)


def test_the_packages_own_texts_are_of_many_kinds() -> None:
    texts = read_lines()
    assert len(set(texts)) == len(texts) >= 40
    assert min(map(len, texts)) == 1
    assert max(map(len, texts)) > 900
    assert sum(not text.isascii() for text in texts) >= 10
    assert read_lines(limit=3) == texts[:3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("tiny"), scale=1e5)


@pytest.mark.usefixtures("bound")
def test_the_command_reports_a_model_in_a_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, result = tmp_path / "texts.txt", tmp_path / "check.json"
    data.write_text("the page of a user\r\n\n  \nplease enter your password\nnot read", encoding="utf-8")
    command = ["check", "--model", str(folder), "--data", str(data), "--limit", "2", "--dtype", "bfloat16"]
    assert main([*command, "--json", str(result), "--picture", str(tmp_path / "depth.png")]) == 0
    assert "encoder: fits into fp16 once rescaled" in capsys.readouterr().out
    assert [each["name"] for each in json.loads(result.read_text())["stacks"]] == ["encoder", "decoder"]
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")
    assert main(["check", "--model", str(folder), "--no-data", "--picture", str(tmp_path / "depth.svg")]) == 0
    assert "observed" not in capsys.readouterr().out
    assert "<svg" in (tmp_path / "depth.svg").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "missing.txt"], "there is no file 'missing.txt'"),
        (["--data", "empty.txt"], "'empty.txt' holds no text"),
        (["--data", "latin.txt"], "'latin.txt' is not UTF-8 (byte 1)"),
        (["--data", "empty.txt", "--no-data"], "--data and --no-data exclude each other"),
        (["--data", "latin.txt", "--json", "latin.txt"], "named twice"),
        (["--dtype", "float16"], "--dtype is one of float32, bfloat16, auto, not 'float16'"),
        (["--picture", "depth.jpg"], "a picture is a .png or .svg file"),
        (["--json", "no/such/file.json"], "there is no directory"),
        (["--model", "./nowhere"], "there is no model folder './nowhere'"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n")
    Path("latin.txt").write_bytes("né".encode("latin-1") + b"e")
    assert main(["check", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
