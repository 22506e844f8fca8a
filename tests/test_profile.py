from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import zoo
from rich.console import Console
from torch.nn.modules import module as torch_module

from t5fastpatch import T5FastPatchError, patched, status
from t5fastpatch.cli_profile import profile
from t5fastpatch.measure.census import census
from t5fastpatch.measure.profiling.categories import CATEGORIES, category
from t5fastpatch.measure.profiling.diff import diff
from t5fastpatch.measure.profiling.host_profile import BUILT_IN, host_profiles
from t5fastpatch.measure.profiling.profile import Op, Profile, combined
from t5fastpatch.measure.profiling.profiler import CALL, profile_call, summary
from t5fastpatch.measure.profiling.report import Profiled, tables
from t5fastpatch.measure.profiling.tensor_cores import uses_tensor_cores
from t5fastpatch.measure.profiling.turns import in_turn
from t5fastpatch.measure.shapes import random_model
from t5fastpatch.measure.timing import Entry, Prepare
from t5fastpatch.patch import State

CPU = torch.device("cpu")
DOCUMENT = (Path(__file__).parent.parent / "docs" / "profile.md").read_text()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def profiled(call: Callable[[], object]) -> Profile:
    return profile_call(lambda: call, CPU, calls=1)


def counts(profile: Profile) -> dict[tuple[str, str], float]:
    return {op.key: op.calls for op in profile.ops}


# Events as torch.profiler gives them.


def event(name: str, *inner: Any, micros: float = 10.0, kernels: Any = (), dtypes: Any = (), scope: int = 0) -> Any:
    made = SimpleNamespace(
        name=name,
        scope=scope,
        cpu_children=list(inner),
        cpu_parent=None,
        cpu_time_total=micros,
        input_dtypes=list(dtypes),
        kernels=[SimpleNamespace(name=kernel, duration=duration) for kernel, duration in kernels],
    )
    for child in inner:
        child.cpu_parent = made
    return made


def range_(name: str, *inner: Any, kernels: Any = ()) -> Any:
    return event(name, *inner, scope=7, kernels=kernels)


def cast(source: str, target: str) -> Any:
    return event("aten::to", event("aten::_to_copy", event("aten::copy_", dtypes=[target, source, "Scalar"])))


GEMM, REDUCE, ADD = "ampere_fp16_s16816gemm_fp16_64x64_ldg8_tn", "void at::native::reduce_kernel<512>", "vector_add"


def cuda_call() -> Any:
    launch = event("cudaLaunchKernel")
    return range_(
        CALL,
        event("aten::linear", event("aten::mm", launch, kernels=[(GEMM, 30.0)])),
        range_(
            "t5fastpatch::block",
            event("aten::isinf", event("aten::any", event("cudaLaunchKernelExC"), kernels=[(REDUCE, 5.0)])),
            event(
                "aten::is_nonzero",
                event("cudaMemcpyAsync"),
                event("cudaStreamSynchronize"),
                kernels=[("Memcpy DtoH", 2.0)],
            ),
        ),
        event("cuLaunchKernel"),
        kernels=[("triton_poi_fused_add_0", 3.0), (CALL, 99.0)],
    )


def test_cuda_kernels_take_the_category_of_the_op_that_launched_them() -> None:
    found = summary([cuda_call()], "cuda", wall=1e-3)
    kernels = {kernel.name: (kernel.category, kernel.tensor_cores) for kernel in found.kernels}
    assert kernels == {
        GEMM: ("matrix products", True),
        REDUCE: ("infinity checks", False),
        "triton_poi_fused_add_0": ("other", False),
    }


def test_cuda_time_is_the_device_s_and_holds_the_copies_too() -> None:
    seconds = summary([cuda_call()], "cuda", wall=1e-3).by_category()
    expected = {"matrix products": 30e-6, "infinity checks": 7e-6, "other": 3e-6}
    assert {name: value for name, value in seconds.items() if value} == pytest.approx(expected)


def test_launches_and_waits_are_counted_where_the_host_makes_them() -> None:
    found = summary([cuda_call()], "cuda", wall=1e-3)
    assert (found.launches, found.waits) == (3, 1)


def test_tensor_core_shares_are_of_kernels_and_of_their_time() -> None:
    assert summary([cuda_call()], "cuda", wall=1e-3).tensor_core_shares() == pytest.approx((1 / 3, 30 / 38))
    assert summary([range_(CALL)], "cuda", wall=1e-3).tensor_core_shares() == (0.0, 0.0)


