from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo

from t5fastpatch import (
    Contract,
    ForwardPatch,
    Role,
    SourcePatch,
    T5FastPatchError,
    apply,
    list_patches,
    patched,
    register,
    status,
)
from t5fastpatch.measure.micro import ACTIVATION, SOFTMAX, MicroOp, micro_ops
from t5fastpatch.patch import State
from t5fastpatch.registry import get_patch
from t5fastpatch.rewrite import Edit, Method

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

every_kind = pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def ops_of(model: Any) -> dict[str, MicroOp]:
    ops, _ = micro_ops(model, list_patches())
    return {op.name: op for op in ops}


def operation(name: str, dtype: torch.dtype, kind: str = "t5") -> MicroOp:
    """One operation of a model; skips where the release has it no longer."""
    ops, left_out = micro_ops(zoo.BY_NAME[kind].build().to(dtype), list_patches())
    if name in left_out:
        pytest.skip(left_out[name])
    return next(op for op in ops if op.name == name)


@every_kind
def test_each_patch_has_its_operation_or_a_reason(kind: zoo.Kind) -> None:
    model = kind.build().half()
    applies = [row.patch for row in status(model).rows if row.state in (State.APPLIES, State.UNSAFE)]
    ops, left_out = micro_ops(model, list_patches())
    names = [patch.name for patch in list_patches()]
    assert [op.name for op in ops] == [*(name for name in names if name not in left_out), SOFTMAX, ACTIVATION]
    assert {"skip_inf_check", "softmax_dtype", "layer_norm"} & set(applies) == {op.name for op in ops} & set(names)


def test_what_is_no_operation_on_one_tensor_gives_a_reason() -> None:
    _, left_out = micro_ops(zoo.BY_NAME["longt5-local"].build().half(), list_patches())
    for name in ("residual_rescale", "residual_fp32", "wo_half"):
        assert left_out[name] == f"{name} is on whole stacks, and has no operation of its own"
    for name in ("eager_scores", "local_scores", "wo_without_weight"):
        assert left_out[name].startswith((f"the first edit of {name} ", "already upstream"))


