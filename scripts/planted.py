"""Seeded models of every family whose residual stream has a few channels as large as is asked for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A checkout need not be installed; the models are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import zoo
from torch import nn

from t5fastpatch.headroom.stacks import Attention, FeedForward, Stack, stacks_of

ROOT = Path(__file__).parents[1]

Batch = dict[str, torch.Tensor]

LARGE_CHANNELS = 8
TYPICAL = 1e-4  # a typical entry of the stream where it begins, for a peak of 1
ATTENTION_SHARE = 1 / 8  # of the peak that the attention's outputs reach; the feed-forward's reach all of it
ADDED = 0.7  # what all sub-layers together add to the other channels, for an entry of 1
LOGITS_SPREAD = 3.0
SIZES = {"d_model": 64, "d_ff": 128}


@dataclasses.dataclass(frozen=True)
class Planted:
    """A model to be built.

    Attributes:
        kind: of `zoo.KINDS`, by name.
        gated: whether the feed-forward is gated; `None` where the family has one form only.
        depth: blocks in each stack.
        peak: largest magnitude of each stack's residual stream in fp32.
        seed: of the weights and of the inputs.
    """

    kind: str
    gated: bool | None
    depth: int
    peak: float
    seed: int = 0

    def build(self) -> Any:
        """The model, in fp32 and eval mode.

        Eight channels of the stream are driven to the peak by the output rows of `wo` and, to an eighth, of `o`. Half
        of the factor is in what these read (`v`, and `wi` or `wi_1`), so that every weight fits fp16. The gain of each
        norm makes all channels count alike again, as training does, so what the model computes hangs on the small
        channels too; what a sub-layer adds to these is small beside what they hold, so rounding errors do not multiply
        from block to block.
        """
        model = _of_depth(zoo.BY_NAME[self.kind], self.gated, self.depth).build(self.seed)
        batch = self.batches(1)[0]
        entry = max(1.0, self.peak * TYPICAL)
        with torch.no_grad():
            for weight in _entries(model):
                weight.mul_(entry)
            for stack in stacks_of(model):
                _plant(stack, lambda: model(**batch), self.peak, ADDED * entry)
            final_gain = stacks_of(model)[-1].final_norm.weight
            final_gain.mul_(LOGITS_SPREAD / model(**batch)["logits"].std())
        return model

    def batches(self, count: int, first: int = 0) -> list[Batch]:
        """Inputs with labels, padded on the right; the model is built on the first."""
        return [self._batch(1000 * self.seed + number) for number in range(first, first + count)]

    def _batch(self, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        batch: Batch = zoo.BY_NAME[self.kind].batch()
        for name in [each for each in ("input_ids", "labels") if each in batch]:
            batch[name] = torch.randint(2, zoo.VOCABULARY, batch[name].shape, generator=generator)
        if "flattened_patches" in batch:
            patches = batch["flattened_patches"]
            patches[:, :, 2:] = torch.randn(patches[:, :, 2:].shape, generator=generator)
        return batch


def _of_depth(kind: zoo.Kind, gated: bool | None, depth: int) -> zoo.Kind:
    if kind.family == "pix2struct":
        return dataclasses.replace(kind, config=lambda **more: _deep_pix2struct(depth, **more))
    more: dict[str, Any] = {**SIZES, "num_layers": depth, "num_decoder_layers": depth}
    if gated is not None:
        more["feed_forward_proj"] = "gated-gelu" if gated else "relu"
    return dataclasses.replace(kind, config=lambda **rest: kind.config(**{**more, **rest}))


def _deep_pix2struct(depth: int, **more: Any) -> Any:
    config = zoo.pix2struct_config(**more)
    config.text_config.num_layers = config.vision_config.num_hidden_layers = depth
    return config


def _entries(model: nn.Module) -> Iterator[torch.Tensor]:
    """The weights of all that enters a stack, shared ones once."""
    for name, weight in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if (isinstance(module, nn.Embedding) and "relative" not in name) or "patch_projection" in name:
            yield weight


def _plant(stack: Stack, run: Callable[[], Any], peak: float, added: float) -> None:
    width = stack.final_norm.weight.numel()
    large = torch.zeros(width, dtype=torch.bool)
    large[torch.randperm(width, generator=torch.Generator().manual_seed(5))[:LARGE_CHANNELS]] = True
    sub_layers = [each for layer in stack.layers for each in layer]
    norms = [each.norm for each in sub_layers] + [stack.final_norm]
    balance = {norm: _balancing(norm.weight.clone()) for norm in norms}
    drive: dict[nn.Module, Callable[..., Any]] = {}
    for each in sub_layers:
        share = (ATTENTION_SHARE if isinstance(each, Attention) else 1.0) * peak
        for output, before in _products(each):
            drive[output] = _driving(before, large, share, added / len(sub_layers) ** 0.5)
    with _hooks(balance, drive):
        run()
    # Now the sub-layers reach their shares; their sum may be more or less than the peak.
    seen: list[float] = []
    watch = stack.final_norm.register_forward_pre_hook(lambda norm, args: seen.append(float(args[0].abs().max())))
    for _ in range(2):
        with _hooks(balance, {}):
            run()
        for output in drive:
            output.weight[large] *= peak / seen[-1]
    watch.remove()
    with _hooks(balance, {}):
        run()


def _products(sub_layer: Attention | FeedForward) -> list[tuple[Any, Any]]:
    """Each product that is added to the stream, with the linear one that its input is a multiple of."""
    if isinstance(sub_layer, Attention):
        return [(sub_layer.output, sub_layer.value)]
    dense: tuple[Any, ...] = sub_layer.dense
    return [(each.wo, each.wi_1 if hasattr(each, "wi_1") else each.wi) for each in dense]


def _balancing(gain: torch.Tensor) -> Callable[..., None]:
    def balance(norm: Any, args: tuple[torch.Tensor]) -> None:
        rows = args[0].flatten(0, -2)
        normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True))
        norm.weight.copy_(gain / normed.square().mean(0).sqrt().clamp_min(1e-5))

    return balance


def _driving(before: Any, large: torch.Tensor, peak: float, typical: float) -> Callable[..., torch.Tensor]:
    def drive(output: Any, args: object, result: torch.Tensor) -> torch.Tensor:
        rows = result.flatten(0, -2)
        factor = torch.where(large, peak / rows[:, large].abs().max(), typical / rows[:, ~large].std())
        early = 2.0 ** max(0, round(factor.max().log2().item() / 2))
        before.weight.mul_(early)
        output.weight.mul_((factor / early)[:, None])
        return result * factor

    return drive


class _hooks:
    """Hooks before some modules and behind others, for a `with` block."""

    def __init__(self, before: dict[nn.Module, Any], behind: dict[nn.Module, Any]) -> None:
        self._handles = [module.register_forward_pre_hook(hook) for module, hook in before.items()]
        self._handles += [module.register_forward_hook(hook) for module, hook in behind.items()]

    def __enter__(self) -> None: ...

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()
