"""`bucket_cache`: the buckets of relative positions, about 20 small ops at every decoder step, looked up in a table.

Beyond `relative_attention_max_distance` all positions share a bucket, so the buckets up to there are those of sequences
of any length (Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 2.1).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..bypass import may_bypass, runs_eagerly
from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method


class Buckets:
    """The bucket of every relative position, int64.

    Args:
        near: those from -D to D, and each position beyond has the bucket of -D or of D. Shape (2 D + 1,), the negative
            ones at the end, where negative indices find them.
    """

    def __init__(self, near: torch.Tensor) -> None:
        self._near = near
        self._line = near[:0]  # in order, as far as was asked for

    def of(self, relative_position: torch.Tensor) -> torch.Tensor:
        """The buckets of positions of any shape."""
        distance = self._near.shape[0] // 2
        return self._near[relative_position.clamp(-distance, distance)]

    def consecutive(self, first: int, count: int) -> torch.Tensor:
        """The buckets of the positions from `first` on, which is not above 0; a view, shape (count,)."""
        line, farthest = self._line, max(-first, first + count)
        if line.shape[0] // 2 < farthest:
            # Twice as far, so that a growing sequence seldom outgrows it.
            far = 2 * farthest
            # The modes that the caller is in may make it of no use in others.
            with torch.inference_mode(False), _disable_current_modes():
                line = self._line = self.of(torch.arange(-far, far + 1, device=line.device))
        return line.narrow(0, line.shape[0] // 2 + first, count)


# By upstream's function, direction, number of buckets, largest distance and device; `None` where they would not do.
_known: dict[tuple[Callable[..., Any], bool | None, int, int, torch.device], Buckets | None] = {}


def position_bias(
    self: Any, query_length: Any, key_length: Any, device: torch.device | None = None, **positions: Any
) -> Any:
    """The position bias, shape (1, heads, query_length, key_length), in the dtype of its embeddings.

    Args:
        query_length, key_length: numbers of queries and keys.
        device: where the bias is wanted; `None` for the embeddings'.
        positions: where the queries stand, as the release has it: nothing for 0, 1, ...; `past_seen_tokens`, the
            position of the first; or `cache_position`, those of all, shape (query_length,).
    """
    embedding = self.relative_attention_bias
    device = embedding.weight.device if device is None else device
    buckets = buckets_of(self, device) if runs_eagerly(embedding.weight) and _is_upstreams(self) else None
    if buckets is None:
        return self.compute_bias(query_length, key_length, device=device, **positions)
    first = None if "cache_position" in positions else positions.get("past_seen_tokens", 0)
    # What is on the device is not asked for.
    if isinstance(first, int) and query_length == 1 and _is_lookup(embedding):
        row = torch.index_select(embedding.weight.t(), 1, buckets.consecutive(-first, key_length))
        return row[None, :, None, :]
    relative = relative_position(query_length, key_length, device, **positions)
    # Every layer would copy a permuted one.
    return embedding(buckets.of(relative)).permute(2, 0, 1).unsqueeze(0).contiguous()


def relative_position(
    query_length: Any,
    key_length: Any,
    device: torch.device,
    past_seen_tokens: Any = 0,
    cache_position: torch.Tensor | None = None,
) -> torch.Tensor:
    """Positions of the keys minus those of the queries: int64, shape (query_length, key_length)."""
    if cache_position is not None:
        queries = cache_position.to(device)
    elif isinstance(past_seen_tokens, torch.Tensor):
        queries = torch.arange(query_length, device=device) + past_seen_tokens
    else:
        queries = torch.arange(past_seen_tokens, past_seen_tokens + query_length, device=device)
    return torch.arange(key_length, device=device)[None, :] - queries[:, None]


def _is_upstreams(attention: Any) -> bool:
    """Whether nobody has put a method of their own in the place of those that make buckets and bias."""
    methods = attention.compute_bias, attention._relative_position_bucket
    return all(getattr(method, "__module__", "").startswith("transformers.models.") for method in methods)


def _is_lookup(embedding: Any) -> bool:
    """Whether the embeddings are looked up and nothing more, and no gradient is wanted.

    The gradient of another kind of look-up is summed in another order.
    """
    differentiable = torch.is_grad_enabled() and embedding.weight.requires_grad
    return (
        type(embedding) is nn.Embedding and not differentiable and embedding.max_norm is None and may_bypass(embedding)
    )


def buckets_of(attention: Any, device: torch.device) -> Buckets | None:
    """The buckets of an attention module's positions; `None` where those far away are not all the same."""
    number, distance = attention.relative_attention_num_buckets, attention.relative_attention_max_distance
    # Pix2Struct's text attention has no such attribute, and looks one way.
    is_decoder = getattr(attention, "is_decoder", None)
    key = type(attention).compute_bias, is_decoder, number, distance, device
    if key not in _known:
        with torch.inference_mode(False), _disable_current_modes():
            _known[key] = _read(type(attention), is_decoder, number, distance, device)
    return _known[key]


