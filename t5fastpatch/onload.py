"""Process-wide patches that depend on a model's weights: put on each model when `from_pretrained` has loaded it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import wrapt
from torch import nn

from .engine import apply
from .errors import NotT5Error
from .messages import say
from .patch import depends_on_weights
from .registry import select

_names: list[str] = []  # what is in force; the wrapper is put on once


def patch_what_is_loaded(names: Sequence[str]) -> None:
    """Applies patches to every model that `from_pretrained` gives from now on, where one of them needs its weights."""
    selection = select(names)
    if not any(depends_on_weights(patch, patch.name in selection.named) for patch in selection.patches):
        return
    if not _names:
        wrapt.wrap_function_wrapper("transformers.modeling_utils", "PreTrainedModel.from_pretrained", _load)
    _names[:] = names


def _load(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    loaded = wrapped(*args, **kwargs)
    # With `output_loading_info` a tuple.
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    if isinstance(model, nn.Module):
        _apply(model)
    return loaded


def _apply(model: nn.Module) -> None:
    try:
        say(apply(model, _names).line())
    except NotT5Error:
        return
    except Exception as error:
        say(f"{type(model).__name__} has the process-wide patches only: {error}")
