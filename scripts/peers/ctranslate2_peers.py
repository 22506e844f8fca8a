"""CTranslate2, on weights converted by its own T5 loader: greedy generation, and the encoder as a model of its own."""

from __future__ import annotations

import copy
import functools
import tempfile
from typing import Any

import numpy
import torch

from t5fastpatch.measure.workloads import encoder

from .job import Job, Peer, Running, UnavailableError, Work

# What it calls each arithmetic; its int8 products are of int8 weights and activations, all else in the second type.
COMPUTE_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
UNKNOWN_PIECE = 2


def _at_full_width(job: Job) -> Running:
    """In the job's precision; on a CPU in fp32, as there is nothing narrower but int8."""
    arithmetic = "fp32" if job.device.type == "cpu" else job.precision.value
    return _running(job, arithmetic, COMPUTE_TYPES[arithmetic])


def _in_int8(job: Job) -> Running:
    return _running(job, "int8", "int8")


def _running(job: Job, arithmetic: str, compute_type: str) -> Running:
    import ctranslate2

    device = job.device.type
    if compute_type not in ctranslate2.get_supported_compute_types(device):
        raise UnavailableError(f"it has no {compute_type} on this {device}")
    if job.model.config.model_type != "t5":
        raise UnavailableError(f"its loader for {job.model.config.model_type} is not tried here")
    spec, engine = _encoder_spec(job), ctranslate2.Encoder
    if job.work is Work.GENERATE:
        spec, engine = _translator_spec(job), ctranslate2.Translator
    with tempfile.TemporaryDirectory() as folder:
        spec.validate()
        spec.optimize(quantization=None if arithmetic == "fp32" else compute_type)
        spec.save(folder)
        options = {"device_index": job.device.index or 0, "compute_type": compute_type, "intra_threads": job.threads}
        converted = engine(folder, device=device, **options)
    call: Any = _encode if job.work is Work.ENCODER else _translate
    return Running(functools.partial(call, job, converted, *_inputs(job)), arithmetic, seen=False)


def _encoder_spec(job: Job) -> Any:
    from ctranslate2.converters.transformers import T5Loader
    from ctranslate2.specs import common_spec, transformer_spec

    config = job.model.config
    activations = {"relu": common_spec.Activation.RELU, "gelu_new": common_spec.Activation.GELUTanh}
    spec = transformer_spec.TransformerEncoderSpec(
        config.num_layers,
        config.num_heads,
        activation=activations[config.dense_act_fn],
        ffn_glu=config.is_gated_act,
        relative_attention_bias=True,
        rms_norm=True,
    )
    T5Loader().set_stack(spec, _in_fp32(encoder(job.model)))
    model_spec = transformer_spec.TransformerEncoderModelSpec(spec)
    vocabulary = _vocabulary(job)
    model_spec.register_vocabulary(vocabulary)
    model_spec.config.unk_token = vocabulary[UNKNOWN_PIECE]
    return model_spec


def _translator_spec(job: Job) -> Any:
    from ctranslate2.converters.transformers import T5Loader

    spec = T5Loader().get_model_spec(_in_fp32(job.model))
    vocabulary = _vocabulary(job)
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    config = job.model.config
    spec.config.eos_token = vocabulary[config.eos_token_id]
    spec.config.unk_token = vocabulary[UNKNOWN_PIECE]
    spec.config.bos_token = spec.config.decoder_start_token = vocabulary[config.decoder_start_token_id]
    return spec


def _in_fp32(module: Any) -> Any:
    """A copy on the CPU, where the converter wants it."""
    return copy.deepcopy(module).cpu().float()


def _vocabulary(job: Job) -> list[str]:
    """It works on texts; here a piece's number is its text."""
    return [str(piece) for piece in range(job.model.config.vocab_size)]


def _inputs(job: Job) -> tuple[Any, ...]:
    """Of the encoder: pieces (int32, batch x length) and lengths. Of the translator: pieces as texts."""
    if job.work is Work.ENCODER:
        lengths = torch.tensor(job.lengths, dtype=torch.int32, device=job.device)
        return _view(job.batch["input_ids"].int()), _view(lengths)
    vocabulary = _vocabulary(job)
    rows = job.batch["input_ids"].tolist()
    return ([[vocabulary[piece] for piece in row[:length]] for row, length in zip(rows, job.lengths)],)


def _view(tensor: torch.Tensor) -> Any:
    """The tensor as its own type has it, not copied."""
    import ctranslate2

    return ctranslate2.StorageView.from_array(tensor if tensor.is_cuda else tensor.numpy())


def _encode(job: Job, model: Any, pieces: Any, lengths: Any) -> torch.Tensor:
    states = model.forward_batch(pieces, lengths).last_hidden_state
    return torch.as_tensor(states if job.device.type == "cuda" else numpy.asarray(states), device=job.device)


def _translate(job: Job, model: Any, sources: list[list[str]]) -> torch.Tensor:
    length = {"max_decoding_length": job.new_tokens, "min_decoding_length": job.new_tokens}
    results = model.translate_batch(sources, beam_size=1, max_input_length=0, **length)
    return torch.tensor([[int(token) for token in result.hypotheses[0]] for result in results])


_ABOUT: Any = {"needs": {"ctranslate2": "ctranslate2"}, "version_of": "ctranslate2"}
PEERS = (
    Peer("CTranslate2", _at_full_width, **_ABOUT),
    Peer("CTranslate2, int8", _in_int8, **_ABOUT),
)
