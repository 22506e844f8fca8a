"""`skip_inf_check`: the infinity checks between the sub-layers of a block, left out.

Upstream looks for infinities in the residual stream after every sub-layer and clamps them, in fp16 only: once with an
`if` on a device tensor, which stalls the host, in other releases with `torch.where`, which costs six to eight kernels.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method

_CALLS = ("torch.isinf", "torch.finfo", "torch.where", "torch.clamp")


def edits(method: Method) -> list[Edit]:
    """Drops each statement that clamps infinities of a half-precision tensor and does nothing else.

    What a statement may hold is fixed (see `_clamped_name`), and it is run on a tensor to see that finite values come
    out bit for bit as they went in.

    Raises:
        UnexpectedSourceError: the method looks for infinities, or clamps, elsewhere too.
    """
    blocks = [node for node in ast.walk(method.tree) if isinstance(node, ast.If) and _is_clamp_block(node, method)]
    inside = {node for block in blocks for node in ast.walk(block)}
    outside = [node for node in ast.walk(method.tree) if node not in inside]
    for node in outside:
        if isinstance(node, ast.Attribute) and node.attr in ("isinf", "isfinite", "clamp", "clamp_", "nan_to_num"):
            raise UnexpectedSourceError(f"line {node.lineno} has {ast.unparse(node)} outside the known check")
    used = {node.id for node in outside if isinstance(node, ast.Name)}
    for block in blocks:
        helpers = {name for name, _ in _assignments(block)} - {_clamped_name(block)}
        if helpers & used:
            raise UnexpectedSourceError(f"{', '.join(helpers & used)} of the check is used outside it")
    return [method.drop(block) for block in blocks]


def _is_clamp_block(block: ast.If, method: Method) -> bool:
    name = _clamped_name(block)
    return name is not None and _leaves_finite_values_alone(block, name, method)


def _clamped_name(block: ast.If) -> str | None:
    """The tensor that the statement clamps, or `None` if it may do anything else.

    The test is `x.dtype == torch.float16`, with or without `and torch.isinf(x).any()`; the body assigns plain names,
    the last of them `x = torch.clamp(x, ...)`; it calls nothing but isinf, any, finfo, where and clamp, and reads
    nothing but `x`, `torch` and its own names.
    """
    match block:
        case ast.If(test=test, body=[*_, ast.Assign(value=ast.Call(func=clamp, args=[ast.Name(id=name)]))], orelse=[]):
            tests = (f"{name}.dtype == torch.float16", f"{name}.dtype == torch.float16 and torch.isinf({name}).any()")
            if ast.unparse(clamp) != "torch.clamp" or ast.unparse(test) not in tests:
                return None
        case _:
            return None
    assigned = [target for target, _ in _assignments(block)]
    if len(assigned) != len(block.body) or assigned[-1] != name or name in assigned[:-1]:
        return None
    for node in ast.walk(block):
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in (*_CALLS, f"torch.isinf({name}).any"):
            return None
        if isinstance(node, ast.Name) and node.id not in ("torch", name, *assigned):
            return None
    return name


def _assignments(block: ast.If) -> Iterator[tuple[str, ast.expr]]:
    for statement in block.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value


def _leaves_finite_values_alone(block: ast.If, name: str, method: Method) -> bool:
    """Runs the statement: finite fp16 values (the largest too) and NaN must come out unchanged, infinity must not."""
    torch = method.function.__globals__["torch"]
    code = compile(ast.Module([block], []), "<the check>", "exec")

    def run(values: list[float]) -> tuple[object, object]:
        before = torch.tensor(values, dtype=torch.float16, device="cpu")
        scope = {"torch": torch, name: before.clone()}
        exec(code, scope)
        return before.view(torch.int16).tolist(), scope[name].view(torch.int16).tolist()

    largest = torch.finfo(torch.float16).max
    try:
        before, after = run([0.0, -0.0, 1.0, -1.0, 6e-8, largest, -largest, float("nan")])
        infinite, clamped = run([float("inf"), float("-inf")])
    except Exception:  # what does not run is not the check
        return False
    return before == after and infinite != clamped


PATCH = SourcePatch(
    name="skip_inf_check",
    summary="the isinf/clamp statements after each sub-layer of a block -> nothing",
    contract=Contract.EXACT,
    role=Role.BLOCK,
    edits=edits,
    sites=3,
    unsafe_alone="in fp16 an overflow that stock clamps stays infinite",
)
