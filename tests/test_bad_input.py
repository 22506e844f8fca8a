"""Bad input gives a clear error, and the model stays exactly as it was."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import t5fastpatch
from t5fastpatch import findings, rewrite
from t5fastpatch.patch import Contract, Role, SourcePatch, State


@pytest.fixture
def model() -> Iterator[Any]:
    model = zoo.BY_NAME["t5"].build().half()
    before = [type(module) for module in model.modules()]
    yield model
    assert [type(module) for module in model.modules()] == before


def no_edits(method: rewrite.Method) -> list[rewrite.Edit]:
    return []


def source_patch(name: str, **more: Any) -> SourcePatch:
    settings: dict[str, Any] = {"contract": Contract.EXACT, "role": Role.BLOCK, "edits": no_edits, "sites": 1}
    return SourcePatch(name=name, summary="for a test", **{**settings, **more})


def test_an_unknown_patch_with_the_nearest_name(model: Any) -> None:
    with pytest.raises(t5fastpatch.UnknownPatchError, match="did you mean 'layer_norm'"):
        t5fastpatch.apply(model, ["skip_inf_check", "layernorm"])


@pytest.mark.parametrize("patches", [1, [1], [None], object()])
def test_patches_of_a_wrong_type(model: Any, patches: Any) -> None:
    with pytest.raises(t5fastpatch.WrongTypeError, match="names"):
        t5fastpatch.apply(model, patches)


@pytest.mark.parametrize("thing", [None, 3, "t5-small", dict])
def test_a_model_of_a_wrong_type(thing: Any) -> None:
    with pytest.raises(t5fastpatch.WrongTypeError, match=r"torch\.nn\.Module"):
        t5fastpatch.apply(thing)


def test_a_model_that_is_no_t5() -> None:
    for call in (t5fastpatch.apply, t5fastpatch.remove, t5fastpatch.status):
        with pytest.raises(t5fastpatch.NotT5Error, match="T5 family"):
            call(nn.TransformerEncoderLayer(8, 2))


def test_nothing_to_patch(model: Any) -> None:
    with pytest.raises(t5fastpatch.NothingToPatchError, match="empty selection"):
        t5fastpatch.apply(model, [])
    norm = model.encoder.final_layer_norm
    with pytest.raises(t5fastpatch.NothingToPatchError, match="skip_inf_check changes nothing in this T5LayerNorm"):
        t5fastpatch.apply(norm, ["skip_inf_check"])


def test_what_upstream_has_already_is_no_error(model: Any) -> None:
    t5fastpatch.register(source_patch("long_gone"))
    report = t5fastpatch.apply(model, ["long_gone"])
    assert report["long_gone"].state is State.UPSTREAM


def test_conflicting_patches(model: Any) -> None:
    t5fastpatch.register(source_patch("rival", conflicts=frozenset({"layer_norm"})))
    with pytest.raises(t5fastpatch.ConflictError, match="rival and layer_norm"):
        t5fastpatch.apply(model, ["layer_norm", "rival"])


def test_a_patch_that_conflicts_with_one_that_is_on(model: Any) -> None:
    def drop_last(method: rewrite.Method) -> list[rewrite.Edit]:
        return [method.drop(method.tree.body[0])]

    t5fastpatch.register(source_patch("rival", edits=drop_last, conflicts=frozenset({"layer_norm"})))
    with t5fastpatch.patched(model, ["layer_norm"]), pytest.raises(t5fastpatch.ConflictError, match="rival"):
        t5fastpatch.apply(model, ["rival"])


def test_two_patches_that_edit_the_same_lines(model: Any) -> None:
    def drop_checks(method: rewrite.Method) -> list[rewrite.Edit]:
        from t5fastpatch.patches.skip_inf_check import edits

        return edits(method)

    t5fastpatch.register(source_patch("rival", edits=drop_checks, sites=3))
    with pytest.raises(t5fastpatch.UnexpectedSourceError, match="two edits meet"):
        t5fastpatch.apply(model, ["skip_inf_check", "rival"])


def test_removing_what_is_not_applied(model: Any) -> None:
    with pytest.raises(t5fastpatch.NotAppliedError, match="does not have any patch"):
        t5fastpatch.remove(model)
    with t5fastpatch.patched(model, ["layer_norm"]):
        with pytest.raises(t5fastpatch.NotAppliedError, match="does not have skip_inf_check"):
            t5fastpatch.remove(model, ["skip_inf_check"])
        assert t5fastpatch.status(model)["layer_norm"].state is State.ON


def test_a_foreign_forward_on_an_instance(model: Any) -> None:
    norm = model.decoder.final_layer_norm
    norm.forward = lambda hidden_states: hidden_states
    with pytest.raises(t5fastpatch.ForeignForwardError, match="T5LayerNorm has a forward of its own"):
        t5fastpatch.apply(model, ["layer_norm"])
    assert norm(3) == 3


def test_a_foreign_forward_on_a_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    monkeypatch.setattr(type(model.encoder.final_layer_norm), "forward", forward)
    with pytest.raises(t5fastpatch.ForeignForwardError, match="replaced by test_bad_input"):
        t5fastpatch.apply(model, ["layer_norm"])
    assert t5fastpatch.status(model)["layer_norm"].state is State.REFUSED


def test_a_foreign_wrapper_object_on_a_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import wrapt

    cls = type(model.encoder.final_layer_norm)
    wrapped = wrapt.FunctionWrapper(cls.forward, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    monkeypatch.setattr(cls, "forward", wrapped)
    with pytest.raises(t5fastpatch.ForeignForwardError, match="FunctionWrapper"):
        t5fastpatch.apply(model, ["layer_norm"])


def test_a_wrapper_that_keeps_the_function_out_of_reach(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(model.encoder.block[0])
    original = cls.forward
    kept = {"forward": original}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kept["forward"](self, *args, **kwargs)

    forward.__wrapped__ = original  # type: ignore[attr-defined]
    monkeypatch.setattr(cls, "forward", forward)
    with pytest.raises(t5fastpatch.ForeignForwardError, match="out of reach"):
        t5fastpatch.apply(model, ["skip_inf_check"])


def test_a_class_derived_from_a_patched_one(model: Any) -> None:
    t5fastpatch.apply(model, ["layer_norm"])
    norm = model.encoder.final_layer_norm
    patched = type(norm)
    norm.__class__ = type("FSDPT5LayerNorm", (patched,), {})
    with pytest.raises(t5fastpatch.ForeignForwardError, match="derived from a patched class"):
        t5fastpatch.remove(model)
    norm.__class__ = patched
    t5fastpatch.remove(model)


def changed_file(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Makes upstream's T5 file read as `change` makes it."""
    monkeypatch.setattr(findings, "_found", {})
    real = rewrite.linecache.getlines

    def getlines(path: str, namespace: Any = None) -> list[str]:
        lines = real(path, namespace)
        return change(lines) if path.endswith("modeling_t5.py") else lines

    monkeypatch.setattr(rewrite, "linecache", types.SimpleNamespace(getlines=getlines, cache=rewrite.linecache.cache))


