"""`mask_sync`: a padding mask is looked into once, and what it becomes is kept for as long as it lives.

Upstream's mask functions ask `padding_mask.all()` in an `if`, which makes the host wait for the device, and build the
4-D mask anew, at every forward. In generation it is the same padding mask at every step.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method

_Create = Callable[..., Any]
_Key = tuple[Any, ...]

# As many results of one mask are kept: those of an encoder and a decoder, in two dtypes.
_KEPT = 4


@dataclasses.dataclass
class Padding:
    """What is known of a padding mask, of shape (batch, key_length), as it is at present.

    Attributes:
        state: tells whether the mask has been changed since.
        clean: how many positions there are before the first at which a sequence is padded; `None` if not known.
        rows: what upstream makes of it for one query, by what else that depends on, and that tensor's version: shape
            (batch, 1, 1, key_length), or `None` where nothing is padded.
    """

    state: tuple[int, int, torch.Size]
    clean: int | None = None
    rows: Mapping[_Key, tuple[torch.Tensor | None, int]] = dataclasses.field(default_factory=dict)

    def row(self, key: _Key, build: Callable[[], Any]) -> Any:
        """The kept row, or the one that `build` gives."""
        row, version = self.rows.get(key, (None, None))
        if version is None or (row is not None and row._version != version):
            with torch.inference_mode(False):  # what inference mode makes has no version, and no use in training
                row = build()
            if row is None or _is_plain(row):
                kept = 0 if row is None else row._version
                # A new mapping, since another thread may read the present one.
                self.rows = dict([*self.rows.items(), (key, (row, kept))][-_KEPT:])
        return row


_paddings: MutableMapping[torch.Tensor, Padding] = WeakTensorKeyDictionary()


def known(mask: Any) -> Padding | None:
    """What is known of a mask; `None` for what is no plain 2-D tensor, or cannot be told from its later versions.

    Upstream asks no question while a graph is traced or captured, and then nothing is kept either.
    """
    if not _is_plain(mask) or mask.ndim != 2 or mask.is_inference():
        return None
    if torch._C._get_tracing_state() is not None or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    state = mask._version, mask.data_ptr(), mask.shape
    padding = _paddings.get(mask)
    if padding is None or padding.state != state:
        padding = _paddings[mask] = Padding(state)
    return padding


def bidirectional_mask(create: _Create) -> _Create:
    """Stands in for `create_bidirectional_mask`."""
    return create if torch.compiler.is_compiling() else functools.partial(_bidirectional_mask, create)


def causal_mask(create: _Create) -> _Create:
    """Stands in for `create_causal_mask`."""
    return create if torch.compiler.is_compiling() else functools.partial(_causal_mask, create)


def inverted_mask(self: Any, mask: torch.Tensor) -> Any:
    """Stands in for `invert_attention_mask`, by which releases to 5.0 make additive masks."""
    padding = None if torch.compiler.is_compiling() else known(mask)
    if padding is None:
        return self.invert_attention_mask(mask)
    stream = torch.cuda.current_stream(mask.device) if mask.is_cuda else None
    return padding.row(("inverted", self.dtype, stream), lambda: self.invert_attention_mask(mask))


def ones(*size: Any, **options: Any) -> torch.Tensor:
    """`torch.ones`, of which it need not be asked whether they are."""
    if torch.compiler.is_compiling():
        return torch.ones(*size, **options)
    with torch.inference_mode(False):  # for the sake of its version
        mask = torch.ones(*size, **options)
    padding = known(mask)
    if padding is not None:
        padding.clean = mask.shape[1]
    return mask


def _bidirectional_mask(create: _Create, **arguments: Any) -> Any:
    """All queries see the same keys, so that the mask of one query gives that of any number."""
    mask, config = arguments["attention_mask"], arguments["config"]
    name, embeds = _embeds(arguments)
    padding = known(mask) if _is_upstreams(config._attn_implementation) else None
    if padding is None or not embeds.shape[1]:
        return create(**arguments)
    if padding.clean == mask.shape[1]:
        return None
    states = arguments.get("encoder_hidden_states")
    key = _key(config._attn_implementation, embeds, embeds if states is None else states)
    row = padding.row(key, lambda: create(**{**arguments, name: embeds[:, :1]}))
    if row is None or embeds.shape[1] == 1:
        return row
    return row.expand(-1, -1, embeds.shape[1], -1).contiguous()


def _causal_mask(create: _Create, **arguments: Any) -> Any:
    """Upstream's mask, with the answer to its question given beforehand."""
    mask, config = arguments["attention_mask"], arguments["config"]
    cache = arguments.get("cache", arguments.get("past_key_values"))
    asks = config._attn_implementation == "sdpa" and _is_upstreams("sdpa") and _can_be_told(create)
    padding = known(mask) if asks else None
    if padding is None:
        return create(**arguments)
    _, embeds = _embeds(arguments)
    keys = _key_length(mask, embeds.shape[1], cache)
    if keys is None:
        return create(**arguments)
    if padding.clean is None:
        padding.clean = int(mask.all(0).cumprod(0).sum())
    if padding.clean >= keys:
        return create(**{**arguments, "attention_mask": None})
    return create(**arguments, allow_is_causal_skip=False)


