from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_peers
import pytest
import torch
from peers import PEERS, hugging_face, onnx_runtime, tables
from peers.comparison import Deadline, Row, compare
from peers.job import Job, Peer, Running, Size, UnavailableError, Work, make_job
from peers.judging import Judge
from typer.testing import CliRunner, Result

from t5fastpatch.errors import NotFoundError, T5FastPatchError
from t5fastpatch.measure.precision import Precision
from t5fastpatch.measure.shapes import SHAPES, Shape
from t5fastpatch.measure.timing import Limits

CPU = torch.device("cpu")
SIZE = Size(2, 12, 3)
SIZES = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
LIMITS = Limits(2, 2)
STOCK = hugging_face.EAGER[0]


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(SHAPES, "toy", Shape("T5ForConditionalGeneration", "T5Config", SIZES))
    gated = {**SIZES, "feed_forward_proj": "gated-gelu"}
    monkeypatch.setitem(SHAPES, "toy-encoder", Shape("T5EncoderModel", "T5Config", gated))
    # It is for the life of the process, and other tests measure what that gives back.
    monkeypatch.setattr(bench_peers, "keep_memory", lambda: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def job_of(work: Work = Work.ENCODER, shape: str = "toy-encoder", precision: Precision = Precision.BF16) -> Job:
    return make_job(work, shape, precision, SIZE, CPU)


def rows_of(job: Job, *peers: Peer) -> dict[str, Row]:
    with torch.no_grad():
        rows, _ = compare(job, peers, LIMITS, Deadline(60))
    return {row.peer: row for row in rows}


def run(*arguments: str) -> Result:
    app = bench_peers.typer.Typer()
    app.command()(bench_peers.main)
    return CliRunner().invoke(app, list(arguments))


def stock_but(change: Callable[[Any], None]) -> Peer:
    """A peer that runs a stock model with one thing in it changed."""

    def build(job: Job) -> Running:
        model = make_job(job.work, "toy", job.precision, SIZE, CPU).model
        change(model)
        return hugging_face._running(job, model)

    return Peer("planted", build)


def without_gains(model: Any) -> None:
    model.encoder.final_layer_norm.weight.data.fill_(1)


def without_position_bias(model: Any) -> None:
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.zero_()


def with_scaled_scores(model: Any) -> None:
    for block in model.encoder.block:
        block.layer[0].SelfAttention.q.weight.data.div_(8**0.5)


def without_a_layer(model: Any) -> None:
    del model.encoder.block[1]


@pytest.mark.parametrize("change", [without_gains, without_position_bias, with_scaled_scores, without_a_layer])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.BF16])
def test_a_peer_that_computes_something_else_is_marked_and_not_timed(
    change: Callable[[Any], None], precision: Precision
) -> None:
    row = rows_of(job_of(shape="toy", precision=precision), STOCK, stock_but(change))["planted"]
    assert row.state == "wrong"
    assert row.seconds is None
    assert not row.ratios
    assert "computes something else" in row.why


def without_cross_attention(model: Any) -> None:
    model.decoder.block[1].layer[1].EncDecAttention.o.weight.data.zero_()


def without_position_bias_of_the_decoder(model: Any) -> None:
    model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.zero_()


@pytest.mark.parametrize("change", [without_gains, without_cross_attention, without_position_bias_of_the_decoder])
def test_a_peer_that_generates_something_else_is_wrong(change: Callable[[Any], None]) -> None:
    job = make_job(Work.GENERATE, "toy", Precision.FP32, Size(4, 12, 16), CPU)
    tokens = hugging_face._stock(job).call()
    assert len(tokens.unique()) > 4, "too dull to tell models apart"
    change(job.model)
    planted = hugging_face._stock(job).call()
    right = make_job(Work.GENERATE, "toy", Precision.FP32, Size(4, 12, 16), CPU)
    assert Judge(right).judge(tokens, "fp32").same
    assert not Judge(right).judge(planted, "fp32").same


def test_a_peer_without_the_mask_is_wrong() -> None:
    def build(job: Job) -> Running:
        stack = job.model.get_encoder()
        return Running(lambda: stack(job.batch["input_ids"]).last_hidden_state, "bf16")

    assert rows_of(job_of(), STOCK, Peer("planted", build))["planted"].state == "wrong"


