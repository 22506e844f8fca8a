"""Results of ablations that were never run, in the documented schema."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

SCHEMA = "t5fastpatch.ablation/2"
PATCHES = ("skip_inf_check", "softmax_dtype", "layer_norm")
ENVIRONMENT = {
    "t5fastpatch": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "transformers": "5.12.1",
    "device": "cpu",
    "device_name": "A processor",
    "threads": 1,
    "platform": "Linux x86_64",
    "load": 0.3,
}
# What each patch saves of stock's time, and the cost of stock fp32 beside it.
SAVED = {"skip_inf_check": 0.12, "softmax_dtype": 0.002, "layer_norm": 0.09, "gelu": 0.03}


def ratio(middle: float, width: float = 0.012) -> dict[str, float]:
    return {"median": middle, "low": middle - width, "high": middle + 1.3 * width}


def rows(patches: Sequence[str]) -> list[dict[str, Any]]:
    """Rows with nothing measured: stock, each patch, all of them, all but one, and one that is upstream already."""
    rest = [(f"all but {patch}", [each for each in patches if each != patch], "set") for patch in patches]
    named = [
        ("stock fp32", [], "stock"),
        ("stock fp16", [], "stock"),
        *((patch, [patch], "applies") for patch in patches),
        ("all", list(patches), "set"),
        *(rest if len(patches) > 2 else []),
    ]
    made = [
        {"variant": name, "label": name, "patches": on, "state": state, "measured": True, "why": ""}
        for name, on, state in named
    ]
    upstream = {"variant": "wo_half", "patches": [], "state": "already upstream", "measured": False}
    absent = dict.fromkeys(
        ["seconds", "median", "to_half", "to_fp32", "census", "categories", "quality", "evaluation", "peak_memory"]
    )
    why = "this release keeps wo in half precision"
    return [{**absent, **row} for row in [*made, {**upstream, "label": "wo_half", "why": why}]]


def cell(
    level: str, workload: str, batch: int = 8, lengths: tuple[int, int] = (128, 64), **more: Any
) -> dict[str, Any]:
    inner = {
        "level": level,
        "workload": workload,
        "precision": "fp16",
        "attention": "eager",
        "compiled": False,
        "batch_size": batch,
        "source_length": lengths[0],
        "target_length": lengths[1],
        "text": "sentences",
    }
    key = f"{abs(hash_of(str(inner))):016x}"
    made = {"key": key, "cell": inner, "baseline": "stock fp16", "rounds": 20, "calls": 5, "stopped": "interval"}
    return {**made, "rows": rows(more.pop("patches", PATCHES)), "attribution": None, **more}


def hash_of(text: str) -> int:
    return random.Random(text).getrandbits(63)


def timed(
    level: str, workload: str, batch: int = 8, lengths: tuple[int, int] = (128, 64), **more: Any
) -> dict[str, Any]:
    """A cell with counts, times and shares."""
    made = cell(level, workload, batch, lengths, **more)
    chance = random.Random(made["key"])
    patches = list(dict.fromkeys(patch for row in made["rows"] for patch in row["patches"]))
    scale = 1 / (1 + 0.03 * batch + 0.002 * lengths[0])
    saved = {patch: SAVED[patch] * (0.4 + scale) for patch in patches}
    fp32 = 0.72 + 0.35 * (1 - scale)
    for row in made["rows"]:
        if not row["measured"]:
            continue
        stock32 = row["variant"] == "stock fp32"
        mine = fp32 if stock32 else 1 - sum(saved[patch] for patch in row["patches"])
        wobble = 0 if row["variant"] == "stock fp16" else chance.uniform(-0.004, 0.004)
        row["to_half"] = ratio(mine + wobble) if row["variant"] != "stock fp16" else ratio(1.0, 0)
        row["to_fp32"] = ratio((mine + wobble) / fp32) if not stock32 else ratio(1.0, 0)
        row["median"] = (mine + wobble) * 0.0005 * (4 + batch * lengths[0] / 64)
        row["seconds"] = [row["median"] * chance.uniform(0.98, 1.02) for _ in range(20)]
        fewer = sum(
            {"skip_inf_check": 126, "softmax_dtype": 24, "layer_norm": 60, "gelu": 42}[each] for each in row["patches"]
        )
        row["census"] = {
            "ops": 243 if stock32 else 472 - fewer,
            "leaf_ops": 243 if stock32 else 472 - fewer + 20 * ("layer_norm" in row["patches"]),
            "casts": 3 if stock32 else 65 - 15 * len(row["patches"]),
            "syncs": 1,
            "host_scalars": 3 if stock32 else 39 - 9 * len(row["patches"]),
            "bytes_read": 1_234_567 * batch,
            "bytes_written": 345_678 * batch,
            "flops_by_dtype": {"float32": 2_500_000_000 * batch}
            if stock32
            else {"float16": 2_400_000_000 * batch, "float32": 100_000_000},
        }
    total = sum(saved.values())
    shares = {
        patch: {"share": share, "low": share - 0.008, "high": share + 0.009, "sampling_error": None}
        for patch, share in saved.items()
    }
    saved_of_all = {"median": total, "low": total - 0.012, "high": total + 0.013}
    made["attribution"] = {
        "patches": patches,
        "method": "exact",
        "permutations": None,
        "saved": saved_of_all,
        "shares": shares,
    }
    return made


def with_categories(made: dict[str, Any]) -> dict[str, Any]:
    """The same cell with the self time by category."""
    parts = {
        "matrix products": 0.42,
        "conversions": 0.17,
        "norms": 0.14,
        "checks": 0.13,
        "softmax": 0.06,
        "other": 0.08,
    }
    spared = {"skip_inf_check": "checks", "softmax_dtype": "softmax", "layer_norm": "norms", "gelu": "other"}
    for row in made["rows"]:
        if row["measured"]:
            stock = 0.0041
            gone = {spared[patch] for patch in row["patches"]} | (
                {"checks", "conversions"} if row["variant"] == "stock fp32" else set()
            )
            row["categories"] = {name: stock * part * (0.1 if name in gone else 1) for name, part in parts.items()}
    return made


def results(patches: Sequence[str] = PATCHES) -> dict[str, Any]:
    """The cell of the results; a variant's loss is NaN."""
    made = cell("results", "results", patches=patches)
    for number, row in enumerate(row for row in made["rows"] if row["measured"]):
        row["quality"] = {
            "max_difference": 0.0162 * min(number, 1) + 0.0003 * number,
            "mean_difference": 0.00185 * min(number, 1),
            "nonfinite": 0,
            "loss": 2.38 + 0.0002 * number,
            "bleu": 31.8 - 0.03 * number,
            "bleu_by_task": {"translate English to German:": 30.1, "translate English to French:": 33.4},
            "gen_len": 9.7,
            "agreement": 1 - 0.004 * number,
        }
    broken = made["rows"][2]["quality"]
    broken.update(loss="nan", max_difference="inf", nonfinite=12)
    return made


