"""Texts to observe a model on, where the user has none at hand."""

from __future__ import annotations

from pathlib import Path

from ..errors import NotFoundError, T5FastPatchError

DEFAULT = Path(__file__).with_name("sentences.txt")


def read_lines(path: Path = DEFAULT, limit: int | None = None) -> list[str]:
    """The texts of a file, one a line, empty lines left out.

    Args:
        path: a text file in UTF-8; the package's own without it.
        limit: how many lines to take at most.

    Raises:
        NotFoundError: there is no such file.
        T5FastPatchError: it cannot be read, is not UTF-8, or holds no text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {str(path)!r}") from error
    except UnicodeDecodeError as error:
        raise T5FastPatchError(f"{str(path)!r} is not UTF-8 (byte {error.start}): save it as UTF-8 text") from error
    except OSError as error:
        raise T5FastPatchError(f"cannot read {str(path)!r}: {error.strerror}") from error
    # Not splitlines, which breaks at characters that a text may hold.
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        raise T5FastPatchError(f"{str(path)!r} holds no text: give a text a line")
    return lines[:limit]
