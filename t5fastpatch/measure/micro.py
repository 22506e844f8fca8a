"""The lowest level: one operation alone, as upstream writes it and as a patch does.

A source patch's operation is cut out of upstream's own source: the statements of its first edit, before and after, are
compiled as two functions of the tensor they read.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..classwide import process_wide
from ..engine import apply
from ..errors import NothingToPatchError, T5FastPatchError, UnexpectedSourceError
from ..families import role_of
from ..findings import finding, transformers_version, upstream_class
from ..install import patches_on
from ..patch import ForwardPatch, MethodPatch, Patch, Role, StackPatch, State
from ..rewrite import Edit, Method
from .workloads import text_config

Op = Callable[[torch.Tensor], torch.Tensor]
InputShape = Callable[[int, int], tuple[int, ...]]
ACTIVATION = "activation"
SOFTMAX = "softmax"


@dataclasses.dataclass(frozen=True)
class MicroOp:
    """One operation, in the precision and on the device of the model it was taken from.

    Attributes:
        name: the patch's, `"softmax"` or `"activation"`.
        before: upstream's operation.
        after: what the patch puts in its place; `None` for the last two, which no patch changes.
        shape: the input's, for a batch size and a length.
        dtype: the input's.
        device: the input's.
    """

    name: str
    before: Op
    after: Op | None
    shape: InputShape
    dtype: torch.dtype
    device: torch.device

    def make_input(self, batch_size: int, length: int, seed: int = 0) -> torch.Tensor:
        """Normally distributed numbers, for a seed the same on every device and, rounded, in every dtype."""
        numbers = torch.randn(self.shape(batch_size, length), generator=torch.Generator().manual_seed(seed))
        return numbers.to(self.device, self.dtype)


def micro_ops(model: Any, patches: Iterable[Patch]) -> tuple[list[MicroOp], dict[str, str]]:
    """The operations of a model that can be run alone: those that patches replace, the softmax and the activation.

    The shapes of their inputs follow from the model: batch x length x d_model for norms and for what stands in a block,
    batch x heads x length x length for a softmax and for what stands in an attention, batch x length x d_ff for the
    activation.

    Args:
        model: a stock model, in evaluation mode. What is needed of it is copied, and nothing of it changed.
        patches: each for the operation that it replaces.

    Returns:
        The operations, and the reason, by name, wherever there is none: upstream has none (any more), or it is not an
        operation on one tensor.
    """
    makers = {patch.name: functools.partial(_patched_op, model, patch) for patch in patches}
    makers[SOFTMAX] = functools.partial(_softmax, model)
    makers[ACTIVATION] = functools.partial(_activation, model)
    ops, left_out = [], {}
    for name, make in makers.items():
        try:
            op = make()
            _try(op)
            ops.append(op)
        except T5FastPatchError as error:
            left_out[name] = str(error)
    return ops, left_out


def _patched_op(model: Any, patch: Patch) -> MicroOp:
    module, cls = _place(model, patch)
    before: Op
    after: Op
    if isinstance(patch, ForwardPatch):
        before, after = copy.deepcopy(module), copy.deepcopy(module)
        apply(after, [patch.name])
    else:
        before, after = _both_ways(patch, Method.of(cls), finding(patch, cls).edits[0])
    role = role_of(cls)
    assert role is not None
    return MicroOp(patch.name, before, after, _shape(model, role), model.dtype, model.device)


def _softmax(model: Any) -> MicroOp:
    """In the scores' own dtype, whatever upstream's attention makes of it."""
    if not any(role_of(type(module)) is Role.ATTENTION for module in model.modules()):
        raise NothingToPatchError(f"no module of this {type(model).__name__} is an attention of a T5 family")
    softmax = functools.partial(torch.softmax, dim=-1)
    return MicroOp(SOFTMAX, softmax, None, _shape(model, Role.ATTENTION), model.dtype, model.device)


def _activation(model: Any) -> MicroOp:
    act = next((module.act for module in model.modules() if isinstance(getattr(module, "act", None), nn.Module)), None)
    if act is None:
        raise NothingToPatchError(f"no module of this {type(model).__name__} has an activation `act`")
    width = text_config(model).d_ff
    return MicroOp(ACTIVATION, act, None, lambda batch, length: (batch, length, width), model.dtype, model.device)


def _place(model: Any, patch: Patch) -> tuple[nn.Module, type]:
    """The first module that the patch would change, and the upstream class whose forward it runs."""
    if isinstance(patch, StackPatch):
        raise NothingToPatchError(f"{patch.name} is on whole stacks, and has no operation of its own")
    if isinstance(patch, MethodPatch):
        raise NothingToPatchError(f"{patch.name} leaves forwards alone, and has no operation of its own")
    state = State.ABSENT
    for module in model.modules():
        cls = upstream_class(type(module))
        if cls is None or role_of(cls) not in patch.roles:
            continue
        if patch in (*patches_on(module), *process_wide(cls)):
            raise T5FastPatchError(f"{patch.name} is on already, so nothing here is stock")
        found = finding(patch, cls)
        if found.refusal is not None:
            raise found.refusal
        if found.state is State.APPLIES:
            return module, cls
        state = found.state
    raise NothingToPatchError(f"{state.value} in transformers {transformers_version()}")


def _shape(model: Any, role: Role) -> InputShape:
    config = text_config(model)
    if role is Role.ATTENTION:
        return lambda batch, length: (batch, config.num_attention_heads, length, length)
    return lambda batch, length: (batch, length, config.hidden_size)


def _both_ways(patch: Patch, method: Method, edit: Edit) -> tuple[Op, Op]:
    """The statements that the patch's first edit takes away, and those it puts there, each as a function.

    Raises:
        UnexpectedSourceError: they are no whole statements, read no or several local names, or assign none.
    """
    before = textwrap.dedent("\n".join(method.file[edit.first - 1 : edit.last]))
    names = _Names()
    try:
        names.visit(ast.parse(before))
    except SyntaxError as error:
        raise UnexpectedSourceError(f"the first edit of {patch.name} is not of whole statements") from error
    upstream = method.function.__globals__
    reads = [name for name in names.read if name not in upstream and not hasattr(builtins, name)]
    if len(reads) != 1 or not names.assigned:
        raise UnexpectedSourceError(f"the first edit of {patch.name} does not make one tensor of one other")
    after = textwrap.dedent("\n".join(edit.lines))
    function = functools.partial(_function, argument=reads[0], result=names.assigned[-1], module=upstream)
    return function(before), function(after)


class _Names(ast.NodeVisitor):
    """The names that statements read before they assign to them, and those they assign to, in the order of running."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.assigned: list[str] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.assigned.append(node.id)
        elif node.id not in (*self.read, *self.assigned):
            self.read.append(node.id)


def _function(statements: str, argument: str, result: str, module: dict[str, Any]) -> Op:
    source = f"def op({argument}):\n{textwrap.indent(statements, '    ')}\n    return {result}\n"
    scope: dict[str, Op] = {}
    exec(compile(source, f"<{result}>", "exec"), module, scope)
    return scope["op"]


def _try(op: MicroOp) -> None:
    """Raises `UnexpectedSourceError` where the operation, either way, does not make one tensor of one."""
    calls: Sequence[Op] = [op.before] if op.after is None else [op.before, op.after]
    with torch.no_grad():
        for call in calls:
            try:
                found = call(op.make_input(2, 8))
            except Exception as error:  # whatever a patch's own code raises without the rest of its method
                raise UnexpectedSourceError(f"{op.name} does not run on a tensor alone: {error!r}") from error
            if not isinstance(found, torch.Tensor):
                raise UnexpectedSourceError(f"{op.name} gives a {type(found).__name__}, not a tensor")