def _key_length(mask: torch.Tensor, queries: int, cache: Any) -> int | None:
    """The number of keys, where upstream builds no mask if none of them is padded; `None` elsewhere."""
    if cache is None:
        return queries if queries == mask.shape[1] else None
    # In caches of these kinds there are more keys than have been seen, or fewer.
    if getattr(cache, "is_compileable", True) or any(getattr(cache, "is_sliding", [True])):
        return None
    seen = cache.get_seq_length()
    return seen + queries if queries and (queries == 1 or not seen) else None


def _is_plain(tensor: Any) -> bool:
    """Whether it is a real tensor: not fake, nor of another class, nor of a transform of `torch.func`."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _is_upstreams(attention: str) -> bool:
    """Whether an attention implementation has a mask that upstream itself builds, and from padding alone."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as functions

    own = "transformers.masking_utils"
    return attention in ("sdpa", "eager") and getattr(functions[attention], "__module__", "") == own


@functools.cache
def _can_be_told(create: _Create) -> bool:
    return "allow_is_causal_skip" in inspect.signature(create).parameters


def _embeds(arguments: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
    """The queries' embeddings, by either of their names; shape (batch, query_length, d_model)."""
    name = "inputs_embeds" if "inputs_embeds" in arguments else "input_embeds"
    return name, arguments[name]


def _key(attention: str, embeds: torch.Tensor, states: torch.Tensor) -> _Key:
    """What a bidirectional mask depends on beside its padding."""
    # Another stream would not wait for the one that builds it.
    stream = torch.cuda.current_stream(embeds.device) if embeds.is_cuda else None
    return attention, states.shape[0], states.dtype, states.device, embeds.device, stream


_STAND_INS = {
    "create_bidirectional_mask": "self.t5fastpatch_bidirectional_mask",
    "create_causal_mask": "self.t5fastpatch_causal_mask",
}
_KEYWORDS = {
    "config",
    "inputs_embeds",
    "input_embeds",
    "attention_mask",
    "encoder_hidden_states",
    "cache",
    "past_key_values",
    "cache_position",
}


def edits(method: Method) -> list[Edit]:
    """Puts the functions above in the place of upstream's, by their names alone.

    With them goes `attention_mask = torch.ones(...)`, the decoder's mask where it was given none.

    Raises:
        UnexpectedSourceError: a mask function is called with other arguments than those that its results are known by.
    """
    calls, made, inverted = [], [], []
    for node in ast.walk(method.tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in _STAND_INS:
                calls.append(node)
            case ast.Assign(targets=[ast.Name(id="attention_mask")], value=ast.Call(func=function)):
                made += [function] if ast.unparse(function) == "torch.ones" else []
            case ast.Attribute(attr="invert_attention_mask") if ast.unparse(node.value) == "self":
                inverted.append(method.replace(node, "self.t5fastpatch_inverted_mask"))
    for call in calls:
        names = {str(keyword.arg) for keyword in call.keywords}
        if call.args or not names <= _KEYWORDS or not {"config", "attention_mask"} < names:
            raise UnexpectedSourceError(f"{ast.unparse(call.func)} is called with {', '.join(sorted(names))}")
    stand_ins = [
        method.replace(call.func, f"{_STAND_INS[ast.unparse(call.func)]}({ast.unparse(call.func)})") for call in calls
    ]
    return inverted + stand_ins + [method.replace(each, "self.t5fastpatch_ones") for each in made if calls]


PATCH = SourcePatch(
    name="mask_sync",
    summary="padding masks looked into and built at every forward -> once a mask",
    contract=Contract.EXACT,
    role=Role.STACK,
    edits=edits,
    sites=(1, 3, 4),
    members={
        "t5fastpatch_bidirectional_mask": staticmethod(bidirectional_mask),
        "t5fastpatch_causal_mask": staticmethod(causal_mask),
        "t5fastpatch_inverted_mask": inverted_mask,
        "t5fastpatch_ones": staticmethod(ones),
    },
)
