"""Exact rescaling of the residual stream by a power of two.

T5 is pre-norm with RMS norms, which forget the scale of what they read: with s = 2^-k the stream may carry s h instead
of h, as long as what enters it and what every branch adds is multiplied by s, and each norm that reads it adds s^2 eps
instead of eps. A power of two changes no bit of a product or sum unless it leaves the dtype's range, so in fp32 nothing
changes; in fp16 what outgrew 65504 no longer does. The factor goes into the products, where it acts on the fp32
accumulator before the result is rounded, and not into the weights: these, their gradients and whatever is saved or
adapted stay upstream's.

`residual_rescale` and `residual_fp32` share these parts; they differ in the dtype of the stream.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .bypass import is_unwatched
from .errors import UnexpectedSourceError
from .findings import upstream_class
from .headroom.stacks import Attention, FeedForward, Stack, role
from .patch import Part, Role
from .rewrite import Edit, Method

_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)

# What stands in the place of a linear's call.
_PRODUCT = "self.t5fastpatch_product({linear}, {x})"
_LEAVE = "self.t5fastpatch_leave({linear}, {x})"


def scaled_product(linear: Any, x: torch.Tensor, factor: float) -> Any:
    """`factor * linear(x)`, the factor a power of two that acts before the product is rounded.

    Args:
        linear: an nn.Linear, or whatever stands in its place: quantized, adapted, hooked. The input of such a one is
            scaled instead, which is the same for every linear map.
        x: shape (..., in_features).
        factor: a power of two, at most 1.

    Returns:
        Shape (..., out_features), in the dtype of `linear(x)`.
    """
    if factor == 1.0:
        return linear(x)
    if not is_plain(linear):
        biased = getattr(linear, "bias", None) is not None
        return linear(x) * factor if biased else linear(x * factor)
    rows = x.reshape(-1, x.shape[-1])
    # With beta 0 the first argument is not read.
    bias, beta = (rows.new_empty(()), 0.0) if linear.bias is None else (linear.bias, factor)
    return torch.addmm(bias, rows, linear.weight.t(), beta=beta, alpha=factor).view(
        *x.shape[:-1], linear.weight.shape[0]
    )


def is_plain(linear: Any) -> bool:
    """Whether a product can be taken without calling the module: nobody listens, and the weight is a weight."""
    return is_unwatched(linear) and type(linear.weight) in _PLAIN


def is_homogeneous(dense: Any) -> bool:
    """Whether the hidden product of a feed-forward module takes the scale of one of its linears.

    A gated one does, through `wi_1`, and so does ReLU.
    """
    return hasattr(dense, "wi_1") or isinstance(dense.act, nn.ReLU)


def enter_half(self: Any, x: torch.Tensor) -> Any:
    """What enters the stream, scaled, in its own dtype."""
    return x * self.t5fastpatch_stream


def enter_wide(self: Any, x: torch.Tensor) -> Any:
    """What enters the stream, in fp32 at least, scaled."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) * self.t5fastpatch_stream


def leave_attention(self: Any, linear: nn.Module, x: torch.Tensor) -> Any:
    """The attention's output product at the stream's scale."""
    return scaled_product(linear, x, self.t5fastpatch_stream)


def hidden_product(self: Any, linear: nn.Module, x: torch.Tensor) -> Any:
    """The feed-forward's linear product at the hidden states' scale, where the activation lets the scale through."""
    return scaled_product(linear, x, self.t5fastpatch_hidden if is_homogeneous(self) else 1.0)


def leave_feed_forward(self: Any, linear: nn.Module, x: torch.Tensor) -> Any:
    """The feed-forward's output product: what is left of the stream's scale."""
    done = self.t5fastpatch_hidden if is_homogeneous(self) else 1.0
    return scaled_product(linear, x, self.t5fastpatch_stream / done)


