"""One line on stderr, for what happens outside of a call that could raise it."""

from __future__ import annotations

import contextlib
import os
import sys

QUIET = "T5FASTPATCH_QUIET"


def say(line: str) -> None:
    """Prints a line on stderr, unless `T5FASTPATCH_QUIET` is set, or there is nobody to tell.

    A program may have closed its stderr, or have none: that is no reason to break it.
    """
    if sys.stderr is not None and os.environ.get(QUIET, "") in ("", "0"):
        with contextlib.suppress(Exception):
            print(line if line.startswith("t5fastpatch") else f"t5fastpatch: {line}", file=sys.stderr, flush=True)
