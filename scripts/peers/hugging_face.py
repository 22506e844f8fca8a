"""The stock model and the patched one, eager and compiled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

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
    # What `generate` compiles it leaves on the model.
    model = copy.deepcopy(job.model) if job.work is Work.GENERATE else job.model
    return _running(job, model, compiled=True)


def _patched(job: Job, compiled: bool) -> Running:
    model = copy.deepcopy(job.model)
    report = t5fastpatch.apply(model, None if job.patches is None else list(job.patches))
    on = dict.fromkeys(row.patch for row in report.rows if row.state is t5fastpatch.State.ON)
    return _running(job, model, compiled, tuple(on))


def _running(job: Job, model: Any, compiled: bool = False, patches: Sequence[str] = ()) -> Running:
    return Running(_call(job, model, compiled), job.precision.value, patches)


def _call(job: Job, model: Any, compiled: bool = False) -> Callable[[], torch.Tensor]:
    if job.work is Work.GENERATE:
        return _compiled_generate(job, model) if compiled else _generate(job, model, {})
    stack: Any = encoder(model)
    if compiled:
        stack = torch.compile(stack, dynamic=False)
    return lambda: stack(**job.batch).last_hidden_state


def _generate(job: Job, model: Any, options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    length = {"max_new_tokens": job.new_tokens, "min_new_tokens": job.new_tokens}
    return lambda: search(model, job.batch, **length, **options)[:, 1:]


def _compiled_generate(job: Job, model: Any) -> Callable[[], torch.Tensor]:
    """With a static cache and the decoder's step compiled by `generate` itself, with CUDA graphs on CUDA."""
    config_class = getattr(transformers, "CompileConfig", None)
    if config_class is not None:
        config = config_class()
        config._compile_all_devices = True  # it is for accelerators only, unless told
        call = _generate(job, model, {"cache_implementation": "static", "compile_config": config})
        call()
        # Some releases take the configuration and go on without.
        if hasattr(model, "_compiled_call"):
            return call
    raise UnavailableError(f"generate of transformers {transformers.__version__} does not compile: take a newer one")


EAGER = (
    Peer("stock", _stock),
    Peer("stock, fp32", _stock_fp32),
    Peer("patched", functools.partial(_patched, compiled=False)),
)
COMPILED = (
    Peer("stock, compiled", _stock_compiled),
    Peer("patched, compiled", functools.partial(_patched, compiled=True)),
)
