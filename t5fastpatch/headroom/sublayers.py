"""The most that a sub-layer can give, whatever enters it: from its norm's gain and its weights.

An RMS norm gives g * x with ||x||_2 <= sqrt(d_model), so its sub-layer is bounded before it has seen anything. All
figures are in fp64 and include what rounding to fp16 can add:

- a weight is off by 2**-11 of itself (by 2**-25 where it is subnormal), and a sum of n products in fp32, in any order,
  by n * 2**-24 of the sum of their absolute values: both change the matrix, row by row, by at most that much, and an
  operator norm by at most the Frobenius norm of that change;
- the norm rounds twice, each product, activation and sum of two once to four times, each by 2**-11 of the value: these
  are factors, and `_ROUNDED`, eight such roundings, covers all between two products;
- the softmax's weights sum to 1 but for their rounding, by 2**-11 of each or by 2**-25 where they are subnormal, and
  for the sum in fp32: `_WEIGHTS_SUM`, for up to 65,536 keys.

Underflow of results, 2**-25 each, is left out: it is not seen near 65504.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import norms
from .places import Place
from .plain import Names, check_activation, enlargement, gain_of, weight_of, wide
from .stacks import Attention, FeedForward

_HALF, _TINY, _SINGLE = 2.0**-11, 2.0**-25, 2.0**-24
_ROUNDED = 1 + 8 * _HALF
_WEIGHTS_SUM = 1 + _HALF + 65536 * (_TINY + _SINGLE)


@dataclasses.dataclass(frozen=True)
class Normed:
    """What a product reads behind a norm: vectors g * x with ||x||_2 <= radius.

    Attributes:
        gain: the norm's |g|, (d_model,), fp64.
        radius: sqrt(d_model), and what dropout behind the norm makes of it.
    """

    gain: torch.Tensor
    radius: float

    @classmethod
    def by(cls, norm: nn.Module, names: Names, enlarged: float = 1.0) -> Normed:
        """The output of a norm, times what enlarges it since."""
        gain = gain_of(norm, names)
        return cls(gain, len(gain) ** 0.5 * enlarged)

    @property
    def largest(self) -> torch.Tensor:
        """The largest absolute value of each coordinate, (d_model,)."""
        return self.gain * (self.radius * _ROUNDED)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a sub-layer can give.

    Attributes:
        largest: by place, the largest absolute value.
        branch: the largest absolute value of each coordinate that it adds to the residual stream, (d_model,), fp64.
        fixed: whether rescaling leaves its hidden product as it is.
    """

    largest: dict[Place, float]
    branch: torch.Tensor
    fixed: bool = False


