"""Results on disk, cell by cell as they come, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ..errors import T5FastPatchError
from .record import to_json
from ..reports.schema import SCHEMA, CellRecord


class Store:
    """A JSONL file: a header for each run, and a line for each finished cell.

    Args:
        path: the file; made if it is not there.

    Raises:
        T5FastPatchError: it holds something else, or cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cells: dict[str, CellRecord] = {}
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            complete, _, cut_off = text.rpartition("\n")
            self._read(complete.splitlines())
            if cut_off:  # the run was ended while it wrote
                path.write_text(complete + "\n" if complete else "", encoding="utf-8")
            with path.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise T5FastPatchError(f"cannot use {str(path)!r}: {error.strerror}") from error

    def finished(self, key: str) -> CellRecord | None:
        """The record of a cell that an earlier run finished."""
        return self._cells.get(key)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a header or a cell, at once."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(to_json(record) + "\n")

    def _read(self, lines: list[str]) -> None:
        records = []
        for line in filter(None, lines):
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
                continue
            raise T5FastPatchError(f"{str(self._path)!r} holds a line that is no JSON: name another file")
        if records and not (isinstance(records[0], dict) and records[0].get("schema") == SCHEMA):
            raise T5FastPatchError(f"{str(self._path)!r} is no result of {SCHEMA}: name another file")
        self._cells = {record["key"]: cast(CellRecord, record) for record in records if "key" in record}
