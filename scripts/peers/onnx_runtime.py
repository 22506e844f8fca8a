"""ONNX Runtime, on a graph exported from the stock encoder."""

from __future__ import annotations

import copy
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from t5fastpatch.measure.precision import Precision
from t5fastpatch.measure.workloads import encoder

from .job import Job, Peer, Running, UnavailableError, Work

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class _LastHiddenState(nn.Module):
    """An encoder that takes and gives plain tensors."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.stack(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def _encoder(job: Job) -> Running:
    """On a CPU in fp32, for which alone its kernels there are made."""
    import onnxruntime

    provider = PROVIDERS[job.device.type]
    if provider not in onnxruntime.get_available_providers():
        raise UnavailableError(f"onnxruntime is without its {provider}: pip install onnxruntime-gpu")
    precision = Precision.FP32 if job.device.type == "cpu" else job.precision
    stack = copy.deepcopy(encoder(job.model)).to(precision.dtype)
    inputs = (job.batch["input_ids"], job.batch["attention_mask"])
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names what the model does not need
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "encoder.onnx"
        torch.onnx.export(_LastHiddenState(stack).eval(), inputs, file, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(file, _options(job.threads), providers=[provider])
    return Running(lambda: _run(session, inputs), precision.value, seen=False)


def _options(threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its threads would go on spinning while another peer is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _run(session: Any, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    from onnxruntime import OrtValue

    names = (each.name for each in session.get_inputs())
    fed = {name: OrtValue.from_dlpack(tensor) for name, tensor in zip(names, inputs, strict=True)}
    return from_dlpack(session.run_with_ort_values(None, fed)[0])


PEERS = (
    Peer(
        "ONNX Runtime",
        _encoder,
        works=(Work.ENCODER,),
        needs={"onnxruntime": "onnxruntime", "onnx": "onnx", "onnxscript": "onnxscript"},
        version_of="onnxruntime",
    ),
)
