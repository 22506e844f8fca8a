from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from zoo import COMMON, SPECIAL

from t5fastpatch import NotFoundError, NotT5Error, T5FastPatchError
from t5fastpatch.cli_predict import predict as command
from t5fastpatch.measure.census.operations import Operation
from t5fastpatch.measure.census.work import Work
from t5fastpatch.measure.cost.devices import DEVICES, Device, Figure, device_named
from t5fastpatch.measure.cost.forecast import Sizes, forecast
from t5fastpatch.measure.cost.model import ASSUMED, Bound, Costs, predict
from t5fastpatch.measure.precision import Precision
from t5fastpatch.measure.shapes import random_model

DOCS = Path(__file__).parent.parent / "docs"

# 100 bytes a second, 1000 FLOPs of fp32, 4000 of tf32 or fp16.
TOY = Device("toy", Figure(100, "made up"), {name: Figure(rate, "made up") for name, rate in
             (("float32", 1000), ("tf32", 4000), ("float16", 4000))})  # fmt: skip
COSTS = Costs(operation=10, view=1, kernel=2, sync=7)


def work(*operations: Operation, views: int = 0, syncs: int = 0) -> Work:
    return Work(Counter(operations), views=Counter({"t.default": views}), sync_sites=Counter({"a.py:1 f": syncs}))


def op(read: int = 4, written: int = 4, flops: int = 0, dtype: str = "float32") -> Operation:
    return Operation("any.default", dtype, read, written, flops)


def seconds(found: Work, **options: Any) -> float:
    return predict(found, TOY, costs=COSTS, **options).seconds


def test_small_operations_are_bound_by_their_launch() -> None:
    found = predict(work(op(), op(), op(), views=4), TOY, costs=COSTS)
    assert found.host == 3 * 10 + 4 * 1
    assert found.device == pytest.approx(3 * (2 + 8 / 100))
    assert (found.seconds, found.bound) == (34, Bound.LAUNCH)


def test_large_operations_are_bound_by_the_bandwidth() -> None:
    found = predict(work(op(read=1500, written=500), op(read=1500, written=500)), TOY, costs=COSTS)
    assert (found.seconds, found.bound) == (2 * (2 + 20), Bound.BANDWIDTH)


def test_large_products_are_bound_by_the_arithmetic() -> None:
    found = predict(work(op(read=100, written=100, flops=50_000)), TOY, costs=COSTS)
    assert (found.seconds, found.bound) == (2 + 50, Bound.COMPUTE)


def test_a_kernel_takes_the_longer_of_moving_and_computing() -> None:
    assert seconds(work(op(read=5000, flops=49_000))) == pytest.approx(2 + 50.04)
    assert seconds(work(op(read=4800, flops=50_000))) == pytest.approx(2 + 50)


def test_a_synchronisation_adds_to_whatever_bounds() -> None:
    for operation in (op(), op(read=5000), op(flops=90_000)):
        assert seconds(work(operation, syncs=3)) == seconds(work(operation)) + 3 * 7


def test_products_run_at_the_rate_of_their_dtype() -> None:
    product = op(flops=80_000)
    assert seconds(work(product)) == 2 + 80
    assert seconds(work(product), tf32=True) == 2 + 20
    assert seconds(work(dataclasses.replace(product, dtype="float16"))) == 2 + 20
    # Without tf32, as on a V100, nothing changes.
    plain = dataclasses.replace(TOY, rates={"float32": TOY.rates["float32"]})
    assert predict(work(product), plain, tf32=True, costs=COSTS).seconds == 2 + 80


def test_an_allocation_costs_the_host_only() -> None:
    found = predict(work(op(read=0, written=0)), TOY, costs=COSTS)
    assert (found.host, found.device) == (10, 0)


def test_a_product_that_the_device_cannot_do_fast_is_refused() -> None:
    with pytest.raises(T5FastPatchError, match="T4 has no rate for bfloat16 products: it has float32, float16"):
        predict(work(op(flops=1, dtype="bfloat16")), DEVICES["T4"])


