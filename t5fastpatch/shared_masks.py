"""Attention masks that the layers of a stack share: made by the first layer, gone with the tensors they are made of."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, MutableMapping

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# PyTorch's memory-efficient kernel on CUDA copies a mask, at every call, unless its strides are multiples of this many
# elements (`preprocess_mask` in aten/src/ATen/native/transformers/attention.cpp).
_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class _Made:
    """A mask, and what it was made of beside the tensor that it is kept for."""

    mask: Tensor
    other: weakref.ref[Tensor] | None
    state: Hashable


class SharedMasks:
    """Masks by the tensors that they are made of, which are not kept alive for it.

    The same tensors at the same versions give the same mask. Inference tensors have no versions: there, whoever
    changes one in place between two layers is not noticed.
    """

    def __init__(self) -> None:
        self._made: MutableMapping[Tensor, _Made] = WeakTensorKeyDictionary()

    def get(self, make: Callable[[], Tensor], source: Tensor, other: Tensor | None, key: Hashable) -> Tensor:
        """What `make` gives, or gave when it was last called for the same arguments; lives as long as `source`.

        Args:
            make: makes a mask of `source`, `other` and `key` alone.
            source, other: tensors that are `shareable`; `other` may be a new view of the same one.
            key: what else the mask depends on.
        """
        root = None if other is None else other if other._base is None else other._base
        state = key, _state(source), None if other is None else _state(other), _in_graph_capture(source)
        made = self._made.get(source)
        if made is not None and made.state == state and (made.other and made.other()) is root:
            return made.mask
        mask = make()
        if mask is not source:  # which it would keep alive
            self._made[source] = _Made(mask, None if root is None else weakref.ref(root), state)
        return mask

    def forget(self, source: Tensor) -> None:
        """Has the mask of `source` made anew, if there is one."""
        self._made.pop(source, None)


def shareable(*tensors: Tensor | None) -> bool:
    """Whether a mask of these tensors may be made once for all layers.

    Not where gradients flow through it: they would be summed in another order, and checkpoints recomputed with other
    tensors. Nor if a tensor is fake, a parameter, or of any other kind.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    grads = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    return not grads and all(type(tensor) is Tensor for tensor in given)


def laid_out(mask: Tensor) -> Tensor:
    """The mask as its device's SDPA kernels take it without a copy."""
    return with_aligned_rows(mask) if mask.is_cuda else mask.contiguous()


def with_aligned_rows(mask: Tensor) -> Tensor:
    """The mask with rows that begin at multiples of 8 elements; there are gaps of zeros between them if need be."""
    gap = -mask.shape[-1] % _ALIGNMENT
    return nn.functional.pad(mask, (0, gap))[..., : mask.shape[-1]] if gap else mask.contiguous()


def _state(tensor: Tensor) -> Hashable:
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _in_graph_capture(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, which must make its masks itself, to make them again when replayed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
