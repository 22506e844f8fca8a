"""`static_decode`: generation with a static cache and a captured decoder step.

Both are upstream's: `generate(cache_implementation="static")` compiles the decoder step on CUDA. The patch asks for
them where the model and the arguments allow it, and has PyTorch capture eager's own kernels instead of making new ones.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..patch import Contract, MethodPatch, Role

_logger = logging.getLogger(__name__)

# What generate keeps on a model that has decoded with a static cache.
_KEPT = ("_compiled_call", "_last_compile_config", "_cache", "_previous_max_cache_length")


def prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, *rest: Any) -> Any:
    """Upstream's `_prepare_cache_for_generation`, asked for a static cache and a captured step where they serve.

    Args:
        generation_config: this call's own copy of the configuration.
        model_kwargs: the arguments of the decoder's forward; gets the cache.
        mode: the mode of generation, or, in some releases, the assistant model.
    """
    why = objection(self, generation_config, model_kwargs, mode)
    if why:
        _logger.debug("static_decode takes upstream's way: %s", why)
    else:
        # Upstream would go on with the last cache, though another thread may be at it, or inference mode have made it.
        vars(self).pop("_cache", None)
        generation_config.cache_implementation = "static"
        generation_config.compile_config = generation_config.compile_config or captured()
    return _inherited(self, prepare_cache)(self, generation_config, model_kwargs, mode, *rest)


def state_without_kept(self: Any) -> dict[str, Any]:
    """The model's state for copies and pickles.

    A compiled call can be neither pickled nor copied: it would stay bound to the model that it was made for.
    """
    state: dict[str, Any] = _inherited(self, state_without_kept)(self)
    return {name: value for name, value in state.items() if name not in _KEPT}


_METHODS: dict[str, Callable[..., Any]] = {
    "_prepare_cache_for_generation": prepare_cache,
    "__getstate__": state_without_kept,
}


def _inherited(module: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """What `method` stands over in the class of a module that is patched by itself, for the process, or both."""
    name = next(name for name, each in _METHODS.items() if each is method)
    classes = type(module).__mro__
    last = max(index for index, cls in enumerate(classes) if vars(cls).get(name) is method)
    below: Callable[..., Any] = next(vars(cls)[name] for cls in classes[last + 1 :] if name in vars(cls))
    return below


def captured() -> Any:
    """How the decoder step is compiled: eager's kernels, one by one, replayed as a CUDA graph."""
    options = {**_lite_options(), "triton.cudagraphs": True}
    # A length or batch size that is new may be a symbol from the second one on, and a step beyond the recompile limit
    # runs uncompiled: neither is an error.
    return _configuration().CompileConfig(fullgraph=False, dynamic=None, mode=None, options=options)


def objection(model: Any, generation_config: Any, model_kwargs: dict[str, Any], mode: Any) -> str:
    """Why this call of `generate` goes upstream's way; empty if the decoder step can be captured."""
    return _objection_to_arguments(generation_config, model_kwargs, mode) or _objection_to_model(
        model, everywhere=_compiles_everywhere(generation_config)
    )


def _objection_to_arguments(generation_config: Any, model_kwargs: dict[str, Any], mode: Any) -> str:
    if getattr(generation_config, "disable_compile", False):
        return "the caller forbids compiling"
    if generation_config.cache_implementation is not None:
        return "the caller chose a cache"
    if any(model_kwargs.get(name) is not None for name in ("past_key_values", "cache")):
        return "the caller brings a cache"
    if not generation_config.use_cache:
        return "the caller wants no cache"
    handed_out = ("return_dict_in_generate", "output_attentions", "output_hidden_states")
    if any(getattr(generation_config, name) for name in handed_out):
        return "the caller gets the cache, and what else a replayed step would overwrite"
    if _mode(generation_config, mode) not in ("greedy_search", "sample"):
        return "upstream compiles the step of greedy search and sampling only"
    return ""


def _objection_to_model(model: Any, *, everywhere: bool) -> str:
    if model.device.type != "cuda" and not everywhere:
        return f"the model is on {model.device.type}, which captures nothing"
    if len(set((getattr(model, "hf_device_map", None) or {"": ""}).values())) > 1:
        return "the model is on several devices"
    if getattr(model, "hf_quantizer", None) is not None:
        return "the model is quantized"
    if model.training:
        return "the model is in training mode"
    if torch.compiler.is_compiling():
        return "generate itself is being compiled"
    return "no attention of the decoder is causal" if _lost_causality(model) else ""


def _compiles_everywhere(generation_config: Any) -> bool:
    """Whether the caller's way to compile is meant for every device, which is how it is tried on a CPU."""
    return bool(getattr(generation_config.compile_config, "_compile_all_devices", None))


def _mode(generation_config: Any, mode: Any) -> str:
    known = isinstance(mode, _configuration().GenerationMode)
    name: str = (mode if known else generation_config.get_generation_mode(mode)).value
    return name


def _lost_causality(model: Any) -> bool:
    """Whether no attention of the decoder is causal.

    So it is in UMT5 of some releases: a decoder prefix without padding then sees its future in a dynamic cache, and
    does not in a static one.
    """
    flags = [each.is_causal for each in model.get_decoder().modules() if hasattr(each, "is_causal")]
    return bool(flags) and not any(flags)


def _configuration() -> Any:
    return importlib.import_module("transformers.generation.configuration_utils")


def _lite_options() -> dict[str, Any]:
    """The options of the mode in which PyTorch's compiler keeps eager's kernels; none in older releases."""
    modes: dict[str, dict[str, Any]] = importlib.import_module("torch._inductor").list_mode_options()
    return modes.get("lite", {})


def lacks(cls: Any) -> str:
    """What a class of generating models does not have."""
    if not (hasattr(cls, "_valid_auto_compile_criteria") and hasattr(cls, "_can_compile_fullgraph")):
        return "generate of this release compiles no decoder step of such a model"
    if not cls._can_compile_fullgraph:
        return f"upstream says that {cls.__name__} cannot be compiled to one graph"
    return "" if _lite_options() else f"PyTorch {torch.__version__} has no compile mode that keeps eager's kernels"


def forget(model: nn.Module) -> None:
    """Drops what generate kept for the static cache and the captured step."""
    for name in _KEPT:
        vars(model).pop(name, None)


PATCH = MethodPatch(
    name="static_decode",
    summary="generate with a growing cache, a kernel at a time -> with a static cache and a captured decoder step",
    contract=Contract.ROUNDING,
    unsafe_alone="compiles for seconds at the first call of generate, and pays on CUDA only: by its name alone",
    role=Role.GENERATOR,
    methods=_METHODS,
    lacks=lacks,
    detach=forget,
)
