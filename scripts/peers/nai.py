"""nai-t5, a rewrite of the T5 encoder: fused projections, and norms whose gains are in the projections."""

from __future__ import annotations

from typing import Any

import torch

from t5fastpatch.measure.workloads import encoder

from .job import Job, Peer, Running, UnavailableError, Work


def _stack(job: Job, attention: str) -> Any:
    """Its encoder with the job's weights, its gains multiplied into the projections as its own benchmark does."""
    from nai_t5 import T5EncoderStack, hf_to_based_t5_enc_state, to_based_config
    from nai_t5.fuse_norm_scales import fuse_norm_scales_enc
    from nai_t5.t5_common import T5AttnImpl

    if job.model.config.model_type not in ("t5", "umt5"):
        raise UnavailableError(f"it has no {job.model.config.model_type}")
    config = to_based_config(job.model.config, n_tokens=job.batch["input_ids"].shape[1])
    config.attn_impl = T5AttnImpl(attention)
    state = {name: weight.float() for name, weight in encoder_state(job.model).items()}
    with torch.device(job.device):
        stack = T5EncoderStack(config).eval()
    stack.load_state_dict(hf_to_based_t5_enc_state(state, config))
    fuse_norm_scales_enc(stack)
    return stack.to(job.precision.dtype)


def encoder_state(model: Any) -> dict[str, torch.Tensor]:
    """The encoder's part of the state dict, under the names it has in the whole model."""
    inside = {f"encoder.{name}": weight for name, weight in encoder(model).state_dict().items()}
    return {"shared.weight": model.get_input_embeddings().weight, **inside}


def _sdpa(job: Job) -> Running:
    return _with_mask(job, _stack(job, "sdpa"))


def _sdpa_compiled(job: Job) -> Running:
    return _with_mask(job, torch.compile(_stack(job, "sdpa"), dynamic=False, fullgraph=True))


def _with_mask(job: Job, stack: Any) -> Running:
    input_ids, mask = job.batch["input_ids"], job.batch["attention_mask"].bool()
    return Running(lambda: stack(input_ids, input_mask=mask), job.precision.value)


def _flex_compiled(job: Job) -> Running:
    """Flex attention, which computes nothing for padding; its block mask is made anew for each batch."""
    from nai_t5.t5_encoder import make_self_attn_block_mask

    stack = _stack(job, "flex")
    input_ids, mask = job.batch["input_ids"], job.batch["attention_mask"].bool()
    with torch.no_grad():
        stack.bind_score_mods(input_ids.shape[1])
    compiled: Any = torch.compile(stack, dynamic=False, fullgraph=True)
    return Running(lambda: compiled(input_ids, block_mask=make_self_attn_block_mask(mask)), job.precision.value)


_ABOUT: Any = {
    "works": (Work.ENCODER,),
    "needs": {"nai_t5": "nai-t5", "einops": "einops", "pydantic": "pydantic"},
    "version_of": "nai-t5",
}
EAGER = (Peer("nai-t5", _sdpa, **_ABOUT),)
COMPILED = (
    Peer("nai-t5, compiled", _sdpa_compiled, **_ABOUT),
    Peer("nai-t5 flex, compiled", _flex_compiled, only_on="cuda", **_ABOUT),
)
