"""The precisions that are measured, and a model in each of them."""

from __future__ import annotations

import contextlib
import copy
import enum
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from ..errors import T5FastPatchError


class Precision(str, enum.Enum):
    """How a model's weights and products are held.

    `FP16_LOADED` is what `from_pretrained(dtype=torch.float16)` gives: fp16 but for the modules that the class keeps in
    fp32, T5's `wo`. `TF32` is fp32 with its products on tensor cores, on CUDA only.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    FP16_LOADED = "fp16_from_pretrained"
    BF16 = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return _DTYPES[self]

    def __str__(self) -> str:
        return self.value


_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.FP16_LOADED: torch.float16,
    Precision.BF16: torch.bfloat16,
}
_OTHER_NAMES = {
    "float32": Precision.FP32,
    "float16": Precision.FP16,
    "half": Precision.FP16,
    "bfloat16": Precision.BF16,
}


def precision_of(name: str) -> Precision:
    """The precision of that name, PyTorch's names of the dtypes and `half` too.

    Raises:
        T5FastPatchError: there is none.
    """
    names = {each.value: each for each in Precision} | _OTHER_NAMES
    if name not in names:
        raise T5FastPatchError(f"no precision is called {name!r}: there are {', '.join(names)}")
    return names[name]


def in_precision(fp32: Any, precision: Precision) -> Any:
    """A model in a precision, made of the one in fp32 on the same device; itself for fp32 and tf32."""
    if precision.dtype is torch.float32:
        return fp32
    if precision is Precision.FP16_LOADED:
        return _loaded(fp32, precision.dtype)
    return copy.deepcopy(fp32).to(precision.dtype)


def dtype_keyword() -> str:
    """What `from_pretrained` of the installed release calls the dtype of the weights."""
    return "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"


def _loaded(fp32: Any, dtype: torch.dtype) -> Any:
    # A release says which modules stay in fp32 only while it loads.
    with tempfile.TemporaryDirectory() as folder:
        fp32.save_pretrained(folder)
        model = type(fp32).from_pretrained(folder, **{dtype_keyword(): dtype})
    return model.eval().to(fp32.device)


@contextlib.contextmanager
def tensor_cores_for_fp32(on: bool) -> Iterator[None]:
    """Allows tf32 in CUDA's matrix products, or forbids it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