def test_what_stands_at_padding_does_not_matter() -> None:
    def build(job: Job) -> Running:
        real = hugging_face._stock(job).call
        return Running(lambda: real().masked_fill(job.batch["attention_mask"][..., None] == 0, torch.nan), "bf16")

    assert rows_of(job_of(), STOCK, Peer("padded", build))["padded"].state == "timed"


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_result_that_is_not_finite_is_wrong(broken: float) -> None:
    job = job_of()
    states = hugging_face._stock(job).call().detach()
    states[0, 0, 0] = broken
    assert not Judge(job).judge(states, "bf16").same


def test_a_result_of_another_form_is_wrong() -> None:
    job, tokens_job = job_of(), job_of(Work.GENERATE, "toy")
    assert not Judge(job).judge(torch.zeros(2, 12, 31), "bf16").same
    assert not Judge(job).judge(torch.zeros(2, 11, 32), "bf16").same
    assert not Judge(tokens_job).judge(torch.zeros(2, 2, dtype=torch.long), "bf16").same


def test_tokens_that_the_reference_would_not_take_are_wrong() -> None:
    job = job_of(Work.GENERATE, "toy", Precision.FP32)
    judge = Judge(job)
    tokens = hugging_face._stock(job).call()
    assert judge.judge(tokens, "fp32").error == 0
    for at in range(SIZE.new_tokens):
        other = tokens.clone()
        other[0, at] = (other[0, at] + 7) % SIZES["vocab_size"]
        assert not judge.judge(other, "fp32").same


def test_the_end_of_sentence_is_no_token_to_take() -> None:
    job = job_of(Work.GENERATE, "toy", Precision.FP32)
    ended = torch.full((SIZE.batch, SIZE.new_tokens), job.model.config.eos_token_id)
    assert not Judge(job).judge(ended, "int8").same


def test_every_peer_has_weights_that_the_precision_represents() -> None:
    job = job_of()
    assert all(weight.dtype is torch.bfloat16 for weight in job.model.parameters())
    again = make_job(job.work, "toy-encoder", job.precision, SIZE, CPU)
    assert all(map(torch.equal, job.model.parameters(), again.model.parameters()))
    assert job.lengths == [12, 9]


def test_a_peer_that_is_not_installed_is_named_with_the_way_to_get_it() -> None:
    absent = dataclasses.replace(STOCK, name="absent", needs={"no_such_module": "no-such-package"})
    row = rows_of(job_of(), STOCK, absent)["absent"]
    assert (row.state, row.why) == ("skipped", "no_such_module not installed: pip install no-such-package")


def test_one_that_fails_does_not_end_the_others() -> None:
    def build(job: Job) -> Running:
        raise RuntimeError("its own\nsecond line")

    def unavailable(job: Job) -> Running:
        raise UnavailableError("not on this machine")

    rows = rows_of(job_of(), STOCK, Peer("failing", build), Peer("elsewhere", unavailable))
    assert (rows["failing"].state, rows["failing"].why) == ("failed", "RuntimeError: its own")
    assert (rows["elsewhere"].state, rows["elsewhere"].why) == ("skipped", "not on this machine")
    assert rows["stock"].state == "timed"


def test_no_peer_but_stock_is_begun_when_no_time_is_left() -> None:
    with torch.no_grad():
        rows, samples = compare(job_of(), hugging_face.EAGER, LIMITS, Deadline(0))
    assert [row.state for row in rows] == ["timed", "skipped", "skipped"]
    assert samples is not None
    assert samples.rounds == 2


def test_a_peer_has_no_row_for_work_that_it_does_not_do() -> None:
    encoder_only = dataclasses.replace(STOCK, name="encoder only", works=(Work.ENCODER,))
    on_cuda = dataclasses.replace(STOCK, name="cuda only", only_on="cuda")
    assert list(rows_of(job_of(Work.GENERATE, "toy"), STOCK, encoder_only, on_cuda)) == ["stock"]


@pytest.mark.parametrize("work", list(Work))
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.BF16])
def test_whatever_is_installed_computes_the_same_thing(work: Work, precision: Precision) -> None:
    job = job_of(work, "toy" if work is Work.GENERATE else "toy-encoder", precision)
    quick = [peer for peer in PEERS if "compiled" not in peer.name and peer.version_of != "onnxruntime"]
    rows = rows_of(job, *quick)
    assert {row.state for row in rows.values()} <= {"timed", "skipped"}
    assert rows["patched"].state == "timed"
    assert all("not installed" in row.why or row.why == "it is stock" for row in rows.values() if not row.seconds)