def trainer(workload: str) -> dict[str, Any]:
    """A cell of the trainer's evaluation."""
    made = cell("trainer", workload, 16, (12, 128))
    for number, row in enumerate(row for row in made["rows"] if row["measured"]):
        stage = {"host_delta": 15_400_000, "host_peak": 31_200_000, "device_delta": None, "device_peak": None}
        row["evaluation"] = {
            "runtime": 3.2 + 0.1 * number,
            "samples_per_second": 30.1 - number,
            "loss": 5.017,
            "bleu": 2.4612,
            "gen_len": 18.53,
            "memory": {"load": stage, "cast": stage, "evaluate": stage},
        }
    return made


def document(cells: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "subject": {"name": "the embedded model", "parameters": 3871232, "seq2seq": True},
        "settings": {"preset": "quick", "seed": 0, "rounds": 20, "patches": None},
        "environment": dict(ENVIRONMENT),
        "cells": list(cells),
        "failures": [],
        **more,
    }


def small() -> dict[str, Any]:
    """As a quick run gives it: one shape."""
    patches = PATCHES[:1] + PATCHES[2:]
    cells = [timed("stack", "forward", patches=patches), timed("stack", "decoder_step", patches=patches)]
    cells += [timed("generate", "greedy", patches=patches), results(patches)]
    return document(cells)


def rich() -> dict[str, Any]:
    """A grid: three batch sizes, two lengths, four patches, categories, the trainer, results, memory, a failure."""
    patches = (*PATCHES, "gelu")
    grid = [
        timed("stack", workload, batch, lengths, patches=patches)
        for workload in ("decoder_step", "forward")
        for lengths in ((12, 128), (128, 128))
        for batch in (1, 8, 32)
    ]
    for made in (grid[0], grid[7]):
        with_categories(made)
        for row in made["rows"]:
            row["peak_memory"] = 262_000_000 if row["measured"] else None
    cells = [*grid, timed("generate", "beam_free", 8, (128, 128), patches=patches), results(patches)]
    cells += [trainer("evaluate"), trainer("evaluate fp16_full_eval")]
    return document(cells, failures=["bias_hoist: upstream's source is not what the patch knows"])