operations = st.builds(
    op,
    read=st.integers(0, 10**10),
    written=st.integers(0, 10**10),
    flops=st.integers(0, 10**15),
    dtype=st.sampled_from(["float32", "float16"]),
)
works = st.builds(
    lambda operations, views, syncs: work(*operations, views=views, syncs=syncs),
    st.lists(operations, max_size=5),
    st.integers(0, 1000),
    st.integers(0, 100),
)
devices = st.sampled_from(list(DEVICES.values()))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(works, works, devices)
def test_more_work_never_takes_less_time(some: Work, more: Work, device: Device) -> None:
    both = predict(some + more, device).seconds
    alone = predict(some, device).seconds, predict(more, device).seconds
    # Together they may overlap better, but not more than perfectly.
    assert max(alone) * (1 - 1e-9) <= both <= sum(alone) * (1 + 1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(works, devices, st.floats(1, 100))
def test_a_faster_device_never_takes_longer(some: Work, device: Device, factor: float) -> None:
    faster = dataclasses.replace(device, bandwidth=Figure(device.bandwidth.per_second * factor, "made up"))
    assert predict(some, faster).seconds <= predict(some, device).seconds


@settings(max_examples=50, deadline=None, derandomize=True)
@given(works, devices, st.floats(1, 100))
def test_a_dearer_launch_never_takes_less_time(some: Work, device: Device, factor: float) -> None:
    dearer = dataclasses.replace(ASSUMED, operation=ASSUMED.operation * factor)
    assert predict(some, device, costs=dearer).seconds >= predict(some, device).seconds


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_figure_of_a_device_has_a_source(device: Device) -> None:
    figures = [device.bandwidth, *device.rates.values()]
    assert all(figure.source.split()[0] in ("NVIDIA", "as") for figure in figures)
    assert 1e11 < device.bandwidth.per_second < 1e13
    assert device.rates["float32"].per_second < device.rates["float16"].per_second < 1e15


def tables(name: str) -> list[list[str]]:
    """The cells of every row of the tables in docs/cost-model.md that begins with `name`."""
    lines = (DOCS / "cost-model.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if row[0].startswith(name)]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_the_documented_devices_are_those_of_the_table(device: Device) -> None:
    def rate(dtype: str) -> str:
        return f"{device.rates[dtype].per_second / 1e12:g}" if dtype in device.rates else "-"

    rates = [rate(dtype) for dtype in ("float32", "tf32", "float16", "bfloat16")]
    ((_, bandwidth, *others, sources),) = tables(device.name)
    assert [bandwidth, *others] == [f"{device.bandwidth.per_second / 1e9:g}", *rates]
    assert sources.startswith(device.bandwidth.source)


def test_the_documented_comparison_is_that_of_the_result_file() -> None:
    compared = json.loads((DOCS / "results" / "cost_model.json").read_text())
    assert compared["costs"] == dataclasses.asdict(ASSUMED)
    rows = [
        [
            row["what"],
            row["device"],
            str(row["batch_size"]),
            f"{row['ratio']:.2f}",
            f"{row['predicted']:.2f}",
            "{:.2f} to {:.2f}".format(*row["predicted_range"]),
            f"{row['off_by_percent']:+.0f}%",
        ]
        for row in compared["releases"]["4.26.1"]["rows"]
    ]
    assert tables("evaluation") + tables("decoder step") == rows


def test_a_device_is_found_however_it_is_written() -> None:
    assert device_named("2080ti") is device_named("RTX-2080 Ti") is device_named(" rtx 2080 TI")
    assert device_named("3090").name == "RTX 3090"
    with pytest.raises(NotFoundError, match="no device 'B200' in the table: there are T4, V100"):
        device_named("B200")


def t5(**more: Any) -> Any:
    config = transformers.T5Config(**COMMON, **SPECIAL, **more)
    return transformers.T5ForConditionalGeneration(config)


SMALL_SIZES = Sizes(batch=2, source=5, target=4)


def test_a_forecast_covers_every_workload_variant_and_device() -> None:
    cells = forecast(t5(), SMALL_SIZES, [DEVICES["T4"], DEVICES["H100"]])
    assert Counter(cell.device for cell in cells) == {"T4": 9, "H100": 9}
    assert {cell.workload for cell in cells} == {"encoder", "decoder_step", "forward"}
    assert {cell.variant for cell in cells} == {"stock fp32", "stock fp16", "patched fp16"}
    times = {(cell.workload, cell.variant): cell.prediction.seconds for cell in cells if cell.prediction}
    assert all(times[each, "patched fp16"] < times[each, "stock fp16"] for each in ("encoder", "decoder_step"))


def test_a_forecast_leaves_the_model_as_it_is() -> None:
    model = t5().train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert forecast(model, SMALL_SIZES, [DEVICES["T4"]]) == forecast(model, SMALL_SIZES, [DEVICES["T4"]])
    assert model.training
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_a_dtype_that_a_device_lacks_has_no_prediction() -> None:
    cells = forecast(t5(), SMALL_SIZES, [DEVICES["V100"], DEVICES["A100"]], Precision.BF16)
    missing = [cell for cell in cells if cell.prediction is None]
    assert {(cell.device, cell.variant) for cell in missing} == {("V100", "stock bf16"), ("V100", "patched bf16")}


def test_only_models_from_text_have_a_forecast() -> None:
    with pytest.raises(NotT5Error, match="no prediction for a T5Model"):
        forecast(transformers.T5Model(t5().config), SMALL_SIZES, [DEVICES["T4"]])
    with pytest.raises(NotT5Error, match="no prediction for a Linear"):
        forecast(torch.nn.Linear(2, 2), SMALL_SIZES, [DEVICES["T4"]])


@pytest.mark.parametrize("shape", ["t5-small", "t5-large", "t5-xxl-encoder"])
def test_a_shape_has_the_published_number_of_parameters(shape: str) -> None:
    millions = {"t5-small": 61, "t5-base": 223, "t5-large": 738, "t5-xxl-encoder": 4762}
    model = random_model(shape, torch.device("meta"))
    model.tie_weights()
    assert sum(each.numel() for each in model.parameters()) // 10**6 in range(millions[shape] - 1, millions[shape] + 1)


def run(*arguments: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    model = t5()
    model.config.architectures = ["T5ForConditionalGeneration"]
    model.config.save_pretrained(tmp_path)
    return str(tmp_path)


SMALL = ("--batch-size", "2", "--source-length", "5", "--target-length", "4")


def test_the_command_says_that_it_predicts(folder: str) -> None:
    shown = run("--model", folder, "--device", "T4, 3090", *SMALL)
    assert shown.exit_code == 0, shown.exception
    for title in ("Predicted, not measured: T4", "Predicted, not measured: RTX 3090"):
        assert title in shown.output
    assert "decoder step" in shown.output
    assert "V100" not in shown.output


def test_the_command_says_where_there_is_no_bf16(folder: str) -> None:
    shown = run("--model", folder, "--device", "T4", "--dtype", "bf16", *SMALL)
    assert shown.output.count("not available") == 6


def test_the_command_writes_what_it_shows(folder: str, tmp_path: Path) -> None:
    run("--model", folder, "--device", "T4,A100", "--json", str(tmp_path / "out.json"), *SMALL)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["what"] == "Predicted, not measured"
    assert len(written["cells"]) == 18
    assert all(cell["seconds"] >= cell["host_seconds"] for cell in written["cells"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "./nowhere"), "no model folder"),
        (("--shape", "t5-tiny"), "no shape is called 't5-tiny': there are t5-small"),
        (("--shape", "t5-small", "--model", "x"), "name a model or a shape, not both"),
        (("--device", "TPU"), "no device 'TPU' in the table"),
        (("--dtype", "int8"), "no precision is called 'int8'"),
        (("--dtype", "tf32"), "predictions are for fp16 and bf16, not for tf32"),
        (("--json", "nowhere/out.json"), "no directory 'nowhere'"),
        (("--patches", "nothing"), "nothing"),
    ],
)
def test_a_mistake_says_the_way_out(arguments: tuple[str, ...], message: str) -> None:
    error = run(*arguments, *SMALL).exception
    assert isinstance(error, T5FastPatchError)
    assert message in str(error)
