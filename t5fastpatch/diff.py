"""A patch as a unified diff against the installed release's source."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import NothingToPatchError
from .families import Family
from .findings import family_classes, finding, survey, transformers_version
from .patch import Patch, State
from .rewrite import Edit, Method, method_source, unified_diff


def diff(patch: Patch, families: Iterable[Family]) -> str:
    """What `patch` changes in the families' modules, one diff a file, with upstream's line numbers.

    Raises:
        NothingToPatchError: it changes nothing there.
        SourceUnavailableError, ForeignForwardError, UnexpectedSourceError: upstream's source is not what it knows.
    """
    diffs, states = [], []
    for family in families:
        try:
            classes = family_classes(family)
        except ImportError:
            states.append(f"{family.name}: {State.ABSENT.value}")
            continue
        found = survey(patch, classes)
        if found.refusal is not None:
            raise found.refusal
        states.append(f"{family.name}: {found.state.value}")
        if found.classes:
            diffs.append(_family_diff(patch, sorted(found.classes, key=lambda cls: cls.__name__)))
    if not diffs:
        raise NothingToPatchError(
            f"{patch.name} changes nothing in transformers {transformers_version()} ({', '.join(states)})"
        )
    return "\n".join(diffs)


def _family_diff(patch: Patch, classes: list[type]) -> str:
    edits: list[Edit] = []
    members: dict[str, list[str]] = {}
    for cls in classes:
        method, found = Method.of(cls), finding(patch, cls)
        edits += found.edits
        if found.forward is not None:
            edits.append(Edit(method.first, method.last, method_source(found.forward)))
        for member in found.members:
            members.setdefault(member, []).append(cls.__name__)
    # Above the diff, where `patch` and `git apply` take it for prose.
    added = "".join(f"{', '.join(names)}: gets {member} from {patch.name}\n" for member, names in members.items())
    return added + unified_diff(Method.of(classes[0]).file, edits, classes[0].__module__.replace(".", "/") + ".py")
