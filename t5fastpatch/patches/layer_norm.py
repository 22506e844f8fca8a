"""`layer_norm`: T5's written-out RMS norm as PyTorch's fused one.

y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019), which
upstream spells in six ops and two casts. `F.rms_norm` is one kernel on CUDA, and accumulates in fp32 for half inputs.
"""

from __future__ import annotations

import ast
import types

import torch
from torch import nn

from ..patch import Contract, ForwardPatch, Role
from ..rewrite import Method


def forward(self, hidden_states):
    weight = self.weight
    half = weight.dtype in (torch.float16, torch.bfloat16)
    if half and hidden_states.device.type == "cpu" and torch.is_grad_enabled():
        # On a CPU the backward of rms_norm takes longer than stock's in half precision; this one takes less.
        normed = hidden_states.float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return normed.to(weight.dtype) * weight
    if hidden_states.dtype == weight.dtype:
        normed = nn.functional.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
    else:
        # fp16 models loaded with `wo` in fp32 bring an fp32 residual to fp16 weights; autocast brings the reverse.
        wide = torch.promote_types(hidden_states.dtype, weight.dtype)
        normed = nn.functional.rms_norm(hidden_states.to(wide), weight.shape, weight.to(wide), self.variance_epsilon)
    # Half weights decide the output's dtype, whatever autocast says.
    return normed.to(weight.dtype) if half else normed


def upstream_has_it(method: Method) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "rms_norm" for node in ast.walk(method.tree))


def objection(method: Method) -> str:
    """Runs upstream's forward beside ours, in every pair of dtypes, on rows at the ends of fp16's range.

    Both must give the formula's result in fp64 within a few roundings, and the same dtype.
    """
    rows = torch.linspace(-2.0, 3.0, 24, dtype=torch.float64, device="cpu").reshape(3, 8)
    rows = torch.cat([rows, rows.sign()[:1] * 6e4, rows[:1] * 1e-4, torch.zeros_like(rows[:1])])
    gain = torch.linspace(0.5, 2.0, 8, dtype=torch.float64, device="cpu")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for x_dtype in dtypes:
        for weight_dtype in dtypes:
            norm = types.SimpleNamespace(weight=gain.to(weight_dtype), variance_epsilon=1e-3)
            x = rows.to(x_dtype)
            try:
                with torch.no_grad():
                    theirs, ours = method.function(norm, x), forward(norm, x)
            except Exception as error:
                return f"upstream's forward is not that of an RMS norm with weight and variance_epsilon ({error!r})"
            if ours.dtype != theirs.dtype:
                return f"{x_dtype} rows and {weight_dtype} weights give {ours.dtype}, upstream gives {theirs.dtype}"
            wide = x.double()
            exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3) * norm.weight.double()
            rounding = torch.finfo(ours.dtype).eps * (exact.abs() + torch.finfo(ours.dtype).tiny)
            if not ((theirs.double() - exact).abs() <= 4 * rounding).all():
                return f"upstream's forward is not x / sqrt(mean(x^2) + eps) * weight, for {x_dtype} and {weight_dtype}"
            if not ((ours.double() - exact).abs() <= 2 * rounding).all():
                return f"F.rms_norm of torch {torch.__version__} is off for {x_dtype} rows and {weight_dtype} weights"
    return ""


PATCH = ForwardPatch(
    name="layer_norm",
    summary="the RMS norm written out in Python -> F.rms_norm",
    contract=Contract.ROUNDING,
    role=Role.NORM,
    forward=forward,
    upstream_has_it=upstream_has_it,
    objection=objection,
)