def test_a_report_on_cuda_tells_of_kernels_waits_and_tensor_cores() -> None:
    found = Profiled("stock fp16", summary([cuda_call()], "cuda", wall=1e-3), census(lambda: None))
    console = Console(width=110, file=io.StringIO())
    for table in tables([found, found], top=5):
        console.print(table)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.file.getvalue().splitlines()]
    assert ["matrix products", "1", "0.030", "75%", "1", "0.030", "75%", "+0.000"] in lines
    assert ["launches by the host", "3", "3"] in lines
    assert ["kernels' time on tensor cores", "79%", "79%"] in lines
    assert ["the device waits", "", "0.960", "", "", "0.960", "", "+0.000"] in lines
    assert ["matrix products", GEMM, "yes", "1", "0.030"] in lines


@pytest.mark.parametrize(
    "kernel",
    [
        "volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_tn",
        "turing_h1688gemm_128x128_ldg8_stages_32x1_nn",
        GEMM,
        "cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_tn_align8",
        "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize96x64x32_stage4_warpsize2x2x1_tensor16x8x16_execute_kernel",
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "nvjet_hsh_64x8_64x16_4x1_v_bz_TNT",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>",
        "fmha_cutlassF_f16_aligned_64x64_rf_sm80",
    ],
)
def test_a_kernel_on_tensor_cores_is_known_by_its_name(kernel: str) -> None:
    assert uses_tensor_cores(kernel)


@pytest.mark.parametrize(
    "kernel",
    [
        "ampere_sgemm_128x64_tn",
        "cutlass_80_simt_sgemm_256x128_8x4_nn_align1",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_execute_kernel",
        "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>>",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80",
        "void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 7, false>",
    ],
)
def test_a_kernel_on_ordinary_cores_is_not_taken_for_one(kernel: str) -> None:
    assert not uses_tensor_cores(kernel)


def test_a_cast_is_named_by_its_dtypes_and_a_copy_is_no_cast() -> None:
    call = range_(CALL, cast("c10::Half", "float"), cast("float", "float"), event("aten::to"))
    assert counts(summary([call], "cpu", wall=1.0)) == {
        ("casts", "to fp16 -> fp32"): 1,
        ("copies", "to"): 1,
        ("views", "to"): 1,
    }


def test_a_norm_s_casts_are_counted_with_the_casts_too() -> None:
    call = range_(
        CALL, cast("c10::Half", "float"), range_("t5fastpatch::norm", cast("float", "c10::Half"), event("aten::mul"))
    )
    found = summary([call], "cpu", wall=1.0)
    assert (found.calls_by_category()["casts"], found.calls_by_category()["norms"]) == (1, 2)
    assert found.casts() == (2, pytest.approx(20e-6))


def test_where_the_profiler_keeps_no_dtypes_a_to_copy_is_a_cast() -> None:
    found = cast("", "")
    found.cpu_children[0].cpu_children[0].input_dtypes = None  # as in older releases of PyTorch
    assert summary([range_(CALL, found)], "cpu", wall=1.0).calls_by_category()["casts"] == 1


def test_what_lies_outside_the_call_is_no_part_of_it() -> None:
    outside = [event("aten::mul"), range_("another range", event("aten::add"))]
    assert counts(summary([*outside, range_(CALL, event("aten::relu"))], "cpu", wall=1.0)) == {
        ("element-wise", "relu"): 1
    }


def test_the_profiler_s_cost_is_taken_off_for_each_op_inside() -> None:
    call = range_(CALL, event("aten::rms_norm", *(event("aten::mul") for _ in range(4)), micros=20.0))
    assert summary([call], "cpu", wall=1.0, event_cost=3e-6).seconds == pytest.approx(8e-6)
    assert summary([call], "cpu", wall=1.0, event_cost=9e-6).seconds == 0.0


def test_several_calls_come_as_the_median_of_seconds_and_the_mean_of_numbers() -> None:
    def one(*seconds: float) -> Profile:
        return Profile("cpu", 1, sum(seconds), tuple(Op("other", f"op{i}", 1, each) for i, each in enumerate(seconds)))

    found = combined([one(1.0, 7.0), one(9.0), one(2.0)])
    assert [(op.name, op.seconds) for op in found.ops] == [("op0", 2.0), ("op1", 0.0)]
    assert [op.calls for op in found.ops] == [1.0, pytest.approx(1 / 3)]
    assert (found.calls, found.wall) == (3, 8.0)


# Categories.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::linear", "matrix products"),
        ("aten::bmm", "matrix products"),
        ("aten::scaled_dot_product_attention", "fused attention"),
        ("aten::_scaled_dot_product_efficient_attention", "fused attention"),
        ("aten::softmax", "softmax"),
        ("aten::rms_norm", "norms"),
        ("aten::cat", "copies"),
        ("aten::add_", "element-wise"),
        ("aten::where", "element-wise"),
        ("aten::gelu", "element-wise"),
        ("aten::transpose", "views"),
        ("aten::split", "views"),
        ("aten::embedding", "other"),
        ("aten::arange", "other"),
        ("mylib::fused", "other"),
        ("aten::no_such_op", "other"),
    ],
)
def test_an_op_is_known_by_its_name_and_schema(name: str, expected: str) -> None:
    assert category(name, "", copies=False, casts=False) == expected


