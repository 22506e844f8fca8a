"""Where a result has objects and lists: checked once, when it is read, so that nothing else has to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Form = Mapping[str, Any] | list[Any] | None
EACH = "*"
"""The key that stands for every key of an object."""

RESULT: Form = {
    "subject": {},
    "settings": {},
    "environment": {},
    "notes": [None],
    "failures": [None],
    "cells": [
        {
            "cell": {},
            "attribution": {"patches": [None], "saved": {}, "shares": {EACH: {}}},
            "rows": [
                {
                    "patches": [None],
                    "seconds": [None],
                    "to_half": {},
                    "to_fp32": {},
                    "census": {"flops_by_dtype": {}},
                    "categories": {},
                    "quality": {"bleu_by_task": {}},
                    "evaluation": {"memory": {EACH: {}}},
                }
            ],
        }
    ],
}
"""Objects and lists of `schema.Result` that the reports go into; `None` stands for anything."""


def misfit(value: Any, form: Form = RESULT, name: str = "") -> str:
    """What in a value is not of a form, as `"cells[0].rows is no list"`; empty where all is. Anything may be missing or
    null."""
    if value is None or form is None:
        return ""
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{name} is no list"
        parts = [(each, form[0], f"{name}[{at}]") for at, each in enumerate(value)]
    else:
        if not isinstance(value, dict):
            return f"{name} is no object"
        prefix = f"{name}." if name else ""
        parts = [(each, form.get(key, form.get(EACH)), f"{prefix}{key}") for key, each in value.items()]
    return next((found for part in parts if (found := misfit(*part))), "")
