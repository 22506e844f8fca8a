from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.pop("T5FASTPATCH", None)

import contextlib

import pytest
import torch

from t5fastpatch import registry

with contextlib.suppress(ImportError):  # the tests for a GPU do without it
    import hypothesis

    # How long an example takes is the machine's affair.
    hypothesis.settings.register_profile("no deadline", deadline=None)
    hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """Patches that a test registers are gone after it."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models are so small that two threads would wait for each other."""
    torch.set_num_threads(1)
