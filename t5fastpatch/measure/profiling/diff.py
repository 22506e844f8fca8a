"""How two profiles differ, op by op."""

from __future__ import annotations

import dataclasses
from typing import Any

from .profile import Op, Profile

ONLY_IN_A = "only in A"
ONLY_IN_B = "only in B"
CHANGED = "changed"
AS_OFTEN = "as often"
KINDS = (ONLY_IN_A, ONLY_IN_B, CHANGED, AS_OFTEN)


@dataclasses.dataclass(frozen=True)
class Difference:
    """An op in two profiles, of 0 calls and 0 seconds where it is in one of them only."""

    a: Op
    b: Op

    @property
    def kind(self) -> str:
        """One of `KINDS`, by the numbers of calls: times differ from run to run and decide nothing."""
        if not self.b.calls:
            return ONLY_IN_A
        if not self.a.calls:
            return ONLY_IN_B
        return AS_OFTEN if self.a.calls == self.b.calls else CHANGED

    @property
    def seconds(self) -> float:
        """What B takes more than A, per call."""
        return self.b.seconds - self.a.seconds

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain data; of `calls` and `seconds` A's is first."""
        return {
            "kind": self.kind,
            "category": self.a.category,
            "name": self.a.name,
            "calls": [self.a.calls, self.b.calls],
            "seconds": [self.a.seconds, self.b.seconds],
        }


def diff(a: Profile, b: Profile) -> list[Difference]:
    """Every op of either profile, by kind, and of each kind the one first that takes longest."""
    ours, theirs = ({op.key: op for op in profile.ops} for profile in (a, b))
    differences = [
        Difference(ours.get(key, Op(*key, 0.0, 0.0)), theirs.get(key, Op(*key, 0.0, 0.0))) for key in {**ours, **theirs}
    ]
    return sorted(differences, key=lambda each: (KINDS.index(each.kind), -max(each.a.seconds, each.b.seconds)))