@every_dtype
@every_kind
def test_a_patch_s_operation_gives_what_its_contract_says(kind: zoo.Kind, dtype: torch.dtype) -> None:
    for name, op in ops_of(kind.build().to(dtype)).items():
        if op.after is None:
            continue
        x = op.make_input(2, 24)
        before, after = op.before(x), op.after(x)
        assert torch.isfinite(before).all()
        assert before.dtype == after.dtype == dtype
        if get_patch(name).contract is Contract.EXACT:
            assert torch.equal(before, after)
        else:
            torch.testing.assert_close(after, before, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_shapes_follow_the_configuration() -> None:
    model = zoo.BY_NAME["t5"].build()
    shapes = {"skip_inf_check": (3, 5, 32), "softmax_dtype": (3, 4, 5, 5), "layer_norm": (3, 5, 32)}
    for name, op in ops_of(model).items():
        assert op.make_input(3, 5).shape == {**shapes, SOFTMAX: (3, 4, 5, 5), ACTIVATION: (3, 5, 64)}[name]


def test_the_softmax_stays_in_the_scores_dtype() -> None:
    op = operation(SOFTMAX, torch.float16)
    scores = op.make_input(2, 8)
    assert torch.equal(op.before(scores), torch.softmax(scores, dim=-1))
    assert op.before(scores).dtype is torch.float16
    assert op.after is None


def test_inputs_are_seeded() -> None:
    norm = operation("layer_norm", torch.float16)
    x = norm.make_input(2, 8)
    assert x.dtype is torch.float16
    assert torch.equal(x, norm.make_input(2, 8))
    assert not torch.equal(x, norm.make_input(2, 8, seed=1))


@pytest.mark.parametrize("kind", ["t5", "longt5-local"])
@every_dtype
def test_the_softmax_before_is_upstream_s_and_after_is_in_the_dtype_of_the_scores(
    kind: str, dtype: torch.dtype
) -> None:
    softmax = operation("softmax_dtype", dtype, kind)
    assert softmax.after is not None
    x = softmax.make_input(2, 24)
    assert torch.equal(softmax.before(x), F.softmax(x.float(), dim=-1).type_as(x))
    assert torch.equal(softmax.after(x), F.softmax(x, dim=-1, dtype=dtype))


@every_dtype
def test_the_norm_before_is_the_model_s_own_and_after_is_pytorch_s(dtype: torch.dtype) -> None:
    model = zoo.BY_NAME["t5"].build().to(dtype)
    norm = ops_of(model)["layer_norm"]
    assert norm.after is not None
    upstream = model.encoder.block[0].layer[0].layer_norm
    x = norm.make_input(2, 24)
    assert torch.equal(norm.before(x), upstream(x))
    expected = F.rms_norm(x, upstream.weight.shape, upstream.weight, upstream.variance_epsilon)
    assert torch.equal(norm.after(x), expected)


def test_the_check_clamps_what_the_patch_leaves_infinite() -> None:
    check = operation("skip_inf_check", torch.float16)
    assert check.after is not None
    x = check.make_input(2, 8)
    x[0, 0, 0] = float("inf")
    assert torch.isfinite(check.before(x)).all()
    assert torch.equal(check.after(x), x)


@pytest.mark.parametrize("kind", ["t5", "t5-v1.1"])
def test_the_activation_is_the_model_s_own(kind: str) -> None:
    model = zoo.BY_NAME[kind].build().half()
    activation = ops_of(model)[ACTIVATION]
    x = activation.make_input(2, 8)
    assert activation.after is None
    assert torch.equal(activation.before(x), model.encoder.block[0].layer[-1].DenseReluDense.act(x))


def test_the_model_is_not_changed_nor_are_operations_by_patches_put_on_it_later() -> None:
    model = zoo.BY_NAME["t5"].build().half()
    norm = ops_of(model)["layer_norm"]
    assert State.ON not in [row.state for row in status(model).rows]
    x = norm.make_input(2, 24)
    before = norm.before(x)
    with patched(model, ["layer_norm"]):
        assert torch.equal(norm.before(x), before)


def test_a_patched_model_gives_a_reason_and_no_operation() -> None:
    model = zoo.BY_NAME["t5"].build().half()
    apply(model, ["layer_norm"])
    _, left_out = micro_ops(model, [get_patch("layer_norm")])
    assert left_out == {"layer_norm": "layer_norm is on already, so nothing here is stock"}


def test_another_family_s_model_gives_reasons_and_no_operation() -> None:
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    ops, left_out = micro_ops(transformers.BertModel(config), list_patches())
    assert ops == []
    assert left_out["layer_norm"] == f"absent in transformers {transformers.__version__}"
    assert "has an activation" in left_out[ACTIVATION]
    assert "is an attention of a T5 family" in left_out[SOFTMAX]


def statement(method: Method, start: str) -> tuple[int, int]:
    """First and last line of the method's first statement whose source begins like this."""
    for node in method.tree.body:
        if method.file[node.lineno - 1].lstrip().startswith(start):
            return node.lineno, node.end_lineno or node.lineno
    raise AssertionError(start)


def third_party(role: Role, start: str, *lines: str) -> SourcePatch:
    """A patch that puts lines in the place of one statement."""

    def edits(method: Method) -> list[Edit]:
        return [Edit(*statement(method, start), tuple(f"        {line}" for line in lines))]

    return SourcePatch("theirs", "", Contract.EXACT, role, edits=edits, sites=1)


def reason(patch: Any) -> str:
    ops, left_out = micro_ops(zoo.BY_NAME["t5"].build(), [register(patch)])
    assert [op.name for op in ops] == [SOFTMAX, ACTIVATION]
    return left_out["theirs"]


def test_an_edit_that_reads_more_than_one_tensor_gives_a_reason() -> None:
    why = reason(third_party(Role.NORM, "hidden_states = hidden_states * ", "hidden_states = hidden_states"))
    assert why == "the first edit of theirs does not make one tensor of one other"


def test_an_edit_that_is_no_whole_statement_gives_a_reason() -> None:
    def edits(method: Method) -> list[Edit]:
        first, _ = statement(method, "if ")
        return [Edit(first, first, (method.file[first - 1],))]

    patch = SourcePatch("theirs", "", Contract.EXACT, Role.NORM, edits=edits, sites=1)
    assert reason(patch) == "the first edit of theirs is not of whole statements"


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda self, hidden_states: (hidden_states,), "theirs gives a tuple, not a tensor"),
        (lambda self, hidden_states, mask: hidden_states * mask, "theirs does not run on a tensor alone: TypeError("),
    ],
)
def test_a_forward_that_does_not_make_one_tensor_of_one_gives_a_reason(forward: Any, why: str) -> None:
    patch = ForwardPatch(
        "theirs",
        "",
        Contract.EXACT,
        Role.NORM,
        forward=forward,
        upstream_has_it=lambda method: False,
        objection=lambda method: "",
    )
    assert reason(patch).startswith(why)


def test_a_refused_patch_gives_its_refusal() -> None:
    def edits(method: Method) -> list[Edit]:
        raise T5FastPatchError("not as known")

    patch = SourcePatch("theirs", "", Contract.EXACT, Role.NORM, edits=edits, sites=1)
    assert reason(patch) == "not as known"
