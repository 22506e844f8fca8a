"""Runs a model on shapes and dtypes alone: no weights, no memory, no GPU, whatever the model's size."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import T5FastPatchError
from ...loading import first_line
from .counting import census
from .work import Census

Model = TypeVar("Model", bound=nn.Module)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Inside the `with` block every new tensor has a shape, dtype and device but no data.

    Where the host asks a device for a value (`if tensor:`, `.item()`) the answer is 0 or False: a check for infinities
    finds none. Shapes that depend on data raise PyTorch's own errors.
    """
    with FakeTensorMode(), _Answers(), _Copies(), torch.no_grad():
        yield


def without_data(model: Model, dtype: torch.dtype | None = None, device: str = "cpu") -> Model:
    """A copy of the model with parameters and buffers that have no data; to be called inside `shapes_only`.

    Args:
        model: stays as it is; its weights may be on the meta device.
        dtype: of the floating-point parameters, as after `model.to(dtype)`; their own without it.
        device: where the copy's tensors pretend to be.
    """

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        cast = dtype if tensor.is_floating_point() else None
        return torch.empty(tensor.shape, dtype=cast or tensor.dtype, device=device)

    # What is in the memo already is not copied; a tied weight stays tied. Whether a weight wants a gradient stays too,
    # as `torch.matmul` goes by it.
    memo: dict[int, Any] = {id(each): nn.Parameter(shape_of(each), each.requires_grad) for each in model.parameters()}
    memo |= {id(each): shape_of(each) for each in model.buffers()}
    return copy.deepcopy(model, memo)


def fake_cuda_census(model: Model, make_call: Callable[[Model], Callable[[], object]]) -> Census:
    """The census of a call as CUDA would run it, without a GPU.

    Args:
        model: stays as it is.
        make_call: gets a copy of the model that pretends to be on CUDA and makes the call to be counted; tensors that
            it makes on `device="cuda"` have no data either.

    Raises:
        T5FastPatchError: this PyTorch has no CUDA, or asks for a GPU even where there is no data.
        Whatever the call raises.
    """
    with shapes_only():
        _check_cuda()
        fake = without_data(model, device="cuda")
        return census(make_call(fake), fake)


def _check_cuda() -> None:
    try:
        torch.empty(1, device="cuda")[0]
    except RuntimeError as error:
        raise T5FastPatchError(
            "a census on CUDA tensors without data needs a CUDA build of PyTorch and, without a GPU, a recent one; "
            f"this is {torch.__version__}: {first_line(error)}. The census on the CPU needs neither"
        ) from error


class _Copies(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            # PyTorch's own would copy the mode as well, and the tensor would belong to that other one.
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype is torch.bool else 0
        return func(*args, **(kwargs or {}))