class _Product:
    """A product that reads a normed state: y = A x, ||x||_2 <= radius, A the weight times the gain.

    Attributes:
        radius: of x, with the roundings that are factors.
        norms: the 2-norm of each row of A, (out,).
        error: the 2-norm of what rounding adds to each row of A, (out,).
    """

    def __init__(self, linear: nn.Module, read: Normed, names: Names) -> None:
        self._weight = weight_of(linear, names)
        self._gain = read.gain.to(wide(self._weight[:1]).device)
        self.radius = read.radius * _ROUNDED
        self.norms = torch.cat([piece.norm(dim=1) for piece in self.pieces()])
        underflow = _TINY * float(read.gain.norm())
        self.error = (_HALF + len(self._gain) * _SINGLE) * self.norms + underflow

    def pieces(self) -> Iterator[torch.Tensor]:
        """A in fp64, some rows at a time."""
        return (wide(rows) * self._gain for rows in torch.split(self._weight, norms.PIECE))

    @property
    def rows(self) -> torch.Tensor:
        """The largest |y_j|: radius * ||A_j||_2, (out,)."""
        return self.radius * (self.norms + self.error)

    def by_head(self, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A_h A_h^T of each head, (heads, d, d); ||A_h|| and what rounding may add to that, (heads,)."""
        matrix = torch.cat(list(self.pieces())).reshape(heads, -1, len(self._gain))
        gram = matrix @ matrix.mT
        return gram, norms.largest_eigenvalue(gram).sqrt(), self.error.reshape(heads, -1).norm(dim=1)


def head_logits(linear: nn.Module, read: Normed, names: Names) -> float:
    """The largest absolute logit that an lm_head makes of a normed state."""
    return float(_Product(linear, read, names).rows.max())


def attention(sub_layer: Attention, reads: list[Normed], position_bias: float, names: Names) -> Bounds:
    """The most that an attention sub-layer can give.

    Scores: |(Q_h x).(K_h y)| <= radius^2 ||Q_h^T K_h||, and the position bias. Output: each head gives a mean z_h of
    value vectors, so |z_hj| and ||z_h||_2 are at most a single value's, and |(O z)_i| is at most the sum over the heads
    of the smaller of ||O_ih||_2 ||z_h||_2 and sum_j |O_ihj| |z_hj|.

    Args:
        sub_layer: the sub-layer.
        reads: all that keys and values are made of.
        position_bias: the largest absolute value that is added to the scores.
        names: for messages.
    """
    heads: int = sub_layer.module.n_heads  # type: ignore[assignment]
    query = _Product(sub_layer.query, Normed.by(sub_layer.norm, names), names)
    projections, scores = [query.rows.max()], []
    coordinates, lengths = [], []
    for read in reads:
        key, value = (_Product(each, read, names) for each in (sub_layer.key, sub_layer.value))
        projections += [key.rows.max(), value.rows.max()]
        scores.append(_largest_score(query, key, heads))
        coordinates.append(value.rows)
        _, norm, error = value.by_head(heads)
        lengths.append(value.radius * (norm + error))
    weights = _WEIGHTS_SUM * enlargement(sub_layer.module.dropout)
    coordinate = torch.stack(coordinates).amax(0).reshape(heads, -1) * weights
    length = torch.stack(lengths).amax(0) * weights
    branch = torch.cat([_mixed(piece, length, coordinate) for piece in _absolute(weight_of(sub_layer.output, names))])
    branch = branch * _summed(coordinate.numel()) * enlargement(sub_layer.dropout)
    largest = {
        Place.PROJECTIONS: float(torch.stack(projections).max()),
        Place.SCORES: (max(scores) + position_bias) * _ROUNDED,
        Place.ATTENTION: float(branch.max()),
    }
    return Bounds(largest, branch)


def feed_forward(sub_layer: FeedForward, names: Names) -> Bounds:
    """The most that a feed-forward sub-layer can give; of experts, the most that any of them can.

    A router multiplies by a probability. Older releases (4.48 does) pass tokens that no expert takes through as their
    normed state; that is taken in for every release.
    """
    jitter = float(getattr(getattr(sub_layer.sparse, "router", None), "jitter_noise", 0.0))
    read = Normed.by(sub_layer.norm, names, 1 + jitter)
    experts = [_dense(each, read, names) for each in sub_layer.dense]
    branches = [each.branch for each in experts] + ([read.largest] if sub_layer.sparse is not None else [])
    branch = torch.stack([each.to(branches[0].device) for each in branches]).amax(0) * enlargement(sub_layer.dropout)
    largest = {place: max(each.largest[place] for each in experts) for place in experts[0].largest}
    largest[Place.FEED_FORWARD] = float(branch.max())
    return Bounds(largest, branch, any(each.fixed for each in experts))


def _dense(dense: Any, read: Normed, names: Names) -> Bounds:
    check_activation(dense, names)
    return _gated(dense, read, names) if hasattr(dense, "wi_1") else _ungated(dense, read, names)


def _ungated(dense: Any, read: Normed, names: Names) -> Bounds:
    """wo act(wi n): |act(y)| <= |y|; ReLU gives no negative values, so one sign of wo's entries counts at a time."""
    relu = isinstance(dense.act, nn.ReLU)
    inner = _Product(dense.wi, read, names)
    squared = norms.squared_norm(norms.grams(inner.pieces()))
    length = inner.radius * (squared**0.5 + float(inner.error.norm()))
    kept = enlargement(dense.dropout)
    weight = weight_of(dense.wo, names)
    signs = [weight.clamp(min=0), weight.clamp(max=0)] if relu else [weight]
    branches = [
        torch.cat([torch.minimum(piece @ inner.rows, piece.norm(dim=1) * length) for piece in _absolute(each)])
        for each in signs
    ]
    branch = torch.stack(branches).amax(0) * kept * _summed(weight.shape[1])
    return Bounds({Place.HIDDEN: float(inner.rows.max()) * kept}, branch, fixed=not relu)


def _gated(dense: Any, read: Normed, names: Names) -> Bounds:
    """wo (act(wi_0 n) * wi_1 n): one hidden product is at most radius^2 (||a|| ||b|| + |a.b|) / 2, a and b its rows.

    The sum of them under wo's absolute weights, |wo_ij| <= D_j, is at most the largest eigenvalue of
    (t A^T D A + B^T D B / t) / 2 times radius^2 for any t: |a.x b.x| <= (t (a.x)^2 + (b.x)^2 / t) / 2.
    """
    gate, linear = (_Product(each, read, names) for each in (dense.wi_0, dense.wi_1))
    kept = enlargement(dense.dropout)
    overlap = torch.cat([(one * other).sum(1) for one, other in zip(gate.pieces(), linear.pieces(), strict=True)])
    exact = (overlap.abs() - gate.norms * linear.norms) / 2 * gate.radius**2
    hidden = (gate.rows * linear.rows + exact) * kept
    weight = weight_of(dense.wo, names)
    highest = torch.stack([piece.amax(0) for piece in _absolute(weight)]).amax(0)
    together = _weighted_product(gate, linear, highest) * kept
    branch = torch.cat([piece @ hidden for piece in _absolute(weight)]).clamp(max=together) * _summed(weight.shape[1])
    largest = {
        Place.GATE: float(gate.rows.max()),
        Place.HIDDEN: max(float(hidden.max()), float(linear.rows.max())),
    }
    return Bounds(largest, branch)


def _weighted_product(gate: _Product, linear: _Product, weights: torch.Tensor) -> float:
    """An upper bound of sum_j weights_j |y_j| |z_j| for two products that read the same vector."""
    root = weights.sqrt()
    gate_grams, linear_grams = (norms.grams(_scaled(each, root)) for each in (gate, linear))
    sizes = [sum(float(each.trace()) for each in grams) for grams in (gate_grams, linear_grams)]
    errors = [float((each.error * root).square().sum()) for each in (gate, linear)]
    balance = ((sizes[1] + errors[1] + _TINY) / (sizes[0] + errors[0] + _TINY)) ** 0.5
    joined = [balance * one + other / balance for one, other in zip(gate_grams, linear_grams, strict=True)]
    error = balance * errors[0] + errors[1] / balance
    bound: float = gate.radius**2 / 2 * (norms.squared_norm(joined) ** 0.5 + error**0.5) ** 2
    return bound


def _largest_score(query: _Product, key: _Product, heads: int) -> float:
    query_gram, query_norm, query_error = query.by_head(heads)
    key_gram, key_norm, key_error = key.by_head(heads)
    # Queries and keys are rounded before they are multiplied.
    rounded = (query_norm + query_error) * (key_norm + key_error) * _ROUNDED - query_norm * key_norm
    return float((norms.largest_pairing(query_gram, key_gram) + rounded).max()) * query.radius * key.radius


def _scaled(product: _Product, factors: torch.Tensor) -> Iterator[torch.Tensor]:
    """A with its rows times these factors, some rows at a time."""
    pieces = zip(product.pieces(), torch.split(factors, norms.PIECE), strict=True)
    return (piece * factor[:, None] for piece, factor in pieces)


def _mixed(output: torch.Tensor, length: torch.Tensor, coordinate: torch.Tensor) -> torch.Tensor:
    """What some absolute rows of `o` make of the heads' means, of these 2-norms and largest coordinates."""
    by_head = output.reshape(-1, *coordinate.shape)
    return torch.minimum(by_head.norm(dim=2) * length, torch.einsum("ihj,hj->ih", by_head, coordinate)).sum(1)


def _absolute(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The absolute weights in fp64, with what underflow can add, some rows at a time."""
    return (wide(rows).abs().add_(_TINY) for rows in torch.split(weight, norms.PIECE))


def _summed(terms: int) -> float:
    """What rounding can do to a sum under absolute weights: the weights', the sum's, the result's and dropout's."""
    return (1 + _HALF + terms * _SINGLE) * _ROUNDED