def scaled_epsilon(self: Any) -> float:
    """The norm's epsilon at the square of the stream's scale; the attribute keeps upstream's."""
    return float(vars(self)["variance_epsilon"] * self.t5fastpatch_stream**2)


def true_scale(forward: FunctionType) -> FunctionType:
    """A stack's forward that gives the hidden states it is asked for at true scale."""

    @functools.wraps(forward)
    def with_true_scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(self, *args, **kwargs)
        if isinstance(outputs, tuple):
            return tuple(_unscaled(self, each, outputs[0]) if _are_states(self, each) else each for each in outputs)
        states = getattr(outputs, "hidden_states", None)
        if states is not None:
            outputs.hidden_states = _unscaled(self, states, outputs[0])
        return outputs

    assert isinstance(with_true_scale, FunctionType)
    return with_true_scale


def _are_states(self: Any, value: Any) -> bool:
    """Whether an item of a stack's output is its hidden states; router logits are narrower, attentions of four dims."""
    tensors = [each for each in value if isinstance(each, torch.Tensor)] if isinstance(value, tuple) else []
    return any(each.dim() == 3 and each.shape[-1] == self.config.hidden_size for each in tensors)


def _unscaled(self: Any, states: tuple[Any, ...], output: torch.Tensor) -> tuple[Any, ...]:
    """Hidden states at true scale, all in one dtype: fp32 where fp16 may not hold them."""
    scale = self.t5fastpatch_stream
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in states if each is not None))
    dtype = torch.float32 if dtype is torch.float16 and scale != 1.0 else dtype
    # The last one is behind the final norm, at true scale, in every stack but a vision encoder.
    last = states[-1] if states[-1] is output or hasattr(self, "lm_head") else None
    return tuple(each if each is None else each.to(dtype) / (1.0 if each is last else scale) for each in states)


def enters_stream(method: Method) -> list[Edit]:
    """Scales what enters the residual stream: what the first dropout reads, or what the embeddings give."""
    calls = [node for node in ast.walk(method.tree) if isinstance(node, ast.Call)]
    dropouts = sorted((call for call in calls if ast.unparse(call.func) == "self.dropout"), key=lambda c: c.lineno)
    embedded = [call for call in calls if ast.unparse(call.func) == "self.embeddings"]
    if len(dropouts) == 2 and not embedded:
        (entry,) = dropouts[0].args
        return [method.replace(entry, f"self.t5fastpatch_enter({ast.unparse(entry)})")]
    if len(embedded) == 1 and not dropouts:
        return [method.replace(embedded[0], f"self.t5fastpatch_enter({ast.unparse(embedded[0])})")]
    raise UnexpectedSourceError(
        f"places where the stream may begin: {len(dropouts)} dropouts, {len(embedded)} embeddings"
    )


def leaves_attention(method: Method) -> list[Edit]:
    """Scales the attention's output product, on its accumulator."""
    return replaced_calls(method, {"self.o": _LEAVE, "self.output": _LEAVE}, 1)


def scales_feed_forward(method: Method) -> list[Edit]:
    """Scales the linear half of the hidden product, and the rest in the output product."""
    return replaced_calls(method, {"self.wi": _PRODUCT, "self.wi_1": _PRODUCT, "self.wo": _LEAVE}, 2)


def passes_through(method: Method) -> list[Edit]:
    """Scales what a sparse layer adds for tokens that no expert takes: the normed state, in older releases."""
    clones = [node for node in ast.walk(method.tree) if isinstance(node, ast.Call) and _is_clone(node)]
    return [method.replace(node, f"self.t5fastpatch_pass({ast.unparse(node.func.value)})") for node in clones]  # type: ignore[attr-defined]


def _is_clone(node: ast.Call) -> bool:
    return ast.unparse(node) == "hidden_states.clone()"


