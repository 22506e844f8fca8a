"""What was done, or could be, as a table, a dict or JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

from .patch import State


@dataclasses.dataclass(frozen=True)
class Row:
    """One patch and one model (or family).

    Attributes:
        patch: the patch's name.
        state: what can be said of it.
        sites: places in upstream's source that change, or would.
        modules: modules of the model that have it, or would.
        contract: how the patched result relates to stock's.
        why: a sentence, where the state needs one.
    """

    patch: str
    state: State
    sites: int
    modules: int
    contract: str
    why: str = ""


def _summary(row: Row) -> str:
    if row.why:
        return f"{row.patch} {row.state.value} ({row.why})"
    return f"{row.patch} {row.state.value}" + (f" (sites: {row.sites})" if row.sites else "")


@dataclasses.dataclass(frozen=True)
class Report:
    """One row a patch. `print(report)` gives a table.

    Attributes:
        subject: the model's class and families, or the family.
        transformers: the release.
        rows: one for each patch.
        assumes: what the proofs and scales in the rows take for granted, as sentences.
    """

    subject: str
    transformers: str
    rows: tuple[Row, ...]
    assumes: tuple[str, ...] = ()

    def __getitem__(self, patch: str) -> Row:
        for row in self.rows:
            if row.patch == patch:
                return row
        raise KeyError(patch)

    def __str__(self) -> str:
        # Imported here: a report is printed now and then, a model is patched in every process.
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("patch", "state", "sites", "modules", "contract", "why", box=box.ASCII)
        for row in self.rows:
            cells = (row.patch, row.state.value, str(row.sites), str(row.modules), row.contract, row.why)
            table.add_row(*map(Text, cells))  # as text: a reason may hold brackets, which are markup to rich
        console = Console(file=io.StringIO(), width=110)
        console.print(Text(self._title))
        console.print(table)
        if self.assumes:
            console.print(Text(f"The figures by the weights and the data assume: {'; '.join(self.assumes)}."))
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text.rstrip("\n")

    @property
    def _title(self) -> str:
        return f"t5fastpatch: {self.subject}, transformers {self.transformers}"

    def line(self) -> str:
        """The report in one line, with the reason for each patch that is not on and could be."""
        return f"{self._title}: {', '.join(map(_summary, self.rows))}"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, strings and numbers."""
        rows = [{**dataclasses.asdict(row), "state": row.state.value} for row in self.rows]
        about = {"subject": self.subject, "transformers": self.transformers}
        return {**about, "rows": rows, "assumes": list(self.assumes)}

    def to_json(self, **options: Any) -> str:
        """`to_dict()` as JSON; `options` go to `json.dumps`."""
        return json.dumps(self.to_dict(), **options)
