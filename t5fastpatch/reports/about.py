"""What was measured, where, and what the figures do not say: the sentences that every form of the report has."""

from __future__ import annotations

from typing import Any

from .naming import text_of


def subject_line(result: dict[str, Any]) -> str:
    """What was measured."""
    return text_of(result["subject"].get("name", "a model"))


def opening_line(result: dict[str, Any]) -> str:
    """The size of what was measured, and where that was, in one sentence."""
    count = result["subject"].get("parameters")
    size = f"{count:,} parameters, on " if isinstance(count, int) else "On "
    return f"{size}{environment_line(result)}."


def environment_line(result: dict[str, Any]) -> str:
    """Where it was measured, in one phrase."""
    about = {name: text_of(value) for name, value in result["environment"].items() if value is not None}
    device = f"{about.get('device_name', 'an unnamed device')} ({about.get('device', '?')})"
    versions = [f"{name} {about[name]}" for name in ("t5fastpatch", "transformers", "torch", "python") if name in about]
    threads = [f"threads: {about['threads']}"] if "threads" in about else []
    return ", ".join([device, *versions, *threads])


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader must know before the figures: what they do not say, what failed, what was cut off."""
    lines = [
        "An effect is claimed where the 99% interval leaves 1 out, over eight rounds or more; the intervals shown are "
        "95% ones. What these alone show is unclear."
    ]
    if on_cpu(result):
        lines.append("Times on a CPU say nothing of a GPU's fp16. Ops, casts and syncs are counted, not timed.")
    lines += [f"Not measured: {text_of(failure)}" for failure in result.get("failures") or []]
    return lines + [text_of(note) for note in result.get("notes") or []]


def on_cpu(result: dict[str, Any]) -> bool:
    """Whether the times are a CPU's."""
    return str(result["environment"].get("device", "")).startswith("cpu")
