"""A model by its folder or its name on the hub: what can go wrong, said in one line, and a model without weights."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from .errors import NotFoundError, NotT5Error, T5FastPatchError


def checked_name(model: str) -> str:
    """The folder, or the name on the hub, that transformers is to be asked for.

    Raises:
        NotFoundError: it is a path, and there is no such folder.
    """
    looks_like_path = model.startswith((".", "~", os.sep)) or model.count("/") > 1 or Path(model).exists()
    path = os.path.expanduser(model)
    if looks_like_path and not os.path.isdir(path):
        raise NotFoundError(f"there is no model folder {model!r}")
    return path if looks_like_path else model


@contextlib.contextmanager
def one_line_errors(model: str) -> Iterator[None]:
    """Turns whatever loading a model raises into one line.

    Raises:
        NotFoundError: the model cannot be loaded.
    """
    try:
        yield
    except T5FastPatchError:
        raise
    except Exception as error:
        raise NotFoundError(f"cannot load {model!r}: {first_line(error)}") from error


def quiet() -> None:
    """Silences what transformers and the hub's library print about a load; for commands, which report themselves."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    # Where the hub cannot be reached it would announce each try.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with contextlib.suppress(AttributeError):
        transformers.utils.logging.disable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def described(error: BaseException) -> str:
    """An error's kind and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def from_config(model: str) -> nn.Module:
    """The model of a configuration, on the meta device, without weights.

    Args:
        model: a folder with a config.json, or a name on the hub.

    Raises:
        NotFoundError: there is no such configuration, or it cannot be read.
        NotT5Error: transformers has no class for it.
    """
    import transformers

    name = checked_name(model)
    with one_line_errors(model):
        config = transformers.AutoConfig.from_pretrained(name)
    architectures = [getattr(transformers, str(each), None) for each in getattr(config, "architectures", None) or []]
    cls = next((each for each in architectures if each is not None), None)
    try:
        with torch.device("meta"):
            built: nn.Module = cls(config) if cls else transformers.AutoModel.from_config(config)
    except Exception as error:
        raise NotT5Error(f"no model can be built from the configuration of {model!r}: {first_line(error)}") from error
    return built
