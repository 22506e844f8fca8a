"""What every peer is asked to compute, and what makes a peer."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from t5fastpatch.families import role_of
from t5fastpatch.measure.precision import Precision
from t5fastpatch.measure.shapes import random_model
from t5fastpatch.measure.workloads import Batch
from t5fastpatch.patch import Role

# Padding, end and unknown come before.
FIRST_PIECE = 3
# A fresh model has gains of one, a bias too small to tell whether a peer has it at all, and embeddings that outweigh
# all else in the residual stream, so that it says its last token again and again.
LEAST_GAIN, MOST_GAIN = 0.5, 1.5
BIAS_DEVIATION = 1.0
EMBEDDING_SCALE = 2.0**-5


class Work(str, enum.Enum):
    """What is timed: a forward of the encoder, or greedy generation of a given length."""

    ENCODER = "encoder"
    GENERATE = "generate"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Size:
    """Sentences in a batch, tokens in the longest of them, and tokens to be generated."""

    batch: int
    length: int
    new_tokens: int


@dataclasses.dataclass(frozen=True)
class Job:
    """One thing to compute, on one model and one batch.

    Attributes:
        work: what.
        model: the stock model in `precision`, in evaluation mode. Peers work on copies.
        precision: of the weights.
        batch: `input_ids` and `attention_mask` (int64, batch x length), on the model's device.
        new_tokens: how many are generated, neither more nor fewer.
        threads: of whoever has threads of its own.
        patches: names of patches and presets; `None` for the default.
    """

    work: Work
    model: Any
    precision: Precision
    batch: Batch
    new_tokens: int
    threads: int
    patches: Sequence[str] | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sentence."""
        lengths: list[int] = self.batch["attention_mask"].sum(-1).tolist()
        return lengths


class UnavailableError(Exception):
    """A peer cannot do this job here; the message says why, and the way out if there is one."""


@dataclasses.dataclass(frozen=True)
class Running:
    """A peer that is ready.

    Attributes:
        call: does the job. Gives the encoder's last hidden state (batch x length x d_model), or the generated tokens
            (int64, batch x new tokens, without the start token); padding's hidden states are not looked at.
        arithmetic: what it computes in, a key of `judging.BOUNDS`.
        patches: those that are on, by name.
        seen: whether its memory can be told; not where a library keeps what it once had.
    """

    call: Callable[[], torch.Tensor]
    arithmetic: str
    patches: Sequence[str] = ()
    seen: bool = True


@dataclasses.dataclass(frozen=True)
class Peer:
    """A way of running T5.

    Attributes:
        name: for the tables.
        build: makes it ready for a job. Raises `UnavailableError` where it cannot be.
        works: the kinds of work it does.
        needs: modules it imports, each with what to give to `pip install`.
        only_on: the type of device it is for; any if empty.
        version_of: the distribution whose version matters.
    """

    name: str
    build: Callable[[Job], Running]
    works: tuple[Work, ...] = tuple(Work)
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only_on: str = ""
    version_of: str = ""

    def is_for(self, job: Job) -> bool:
        """Whether it does such work, on such a device."""
        return job.work in self.works and self.only_on in ("", job.device.type)

    def missing(self) -> str:
        """What is not installed, with the way to get it; empty if all is there."""
        absent = [module for module in self.needs if importlib.util.find_spec(module) is None]
        packages = " ".join(self.needs[module] for module in absent)
        return f"{', '.join(absent)} not installed: pip install {packages}" if absent else ""


def make_job(
    work: Work,
    shape: str,
    precision: Precision,
    size: Size,
    device: torch.device,
    threads: int = 1,
    patches: Sequence[str] | None = None,
    seed: int = 0,
) -> Job:
    """A job on random weights that the precision represents, so that all peers have the very same.

    Args:
        work, precision, threads, patches: as in `Job`.
        shape: a key of `SHAPES`.
        size: of the batch.
        device: where all is to be.
        seed: of weights and text.
    """
    model = random_model(shape, device, seed)
    make_telling(model, seed)
    model = model.to(precision.dtype)
    batch = padded_batch(model.config.vocab_size, size, device, seed)
    return Job(work, model, precision, batch, size.new_tokens, threads, patches)


@torch.no_grad()
def make_telling(model: Any, seed: int) -> None:
    """Gives the model weights of which no peer can leave any out unnoticed."""
    model.get_input_embeddings().weight.mul_(EMBEDDING_SCALE)
    generator = torch.Generator(model.device).manual_seed(seed)
    for module in model.modules():
        if role_of(type(module)) is Role.NORM:
            module.weight.uniform_(LEAST_GAIN, MOST_GAIN, generator=generator)
        if hasattr(module, "relative_attention_bias"):
            module.relative_attention_bias.weight.normal_(std=BIAS_DEVIATION, generator=generator)


def padded_batch(vocabulary: int, size: Size, device: torch.device, seed: int) -> Batch:
    """Random pieces, the first sentence of full length and the others ever shorter, down to a little over half."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(FIRST_PIECE, vocabulary, (size.batch, size.length), generator=generator)
    lengths = torch.tensor([size.length - row * size.length // (2 * size.batch) for row in range(size.batch)])
    mask = (torch.arange(size.length) < lengths[:, None]).long()
    return {"input_ids": (input_ids * mask).to(device), "attention_mask": mask.to(device)}