def test_what_a_view_copies_makes_it_a_copy_or_a_cast() -> None:
    for name in ("aten::to", "aten::contiguous", "aten::reshape", "aten::_to_copy", "aten::clone"):
        assert category(name, "", copies=True, casts=False) == "copies"
        assert category(name, "", copies=True, casts=True) == "casts"


def test_a_cast_inside_an_op_does_not_change_what_the_op_is() -> None:
    assert category("aten::softmax", "", copies=True, casts=True) == "softmax"
    assert category("aten::mul", "", copies=True, casts=True) == "element-wise"


def test_where_an_op_is_called_comes_before_its_name() -> None:
    assert category("aten::mul", "norm", copies=False, casts=False) == "norms"
    assert category("aten::where", "block", copies=False, casts=False) == "infinity checks"
    assert category("aten::select", "block", copies=False, casts=False) == "views"
    assert category("aten::where", "elsewhere", copies=False, casts=False) == "element-wise"


# Models.


@pytest.fixture(scope="module")
def t5() -> Any:
    return zoo.BY_NAME["t5"].build().half()


def forward(model: Any, kind: zoo.Kind = zoo.BY_NAME["t5"]) -> Callable[[], Any]:
    inputs = kind.batch(model.dtype)
    return lambda: model(**inputs)


@pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
def test_the_infinity_checks_are_what_skip_inf_check_leaves_out(kind: zoo.Kind) -> None:
    kind.check_dtype(torch.float16)
    model = kind.build().half()
    if status(model)["skip_inf_check"].state is not State.UNSAFE:
        pytest.skip("there are none in this release")
    stock = profiled(forward(model, kind))
    with patched(model, ["skip_inf_check"]):
        ours = profiled(forward(model, kind))
    fewer = [each for each in diff(stock, ours) if each.kind != "as often"]
    assert {each.a.category for each in fewer} == {"infinity checks"}
    assert "isinf" in {each.a.name for each in fewer}
    assert ours.calls_by_category()["infinity checks"] == 0


def test_in_fp32_there_are_no_infinity_checks_and_no_half() -> None:
    stock = profiled(forward(zoo.BY_NAME["t5"].build()))
    assert stock.calls_by_category()["infinity checks"] == 0
    assert not any("fp16" in op.name for op in stock.ops)


def test_every_norm_is_one_op_once_patched(t5: Any) -> None:
    norms = sum(type(module).__name__ == "T5LayerNorm" for module in t5.modules())
    with patched(t5, ["layer_norm"]):
        found = profiled(forward(t5))
    assert {op.name: op.calls for op in found.ops if op.category == "norms"}["rms_norm"] == norms


def test_categories_add_up_to_the_whole(t5: Any) -> None:
    found = profiled(forward(t5))
    assert tuple(found.by_category()) == tuple(found.calls_by_category()) == CATEGORIES
    assert sum(found.by_category().values()) == pytest.approx(found.seconds)
    assert found.seconds > 0


def test_the_same_call_makes_the_same_ops(t5: Any) -> None:
    assert counts(profiled(forward(t5))) == counts(profiled(forward(t5)))


def test_variants_are_called_in_turn_and_the_first_round_is_left_out() -> None:
    called: list[str] = []
    measured: list[str] = []

    def entry_of(name: str) -> Entry:
        return lambda: contextlib.nullcontext(lambda: lambda: called.append(name))

    def measure(name: str, prepare: Prepare) -> int:
        measured.append(name)
        return len(measured)

    found = in_turn({"a": entry_of("a"), "b": entry_of("b")}, 3, measure)
    assert found == {"a": [3, 5, 7], "b": [4, 6, 8]}
    assert measured == called == ["a", "b"] * 4  # each called once before, unmeasured


def test_what_is_prepared_is_no_part_of_the_call() -> None:
    def prepare() -> Callable[[], object]:
        x = torch.ones(3).exp()
        return lambda: x.relu()

    assert counts(profile_call(prepare, CPU, calls=3)) == {("element-wise", "relu"): 1}


def test_an_error_in_the_call_leaves_no_hooks_behind(t5: Any) -> None:
    with pytest.raises(Exception, match="input"):
        profiled(lambda: t5(input_ids=None, decoder_input_ids=None))
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks


# Differences.