def replaced_calls(method: Method, texts: Mapping[str, str], expected: int) -> list[Edit]:
    """Puts a text, in which `{linear}` and `{x}` stand for a linear and its input, in the place of each linear's call.

    Raises:
        UnexpectedSourceError: one is called with anything but one argument, or otherwise used than called and asked for
            its weight, or another number of them is called.
    """
    edits = []
    for node in ast.walk(method.tree):
        match node:
            case ast.Call(func=func, args=[ast.Name(id=argument)], keywords=[]) if ast.unparse(func) in texts:
                linear = ast.unparse(func)
                edits.append(method.replace(node, texts[linear].format(linear=linear, x=argument)))
    uses = [node for node in ast.walk(method.tree) if isinstance(node, ast.Attribute) and ast.unparse(node) in texts]
    weights = [node for node in ast.walk(method.tree) if isinstance(node, ast.Attribute) and node.attr == "weight"]
    if len(edits) != expected or len(uses) - len(weights) != expected:
        raise UnexpectedSourceError(f"calls of {', '.join(texts)}: {len(edits)} known, {len(uses)} uses in all")
    return edits


def reads_epsilon_once(method: Method) -> list[Edit]:
    """No edit; checks that the norm's epsilon is the attribute that stands in for it."""
    uses = [
        node for node in ast.walk(method.tree) if isinstance(node, ast.Attribute) and node.attr == "variance_epsilon"
    ]
    if len(uses) != 1:
        raise UnexpectedSourceError(f"uses of variance_epsilon: {len(uses)}, expected: 1")
    return []


def reads_stream(stack: Stack, norm: nn.Module) -> bool:
    """Whether a norm reads the residual stream: LongT5's `global_input_layer_norm` reads what is normed already."""
    return norm is stack.final_norm or any(norm is each.norm for layer in stack.layers for each in layer)


def objection(stack: Stack) -> str:
    """Why a stack cannot be rescaled; empty if it can.

    All that reads its residual stream, and all that adds to it, has to be upstream's code, or some of it would stay at
    the true scale. The linears may be anybody's: what stands in their place is linear too.
    """
    for number, layer in enumerate(stack.layers):
        kinds = ["feed-forward" if isinstance(each, FeedForward) else each.cross for each in layer]
        if kinds != ([False, True, "feed-forward"] if stack.decoder else [False, "feed-forward"]):
            return f"block {number} holds other sub-layers than the family's own, which nobody would scale"
    parts = [part for layer in stack.layers for part in layer]
    for norm in (stack.final_norm, *(part.norm for part in parts)):
        if role(norm) is not Role.NORM:
            return f"a {type(norm).__name__}, not the family's norm, reads its residual stream"
    inner = {part.module if isinstance(part, Attention) else part.sparse or part.dense[0] for part in parts}
    for module in stack.module.modules():
        cls = type(module)
        # PyTorch's own wrappers call what they wrap.
        known = upstream_class(cls) is not None or cls.__module__.startswith("torch.")
        if not known and not inner.isdisjoint(module.modules()):
            return f"a {cls.__name__}, which has a forward of its own, stands around its sub-layers"
    return ""


def parts(enter: Callable[[Any, torch.Tensor], Any]) -> dict[Role, Part]:
    """What both patches do; `enter` scales what enters the stream."""
    return {
        Role.STACK: Part(enters_stream, 1, members={"t5fastpatch_enter": enter}, around=true_scale),
        Role.ATTENTION: Part(leaves_attention, 1, members={"t5fastpatch_leave": leave_attention}),
        Role.FEED_FORWARD: Part(
            scales_feed_forward,
            2,
            members={"t5fastpatch_product": hidden_product, "t5fastpatch_leave": leave_feed_forward},
        ),
        Role.EXPERTS: Part(passes_through, 1, optional=True, members={"t5fastpatch_pass": enter_half}),
        Role.NORM: Part(reads_epsilon_once, members={"variance_epsilon": property(scaled_epsilon)}, where=reads_stream),
    }
