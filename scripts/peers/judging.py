"""Whether a peer computes what stock computes: by its distance from stock in fp64."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch

from t5fastpatch.measure.workloads import encoder

from .job import Job, Work

BOUNDS = {"fp32": 1e-4, "fp16": 0.01, "bf16": 0.06, "int8": 0.2}
"""The largest error that is rounding, by what the peer computes in."""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """How far a result is from the reference.

    Attributes:
        error: of hidden states, the norm of the difference by that of the reference, over all tokens but padding. Of
            generated tokens, the most by which the reference, given the tokens before, prefers another one, in standard
            deviations of its logits. Infinite where a value is not finite or the form is another.
        bound: the most that rounding explains.
    """

    error: float
    bound: float

    @property
    def same(self) -> bool:
        """Whether it is the same function."""
        return self.error <= self.bound


class Judge:
    """The reference for a job: stock in fp64, but that upstream takes the variance of its norms in fp32."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._exact: Any = copy.deepcopy(job.model).double()
        self._states: torch.Tensor | None = None
        if job.work is Work.ENCODER:
            self._states = self._real(encoder_states(self._exact, job))
            del self._exact

    def judge(self, result: torch.Tensor, arithmetic: str) -> Judgement:
        """Compares a peer's result.

        Args:
            result: as `Running.call` gives it.
            arithmetic: as in `Running`.
        """
        error = self._of_states(result) if self._states is not None else self._of_tokens(result)
        return Judgement(error if math.isfinite(error) else math.inf, BOUNDS[arithmetic])

    def _of_states(self, result: torch.Tensor) -> float:
        assert self._states is not None
        if result.shape[:2] != self._job.batch["attention_mask"].shape or result.shape[2:] != self._states.shape[1:]:
            return math.inf
        mine = self._real(result.to(self._states.device).double())
        return float((mine - self._states).norm() / self._states.norm())

    @torch.no_grad()
    def _of_tokens(self, result: torch.Tensor) -> float:
        job = self._job
        if result.shape != (len(job.lengths), job.new_tokens):
            return math.inf
        tokens = result.to(job.device)
        start = torch.full_like(tokens[:, :1], job.model.config.decoder_start_token_id)
        logits = self._exact(**job.batch, decoder_input_ids=torch.cat([start, tokens[:, :-1]], 1)).logits
        deviation = logits.std()
        # Every peer is told to put off the end.
        logits[..., job.model.config.eos_token_id] = -math.inf
        taken = logits.gather(-1, tokens[..., None])[..., 0]
        return float((logits.max(-1).values - taken).max() / deviation)

    def _real(self, states: torch.Tensor) -> torch.Tensor:
        """Tokens x d_model, without padding."""
        return states[self._job.batch["attention_mask"].bool()]


@torch.no_grad()
def encoder_states(model: Any, job: Job) -> torch.Tensor:
    """The last hidden state of the model's encoder: batch x length x d_model."""
    states: torch.Tensor = encoder(model)(**job.batch).last_hidden_state
    return states
