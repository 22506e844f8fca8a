"""Which CUDA kernels run on tensor cores, told by their names."""

from __future__ import annotations

import re

# The shapes of the matrix instructions (m8n8k4 of Volta, m16n8k8 of Turing, m16n8k16 of Ampere) with a letter for the
# accumulator before them, and the names of the instructions, as NVIDIA's PyProf and the TensorBoard plugin of
# PyTorch's profiler look for them; then what came later: CUTLASS's `tensorop`, cuBLAS's xmma and nvjet, Hopper's
# wgmma, and the fused attentions of PyTorch, which use them for halves only.
_TENSOR_CORES = re.compile(
    r"[hsci]884|[hsci]1688|16816|i8816|[hi]mma|gmma|tensorop|tensor\d+x\d+x\d+|xmma_gemm|nvjet|flash_fwd|fmha_cutlassF_b?f16"
)
# fp32 products on the ordinary cores, some of them by xmma too.
_ORDINARY_CORES = re.compile(r"simt|ffma|xmma_gemm_f32f32_f32f32")


def uses_tensor_cores(kernel: str) -> bool:
    """Whether a kernel of this name does its products on tensor cores.

    A name is a hint and no proof: a kernel of Triton, or of a library not known here, is taken for one that does not.
    """
    return bool(_TENSOR_CORES.search(kernel)) and not _ORDINARY_CORES.search(kernel)