@pytest.mark.parametrize("work", list(Work))
def test_those_that_compile_compute_the_same_thing(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with = torch.compile
    traced: list[Any] = []

    def without_code(function: Any, **options: Any) -> Any:
        traced.append(function)
        return compile_with(function, **{**options, "backend": "eager", "mode": None})

    monkeypatch.setattr(torch, "compile", without_code)
    job = job_of(work, "toy" if work is Work.GENERATE else "toy-encoder")
    rows = rows_of(job, STOCK, *(peer for peer in PEERS if "compiled" in peer.name))
    assert {row.state for row in rows.values()} <= {"timed", "skipped"}
    timed = [row for row in rows.values() if row.state == "timed"]
    assert len(traced) == len(timed) - 1
    assert rows["patched, compiled"].patches or "does not compile" in rows["patched, compiled"].why


def test_an_exported_graph_computes_the_same_thing() -> None:
    row = rows_of(job_of(), STOCK, *onnx_runtime.PEERS)["ONNX Runtime"]
    assert row.state == "timed" or "not installed" in row.why


def test_the_relu_of_the_first_t5_is_the_same_everywhere() -> None:
    quick = [peer for peer in PEERS if "compiled" not in peer.name and peer.version_of != "onnxruntime"]
    rows = rows_of(job_of(shape="toy"), *quick)
    assert {row.state for row in rows.values()} <= {"timed", "skipped"}


def test_the_file_and_the_tables_have_what_the_page_needs(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    options = ["--shape", "toy", "--workload", "encoder", "--workload", "generate", "--dtype", "bf16", "--rounds", "2"]
    peers = ["--peers", "patched", "--peers", "ctranslate2", "--patches", "layer_norm"]
    size = ["--batch", "2", "--length", "12", "--new-tokens", "3"]
    outcome = run(*options, *peers, *size, "--json", str(file))
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert document["schema"] == bench_peers.SCHEMA
    assert [case["workload"] for case in document["cases"]] == ["encoder", "generate"]
    for case in document["cases"]:
        assert (case["shape"], case["dtype"], case["lengths"], case["timing"]["rounds"]) == ("toy", "bf16", [12, 9], 2)
        rows = {row["peer"]: row for row in case["peers"]}
        assert {"stock", "patched", "CTranslate2", "CTranslate2, int8"} == set(rows)
        assert rows["patched"]["patches"] == ["layer_norm"]
        assert rows["stock"]["ratios"]["stock"] == {"median": 1, "low": 1, "high": 1, "measurable": False}
        assert rows["patched"]["ratios"]["stock"]["low"] <= rows["patched"]["ratios"]["stock"]["high"]
    shown = run("--read", str(file), "--markdown").output
    assert shown.startswith(tables.BEGIN)
    assert shown.strip().endswith(tables.END)
    assert "**toy, generate, bf16, batch 2 x 12 padded, 3 new tokens, cpu, threads: 1, rounds: 2**" in shown
    assert "Patched: layer_norm." in shown
    assert "| patched | bf16 |" in shown
    assert "toy, encoder" in run("--read", str(file)).output


def test_a_wrong_peer_stands_in_the_table_without_a_time() -> None:
    row = Row("planted", "wrong", "computes something else", error=0.5, bound=0.06)
    assert tables.cells(dataclasses.asdict(row))[:3] == ["planted", "wrong: computes something else", ""]


def test_an_encoder_is_not_asked_to_generate() -> None:
    plan = functools.partial(bench_peers.cases, precisions=[Precision.BF16])
    assert [case.workload for case in plan(list(Work), ["toy-encoder"])] == [Work.ENCODER]
    assert [case.workload for case in plan(list(Work), ["toy"], new_tokens=5)] == list(Work)
    with pytest.raises(T5FastPatchError, match="cannot generate"):
        plan([Work.GENERATE], ["toy-encoder"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--peers", "flax"), "no peer is called 'flax': there are stock"),
        (("--shape", "t6"), "no shape is called 't6'"),
        (("--dtype", "fp8"), "no precision is called 'fp8'"),
        (("--device", "cuda:99"), "no device 'cuda:99' here"),
    ],
)
def test_a_wrong_name_is_an_error_of_one_line(arguments: tuple[str, ...], said: str) -> None:
    outcome = run(*arguments)
    assert outcome.exit_code == 2
    assert said in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_a_library_stands_for_all_its_peers() -> None:
    assert [peer.name for peer in bench_peers.chosen(["ctranslate2"])] == ["stock", "CTranslate2", "CTranslate2, int8"]
    assert bench_peers.chosen([]) == list(PEERS)
    with pytest.raises(NotFoundError):
        bench_peers.chosen(["stock", "t6"])