def test_a_diff_goes_by_numbers_of_calls() -> None:
    def of(**calls: float) -> Profile:
        return Profile("cpu", 1, 1.0, tuple(Op("other", name, each, each * 1e-3) for name, each in calls.items()))

    found = diff(of(isinf=3, to=4, mul=2), of(rms_norm=5, to=1, mul=2))
    assert [(each.kind, each.a.name, round(each.seconds, 9)) for each in found] == [
        ("only in A", "isinf", -3e-3),
        ("only in B", "rms_norm", 5e-3),
        ("changed", "to", -3e-3),
        ("as often", "mul", 0.0),
    ]


def test_a_profile_does_not_differ_from_itself(t5: Any) -> None:
    found = profiled(forward(t5))
    assert {each.kind for each in diff(found, found)} == {"as often"}


# The host.


def entry(call: Callable[[], object]) -> Any:
    return lambda: contextlib.nullcontext(lambda: call)


def test_a_host_profile_counts_python_functions_per_call(t5: Any) -> None:
    (found,) = host_profiles({"stock": entry(forward(t5))}, calls=3).values()
    norms = sum(type(module).__name__ == "T5LayerNorm" for module in t5.modules())
    line = type(t5.encoder.final_layer_norm).forward.__code__.co_firstlineno
    file = "t5/modeling_t5.py"
    (norm,) = [each for each in found.functions if each.module.endswith(file) and each.name == f"forward:{line}"]
    assert norm.calls == norms
    assert sum(found.by_module().values()) == pytest.approx(found.seconds)
    assert any(each.module == BUILT_IN and each.name == "torch._C._nn.linear" for each in found.functions)


def test_a_patched_function_stands_beside_upstream_s(t5: Any) -> None:
    (stock,) = host_profiles({"stock": entry(forward(t5))}, calls=1).values()
    with patched(t5, ["skip_inf_check"]):
        (ours,) = host_profiles({"patched": entry(forward(t5))}, calls=1).values()
    file = "t5/modeling_t5.py"
    names = [{each.name for each in found.functions if each.module.endswith(file)} for found in (stock, ours)]
    assert names[0] == names[1]


# The command.


@pytest.fixture
def run() -> Callable[..., None]:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(profile)
    return lambda *arguments: app(["--calls", "1", "--batch-size", "2", *arguments], standalone_mode=False)


def test_the_command_writes_what_the_document_says(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    run("--host", "--json", str(file), "--trace", str(tmp_path / "traces"))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 110
    for part in ("infinity checks", "only in A", "isinf", "B - A ms", "the call, without profiler"):
        assert part in text

    written = json.loads(file.read_text(encoding="utf-8"))
    stock, ours = written["variants"]
    assert tuple(stock["profile"]["by_category"]) == CATEGORIES
    assert stock["name"] == "stock fp16"
    assert "skip_inf_check" in ours["name"]
    (isinf,) = [each for each in written["diff"] if each["name"] == "isinf"]
    assert (isinf["kind"], isinf["category"]) == ("only in A", "infinity checks")
    assert isinf["calls"][0] > 0 == isinf["calls"][1]
    for key in {*written, *stock, *stock["profile"], *stock["profile"]["ops"][0], *stock["host"], *written["diff"][0]}:
        assert f"`{key}`" in DOCUMENT
    for name in CATEGORIES:
        assert f"| {name} |" in DOCUMENT

    traces = list((tmp_path / "traces").iterdir())
    assert len(traces) == 2
    assert all(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] for trace in traces)


def test_one_variant_stands_alone(run: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    run("--patches", "stock", "--against", "none", "--workload", "forward", "--top", "3")
    text = capsys.readouterr().out
    assert "The 3 ops that take longest" in text
    assert "only in A" not in text


def test_where_there_is_nothing_to_patch_the_model_is_profiled_as_it_is(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = random_model("gpt2", CPU, n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    monkeypatch.setattr("t5fastpatch.measure.subject.random_model", lambda *_: small)
    gpt2 = ("--shape", "gpt2", "--workload", "forward", "--source-length", "8")
    run(*gpt2)
    alone = capsys.readouterr()
    assert "nothing to patch" in alone.err
    assert "Where the time goes" in alone.out
    assert "B is" not in alone.out
    run(*gpt2, "--against", "fp32")
    beside = capsys.readouterr().out
    assert "A is stock fp32" in beside
    assert "B is stock fp16" in beside


def test_the_command_says_what_it_can_not_do(run: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(T5FastPatchError, match="decoder_step"):
        run("--workload", "training")
    with pytest.raises(T5FastPatchError, match="beside itself"):
        run("--patches", "fp32", "--against", "fp32")
    with pytest.raises(T5FastPatchError, match="no directory"):
        run("--json", str(tmp_path / "no" / "file.json"))
