"""`bucket_cache`: the buckets of relative positions, about 20 small ops at every decoder step, looked up in a table.

Beyond `relative_attention_max_distance` all positions share a bucket, so a table of the distances up to there holds
the buckets of sequences of any length (Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 2.1).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..bypass import runs_eagerly
from ..errors import UnexpectedSourceError
from ..patch import Contract, Role, SourcePatch
from ..rewrite import Edit, Method

# By upstream's function, direction, number of buckets, largest distance and device; `None` where no table will do.
_tables: dict[tuple[Callable[..., Any], bool | None, int, int, torch.device], torch.Tensor | None] = {}


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
    table = bucket_table(self, device) if runs_eagerly(embedding.weight) else None
    if table is None:
        return self.compute_bias(query_length, key_length, device=device, **positions)
    distance = table.shape[0] // 2
    relative = relative_position(query_length, key_length, device, **positions)
    buckets = table[relative.clamp(-distance, distance)]
    return embedding(buckets).permute(2, 0, 1).unsqueeze(0)


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
    elif query_length == 1:
        return torch.arange(-past_seen_tokens, key_length - past_seen_tokens, device=device)[None, :]
    else:
        queries = torch.arange(past_seen_tokens, past_seen_tokens + query_length, device=device)
    return torch.arange(key_length, device=device)[None, :] - queries[:, None]


def bucket_table(attention: Any, device: torch.device) -> torch.Tensor | None:
    """The bucket of each relative position from -D to D, D the largest distance that has one of its own.

    int64, shape (2 D + 1,), the negative positions at the end, where negative indices find them. `None` where the
    buckets beyond D are not all the same.
    """
    buckets, distance = attention.relative_attention_num_buckets, attention.relative_attention_max_distance
    # Pix2Struct's text attention has no such attribute, and looks one way.
    is_decoder = getattr(attention, "is_decoder", None)
    key = type(attention).compute_bias, is_decoder, buckets, distance, device
    if key not in _tables:
        # A table made in these modes would be of use in them only.
        with torch.inference_mode(False), _disable_current_modes():
            _tables[key] = _make_table(type(attention), is_decoder, buckets, distance, device)
    return _tables[key]


def _make_table(
    owner: type, is_decoder: bool | None, buckets: int, distance: int, device: torch.device
) -> torch.Tensor | None:
    """The table, read from what upstream's `compute_bias` looks up."""
    if distance <= buckets // 2:  # no logarithmic part
        return None
    reader = _reader(owner, is_decoder, buckets, distance)
    found = reader.compute_bias(distance + 1, distance + 1, device=device)[0, 0]
    return torch.cat([found[0], found[1:, 0].flip(0)])


def _reader(owner: type, is_decoder: bool | None, buckets: int, distance: int) -> Any:
    """A stand-in for an attention module, whose `compute_bias` gives the buckets themselves."""
    reader: Any = object.__new__(owner)
    vars(reader).update(
        is_decoder=is_decoder,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
        relative_attention_bias=lambda buckets: buckets.unsqueeze(-1),
    )
    return reader


def edits(method: Method) -> list[Edit]:
    """Hands the calls of `self.compute_bias` with lengths of queries and keys to `position_bias`.

    Raises:
        UnexpectedSourceError: upstream's buckets are not those of the table.
    """
    calls = [node for node in ast.walk(method.tree) if isinstance(node, ast.Call) and len(node.args) > 1]
    found = [call.func for call in calls if ast.unparse(call.func) == "self.compute_bias"]
    if found:
        _check_buckets(method.owner)
    return [method.replace(name, "self.t5fastpatch_position_bias") for name in found]


def _check_buckets(owner: type) -> None:
    """Runs upstream's `compute_bias` beside the table, in both directions, near and far, from several positions."""
    known = inspect.signature(owner.compute_bias).parameters  # type: ignore[attr-defined]
    starts: list[dict[str, Any]] = [{}]
    starts += [{"past_seen_tokens": 150}] if "past_seen_tokens" in known else []
    starts += [{"cache_position": torch.arange(150, 157, device="cpu")}] if "cache_position" in known else []
    for is_decoder in (False, True):
        for buckets, distance in ((32, 128), (8, 20)):
            reader = _reader(owner, is_decoder, buckets, distance)
            table = _make_table(owner, is_decoder, buckets, distance, torch.device("cpu"))
            assert table is not None
            for positions in starts:
                theirs = reader.compute_bias(7, 300, device=torch.device("cpu"), **positions)[0, 0]
                relative = relative_position(7, 300, torch.device("cpu"), **positions)
                if not torch.equal(theirs, table[relative.clamp(-distance, distance)]):
                    raise UnexpectedSourceError(f"{owner.__name__}.compute_bias does not give T5's buckets")


PATCH = SourcePatch(
    name="bucket_cache",
    summary="the buckets of relative positions computed anew in about 20 ops -> looked up in a table",
    contract=Contract.EXACT,
    role=Role.ATTENTION,
    edits=edits,
    sites=1,
    members={"t5fastpatch_position_bias": position_bias},
    where=lambda attention: bool(getattr(attention, "has_relative_attention_bias", False)),
)
