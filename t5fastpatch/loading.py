"""A model from its configuration alone, on the meta device."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from .errors import NotT5Error, WrongTypeError


def from_config(name: str) -> nn.Module:
    """The model of a configuration, without weights.

    Args:
        name: a folder with a config.json, or a name on the hub.

    Raises:
        WrongTypeError: there is no such configuration here, or it cannot be read.
        NotT5Error: transformers has no class for it.
    """
    import transformers

    config = _read_config(name)
    architectures = getattr(config, "architectures", None) or []
    classes = [getattr(transformers, each, None) for each in architectures]
    cls = next((each for each in classes if each is not None), transformers.AutoModel)
    try:
        with torch.device("meta"):
            model: nn.Module = cls(config) if cls in classes else cls.from_config(config)
    except Exception as error:
        raise NotT5Error(f"{name}: no model can be built from its configuration ({error})") from error
    return model


def _read_config(name: str) -> Any:
    import transformers

    looks_like_path = os.path.sep in name and (name.startswith((".", os.path.sep, "~")) or name.count(os.path.sep) > 1)
    if looks_like_path and not os.path.isdir(os.path.expanduser(name)):
        raise WrongTypeError(f"there is no model folder {name!r}")
    try:
        return transformers.AutoConfig.from_pretrained(os.path.expanduser(name))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WrongTypeError(f"no configuration can be read from {name!r}: {reason}") from error
