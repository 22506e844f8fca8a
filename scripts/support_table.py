"""Writes the tables of docs/support.md that say, per family and release, what each patch finds.

Each release is installed for itself beside the torch that is there, and probed in a process of its own. Run from the
root of a checkout:

    python scripts/support_table.py
"""

from __future__ import annotations

import json
import subprocess
import sys

from releases import RELEASES, ROOT, environment

BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
DOCUMENT = ROOT / "docs" / "support.md"

Answers = dict[str, dict[str, str]]  # patch -> family -> what it finds


def probe() -> Answers:
    """What each patch finds in each family of the release that is installed here."""
    from t5fastpatch.families import FAMILIES
    from t5fastpatch.findings import family_classes, survey
    from t5fastpatch.patch import State
    from t5fastpatch.registry import BUILTIN, get_patch

    answers: Answers = {}
    for name in BUILTIN:
        for family in FAMILIES.values():
            try:
                found = survey(get_patch(name), family_classes(family))
            except ImportError:
                answer = State.ABSENT.value
            else:
                answer = f"applies ({found.sites})" if found.sites else found.state.value
            answers.setdefault(name, {})[family.name] = answer
    return answers


def probe_release(release: str) -> Answers:
    """`probe`, in a process that sees the release."""
    command = [sys.executable, __file__, "--probe"]
    done = subprocess.run(command, env=environment(release), check=True, capture_output=True, text=True)
    answers: Answers = json.loads(done.stdout)
    return answers


def table(found: dict[str, Answers]) -> str:
    """The Markdown: for each patch a table, a row a family, a column a release."""
    parts = []
    for patch in next(iter(found.values())):
        rows = [f"## `{patch}` by release\n", f"| family | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
        for family in next(iter(found.values()))[patch]:
            cells = " | ".join(answers[patch][family] for answers in found.values())
            rows.append(f"| {family} | {cells} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def main() -> None:
    if "--probe" in sys.argv:
        print(json.dumps(probe()))
        return
    found = {release: probe_release(release) for release in RELEASES}
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
