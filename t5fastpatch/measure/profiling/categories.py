"""Which kind of work an op is."""

from __future__ import annotations

import functools

import torch

from ...patch import Role

MATRIX_PRODUCTS = "matrix products"
FUSED_ATTENTION = "fused attention"
SOFTMAX = "softmax"
NORMS = "norms"
INFINITY_CHECKS = "infinity checks"
CASTS = "casts"
COPIES = "copies"
ELEMENTWISE = "element-wise"
VIEWS = "views"
OTHER = "other"

CATEGORIES = (
    MATRIX_PRODUCTS,
    FUSED_ATTENTION,
    SOFTMAX,
    NORMS,
    INFINITY_CHECKS,
    CASTS,
    COPIES,
    ELEMENTWISE,
    VIEWS,
    OTHER,
)

_BY_NAME = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "einsum"), MATRIX_PRODUCTS),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), SOFTMAX),
    **dict.fromkeys(("rms_norm", "_fused_rms_norm", "layer_norm", "native_layer_norm"), NORMS),
    **dict.fromkeys(("cat", "stack", "clone", "copy_", "_to_copy", "repeat", "index_select"), COPIES),
}
# What upstream's blocks call to look for infinities and to clamp them, in any release.
_CHECKS = frozenset(("isinf", "any", "is_nonzero", "where", "neg", "clamp"))


def category(name: str, within: str, *, copies: bool, casts: bool) -> str:
    """The category of an op that Python code called; whatever PyTorch calls for it is part of it.

    Where it is called comes first: all that a norm does is `norms`, its casts too, and an `isinf`, `any`, `where` or
    `clamp` that a T5 block calls itself, and none of its layers, is one of `infinity checks`. Then comes its name, and
    then what it does: one that is a view by its schema (`to`, `contiguous`, `reshape`) and copies all the same is
    one of `casts` or `copies`, else of `views`; one that PyTorch tags as pointwise is `element-wise`.

    Limits: a norm, softmax or attention written out in Python and not in a T5 norm is counted by its parts; of another
    model that calls its norm a `LayerNorm` only the op `layer_norm` is known; reductions, gathers and factories
    (`sum`, `embedding`, `arange`) are `other`.

    Args:
        name: as the profiler gives it, `"aten::mul"`.
        within: the innermost range around it (see `module_ranges`), without the prefix; `""` for none.
        copies: whether it copies a tensor, itself or in what it calls.
        casts: whether one of those copies is into another dtype.
    """
    namespace, _, base = name.rpartition("::")
    if within == Role.NORM.value:
        return NORMS
    if within == Role.BLOCK.value and base in _CHECKS:
        return INFINITY_CHECKS
    if "scaled_dot_product" in base:
        return FUSED_ATTENTION
    known = _BY_NAME.get(base)
    if known not in (None, COPIES):
        return known
    is_view, is_pointwise = _traits(namespace, base)
    if copies and (known == COPIES or is_view):
        return CASTS if casts else COPIES
    if is_view:
        return VIEWS
    return known or (ELEMENTWISE if is_pointwise else OTHER)


@functools.cache
def _traits(namespace: str, base: str) -> tuple[bool, bool]:
    """Whether an op gives an alias of its input, and whether it works element by element; no op does both."""
    overloads = getattr(getattr(torch.ops, namespace or "aten"), base, None)
    if overloads is None:
        return False, False
    ops = [getattr(overloads, name) for name in overloads.overloads()]
    aliases = [argument.alias_info for op in ops for argument in op._schema.arguments if argument.alias_info]
    is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
    return is_view, any(torch.Tag.pointwise in op.tags for op in ops)
