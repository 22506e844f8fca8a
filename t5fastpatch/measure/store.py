"""Results on disk, cell by cell as they come, so that a run that was stopped goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import T5FastPatchError
from ..files import one_line_errors
from ..reports.reading import read_lines
from ..reports.schema import CellRecord
from .record import to_json


class Store:
    """A file of JSON lines: a header for each run, and a line for each finished cell.

    Args:
        path: the file; made if it is not there.

    Raises:
        T5FastPatchError: it holds something else, or cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if path.exists() and not path.is_file():
                raise T5FastPatchError(f"cannot use {str(path)!r} for the results: it is no file")
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            with path.open("a", encoding="utf-8") as file:
                # The run before was ended while it wrote: the reader knows what to make of that line.
                if text and not text.endswith("\n"):
                    file.write("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise T5FastPatchError(f"cannot use {str(path)!r} for the results: {error}") from error
        cells = read_lines(text.split("\n"), path)["cells"] if text.strip() else []
        self._cells: dict[str, CellRecord] = {cell["key"]: cell for cell in cells}

    def finished(self, key: str) -> CellRecord | None:
        """The record of a cell that an earlier run finished."""
        return self._cells.get(key)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a header or a cell, at once.

        Raises:
            T5FastPatchError: it cannot be written.
        """
        with one_line_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(to_json(record) + "\n")