def _read(owner: type, is_decoder: bool | None, number: int, distance: int, device: torch.device) -> Buckets | None:
    """The buckets that upstream's `compute_bias` looks up."""
    if distance <= number // 2:  # no logarithmic part
        return None
    found = _reader(owner, is_decoder, number, distance).compute_bias(distance + 1, distance + 1, device=device)[0, 0]
    return Buckets(torch.cat([found[0], found[1:, 0].flip(0)]))


def _reader(owner: type, is_decoder: bool | None, number: int, distance: int) -> Any:
    """A stand-in for an attention module, whose `compute_bias` gives the buckets themselves."""
    reader: Any = object.__new__(owner)
    vars(reader).update(
        is_decoder=is_decoder,
        relative_attention_num_buckets=number,
        relative_attention_max_distance=distance,
        relative_attention_bias=lambda buckets: buckets.unsqueeze(-1),
    )
    return reader


def edits(method: Method) -> list[Edit]:
    """Hands the calls of `self.compute_bias` with lengths of queries and keys to `position_bias`.

    Releases 4.48 to 5.0 make a number of queries of a position, on the device, in every block. Cross-attention has no
    bias and does not use it, nor does `compute_bias` where it gets the positions.

    Raises:
        UnexpectedSourceError: upstream's buckets are not those of the table.
    """
    if method.owner.__name__.endswith("Block"):
        keywords = (node for node in ast.walk(method.tree) if isinstance(node, ast.keyword))
        numbers = [each.value for each in keywords if each.arg == "query_length" and _is_number(each.value)]
        return [method.replace(number, "hidden_states.shape[1]") for number in numbers]
    calls = [node for node in ast.walk(method.tree) if isinstance(node, ast.Call) and len(node.args) > 1]
    found = [call.func for call in calls if ast.unparse(call.func) == "self.compute_bias"]
    if found:
        _check_buckets(method.owner)
    return [
        *(method.replace(name, "self.t5fastpatch_position_bias") for name in found),
        *(method.replace(number, "None") for number in _unused_numbers(method)),
    ]


def _is_number(node: ast.expr) -> bool:
    return ast.unparse(node) == "cache_position[-1] + 1"


def _unused_numbers(method: Method) -> list[ast.expr]:
    """The number of queries, where it goes to a `compute_bias` that gets their positions too, and nowhere else."""
    numbers, uses = {}, []
    for node in ast.walk(method.tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp(orelse=number)) if _is_number(number):
                numbers[name] = number
            case ast.Call(func=ast.Attribute(attr="compute_bias"), args=[ast.Name(id=name), *_], keywords=keywords):
                uses += [name] if any(keyword.arg == "cache_position" for keyword in keywords) else []
    loads = [node.id for node in ast.walk(method.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return [number for name, number in numbers.items() if loads.count(name) == uses.count(name) == 1]


def _check_buckets(owner: type) -> None:
    """Runs upstream's `compute_bias` beside the table, in both directions, near and far, from several positions."""
    known = inspect.signature(owner.compute_bias).parameters  # type: ignore[attr-defined]
    starts: list[dict[str, Any]] = [{}]
    starts += [{"past_seen_tokens": 150}] if "past_seen_tokens" in known else []
    starts += [{"cache_position": torch.arange(150, 157, device="cpu")}] if "cache_position" in known else []
    cpu = torch.device("cpu")
    for is_decoder in (False, True):
        for number, distance in ((32, 128), (8, 20)):
            buckets = _read(owner, is_decoder, number, distance, cpu)
            reader = _reader(owner, is_decoder, number, distance)
            for positions in starts:
                theirs = reader.compute_bias(7, 300, device=cpu, **positions)[0, 0]
                if buckets is None or not torch.equal(theirs, buckets.of(relative_position(7, 300, cpu, **positions))):
                    raise UnexpectedSourceError(f"{owner.__name__}.compute_bias does not give T5's buckets")


PATCH = SourcePatch(
    name="bucket_cache",
    summary="the buckets of relative positions computed anew in about 20 ops -> looked up in a table",
    contract=Contract.EXACT,
    role=Role.ATTENTION,
    more_roles=frozenset({Role.BLOCK}),
    edits=edits,
    sites=(1, 2),
    members={"t5fastpatch_position_bias": position_bias},
    # A block has no such attribute.
    where=lambda module: bool(getattr(module, "has_relative_attention_bias", True)),
)
