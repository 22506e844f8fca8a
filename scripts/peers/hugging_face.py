"""The stock model and the patched one, eager and compiled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import t5fastpatch
from t5fastpatch.measure.precision import Precision
from t5fastpatch.measure.workloads import encoder, search

from .job import Job, Peer, Running, UnavailableError, Work


def _stock(job: Job) -> Running:
    return _running(job, job.model)


def _stock_fp32(job: Job) -> Running:
    if job.precision is Precision.FP32:
        raise UnavailableError("it is stock")
    return Running(_call(job, copy.deepcopy(job.model).float()), Precision.FP32.value)


def _stock_compiled(job: Job) -> Running:
    return _running(job, copy.deepcopy(job.model), compiled=True)


def _patched(job: Job, compiled: bool) -> Running:
    model = copy.deepcopy(job.model)
    report = t5fastpatch.apply(model, None if job.patches is None else list(job.patches))
    on = dict.fromkeys(row.patch for row in report.rows if row.state is t5fastpatch.State.ON)
    return _running(job, model, compiled, tuple(on))


def _running(job: Job, model: Any, compiled: bool = False, patches: Sequence[str] = ()) -> Running:
    return Running(_call(job, model, compiled), job.precision.value, patches)


def _call(job: Job, model: Any, compiled: bool = False) -> Callable[[], torch.Tensor]:
    if job.work is Work.GENERATE:
        return _generate(job, model, _static_and_compiled() if compiled else {})
    stack: Any = encoder(model)
    if compiled:
        stack = torch.compile(stack, dynamic=False)
    return lambda: stack(**job.batch).last_hidden_state


def _generate(job: Job, model: Any, options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    length = {"max_new_tokens": job.new_tokens, "min_new_tokens": job.new_tokens}
    return lambda: search(model, job.batch, **length, **options)[:, 1:]


def _static_and_compiled() -> dict[str, Any]:
    """What makes `generate` use a static cache and compile the decoder's step, with CUDA graphs on CUDA."""
    try:
        from transformers import CompileConfig
    except ImportError:
        raise UnavailableError("this transformers does not compile in generate: take a newer one") from None
    config = CompileConfig()
    config._compile_all_devices = True  # it is for accelerators only, unless told
    return {"cache_implementation": "static", "compile_config": config}


EAGER = (
    Peer("stock", _stock),
    Peer("stock, fp32", _stock_fp32),
    Peer("patched", functools.partial(_patched, compiled=False)),
)
COMPILED = (
    Peer("stock, compiled", _stock_compiled),
    Peer("patched, compiled", functools.partial(_patched, compiled=True)),
)
