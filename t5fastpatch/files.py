"""Files that commands write: whether they can, said before the work, and writing them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from .errors import T5FastPatchError


def check_outputs(*files: Path | None, folder: Path | None = None, inputs: tuple[Path, ...] = ()) -> None:
    """Says before the work what could not be written after it. A file that is there stays as it is.

    Args:
        files: to be written; `None` for those that are not asked for.
        folder: a directory to be made, if it is not there, for further files.
        inputs: files that are read, and must not be written over.

    Raises:
        T5FastPatchError: one cannot be written, or would be written over another.
    """
    seen = {path.resolve() for path in inputs}
    for path in filter(None, files):
        if path.resolve() in seen:
            raise T5FastPatchError(f"{str(path)!r} is named twice: give each file a name of its own")
        seen.add(path.resolve())
        _check_parent(path)
        with one_line_errors(path):
            _try(path)
    if folder is not None:
        _check_parent(folder)
        make_folder(folder)


def write(contents: Mapping[Path, bytes]) -> None:
    """Writes files.

    Raises:
        T5FastPatchError: one cannot be written.
    """
    for path, content in contents.items():
        with one_line_errors(path):
            path.write_bytes(content)


def make_folder(folder: Path) -> None:
    """Makes a directory, if it is not there.

    Raises:
        T5FastPatchError: it cannot be made.
    """
    with one_line_errors(folder):
        folder.mkdir(exist_ok=True)


@contextlib.contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Turns the system's errors while `path` is written into a `T5FastPatchError`."""
    try:
        yield
    except OSError as error:
        raise T5FastPatchError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _try(path: Path) -> None:
    if path.is_file() or path.is_dir():  # of which the second fails; a device or a pipe is not opened for nothing
        path.open("ab").close()
    elif not path.exists():
        path.touch()
        path.unlink()


def _check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise T5FastPatchError(f"cannot write {str(path)!r}: there is no directory {str(path.parent)!r}")