def test_a_source_that_is_not_available(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_file(monkeypatch, lambda lines: [])
    with pytest.raises(t5fastpatch.SourceUnavailableError, match=r"cannot read .*T5Block\.forward"):
        t5fastpatch.apply(model, ["skip_inf_check"])


def test_a_source_that_is_not_what_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(lines: list[str]) -> list[str]:
        return [line.replace("self.layer[-1](hidden_states)", "self.layer[0](hidden_states)") for line in lines]

    changed_file(monkeypatch, change)
    with pytest.raises(t5fastpatch.SourceUnavailableError, match="not what was compiled"):
        t5fastpatch.apply(model, ["skip_inf_check"])


def test_a_pattern_count_that_is_not_as_expected(model: Any) -> None:
    def edits(method: rewrite.Method) -> list[rewrite.Edit]:
        return [method.drop(method.tree.body[0])]

    t5fastpatch.register(source_patch("miscounted", edits=edits, sites=2))
    with pytest.raises(t5fastpatch.UnexpectedSourceError, match=r"miscounted on T5Block.* found: 1, expected: 2"):
        t5fastpatch.apply(model, ["miscounted"])
    with pytest.raises(t5fastpatch.UnexpectedSourceError, match="miscounted"):
        t5fastpatch.apply(model, ["layer_norm", "miscounted"])


@pytest.mark.parametrize(
    "edits",
    [
        lambda method: 1 / 0,
        lambda method: None,
        lambda method: ["no edit"],
        lambda method: [rewrite.Edit(1, 1, ("",))],
        lambda method: [rewrite.Edit(method.first, method.first, ("", ""))],
        lambda method: [rewrite.Edit(method.last, method.last, (" not python",))],
        lambda method: [method.replace(method.tree.body[-1].value, "super().forward()")],
    ],
    ids=["raises", "none", "no-edit", "outside", "grows", "no-python", "super"],
)
def test_a_patch_that_gives_nonsense_is_refused_and_hurts_no_other(model: Any, edits: Any) -> None:
    t5fastpatch.register(source_patch("nonsense", edits=edits))
    with pytest.raises(t5fastpatch.UnexpectedSourceError, match="nonsense on T5Block") as caught:
        t5fastpatch.apply(model, ["nonsense"])
    if "the patch failed" in str(caught.value):
        assert caught.value.__cause__ is not None
    report = t5fastpatch.apply(model)
    assert report["nonsense"].state is State.REFUSED
    assert report["layer_norm"].state is State.ON
    t5fastpatch.remove(model)


def test_a_refusal_is_a_row_where_the_patch_was_not_named(model: Any) -> None:
    def edits(method: rewrite.Method) -> list[rewrite.Edit]:
        raise t5fastpatch.UnexpectedSourceError("no such thing")

    t5fastpatch.register(source_patch("puzzled", edits=edits))
    report = t5fastpatch.apply(model)
    assert report["puzzled"].state is State.REFUSED
    assert "no such thing" in report["puzzled"].why
    assert report["layer_norm"].state is State.ON
    t5fastpatch.remove(model)


def test_a_model_on_the_meta_device() -> None:
    model = zoo.BY_NAME["t5"].build().to("meta")
    before = [type(module) for module in model.modules()]
    with pytest.raises(t5fastpatch.MetaDeviceError, match="load its weights"):
        t5fastpatch.apply(model)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("layer_norm", "neither a SourcePatch nor a ForwardPatch"),
        (source_patch("stringly", contract="exact"), "contract must be a Contract"),
        (source_patch("stringly", role="block"), "role must be a Role"),
        (source_patch("listed", conflicts=["layer_norm"]), "conflicts must be a frozenset"),
        (source_patch("uncallable", edits=[]), "edits must be a function"),
        (source_patch("Bad-Name"), "lower-case identifier"),
        (source_patch("layer_norm"), "already"),
        (source_patch("safe"), "already"),
        (source_patch("countless", sites=0), "at least 1"),
    ],
    ids=["no-patch", "contract", "role", "conflicts", "edits", "bad-name", "taken", "a-preset", "no-sites"],
)
def test_a_patch_that_cannot_be_registered(patch: Any, message: str) -> None:
    with pytest.raises(t5fastpatch.InvalidPatchError, match=message):
        t5fastpatch.register(patch)


def test_every_error_is_of_one_family() -> None:
    from t5fastpatch import errors

    assert all(issubclass(getattr(errors, name), t5fastpatch.T5FastPatchError) for name in errors.__all__)
    assert set(errors.__all__) <= set(t5fastpatch.__all__)
