"""What only a GPU can show: the patches' contracts, kernels and waits on it, and that the instruments work there."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from test_contracts import PATCHES, distances, fp64_logits

import t5fastpatch
from t5fastpatch.measure.census import census
from t5fastpatch.measure.memory import bracket
from t5fastpatch.measure.precision import Precision, in_precision, tensor_cores_for_fp32
from t5fastpatch.measure.profiling.profile import Profile
from t5fastpatch.measure.profiling.profiler import profile_call
from t5fastpatch.measure.subject import attention_of
from t5fastpatch.measure.timing import stopwatch_for
from t5fastpatch.measure.workloads import Workload, block, decoder_step, search
from t5fastpatch.rescaling import scaled_product

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
every_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
every_kind = pytest.mark.parametrize("kind", [zoo.BY_NAME["t5"], zoo.BY_NAME["t5-v1.1"]], ids=str)


def built(kind: zoo.Kind = zoo.BY_NAME["t5"], dtype: torch.dtype = torch.float16, **more: Any) -> Any:
    return kind.build(**more).to(DEVICE, dtype)


def batch_of(kind: zoo.Kind = zoo.BY_NAME["t5"]) -> dict[str, Any]:
    return {name: value.to(DEVICE) for name, value in kind.batch().items()}


def logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**batch)["logits"]
    return found


def stock_and_patched_norm(dtype: torch.dtype) -> tuple[Any, Any]:
    stock = built(dtype=dtype, d_model=512, num_layers=1).encoder.final_layer_norm
    patched = copy.deepcopy(stock)
    t5fastpatch.apply(patched, ["layer_norm"])
    return stock, patched


def rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def norm_errors(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Relative to the norm's formula in fp64."""
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight.double()
    with torch.no_grad():
        return ((norm(x).double() - exact) / exact).abs()


@every_kind
@every_half
def test_skip_inf_check_keeps_every_bit(kind: zoo.Kind, dtype: torch.dtype) -> None:
    model, batch = built(kind, dtype), batch_of(kind)
    stock = logits(model, batch)
    t5fastpatch.apply(model, ["skip_inf_check"])
    assert stock.isfinite().all()
    assert torch.equal(stock, logits(model, batch))


@every_kind
@every_half
@pytest.mark.parametrize("patch", ["softmax_dtype", "layer_norm"])
def test_rounding_patches_are_no_further_from_fp64_than_stock(kind: zoo.Kind, dtype: torch.dtype, patch: str) -> None:
    batch = batch_of(kind)
    found: dict[str, list[torch.Tensor]] = {"stock": [], "patched": []}
    for seed in range(6):
        model = built(kind, dtype, seed=seed)
        reference = fp64_logits(model, batch)
        found["stock"].append(distances([logits(model, batch)], [reference]))
        t5fastpatch.apply(model, [patch])
        found["patched"].append(distances([logits(model, batch)], [reference]))
    stock, patched = (torch.cat(each).median() for each in found.values())
    # The logits are rounded to half themselves: some more is within the noise of six small models.
    assert patched <= 1.2 * stock


@every_half
def test_a_patched_norm_rounds_less_than_stocks(dtype: torch.dtype) -> None:
    stock, patched = stock_and_patched_norm(dtype)
    assert norm_errors(patched, rows(dtype)).mean() <= norm_errors(stock, rows(dtype)).mean()


def test_a_patched_norm_in_fp32_is_within_a_few_roundings_of_fp64() -> None:
    _, patched = stock_and_patched_norm(torch.float32)
    assert norm_errors(patched, rows(torch.float32)).max() <= 8 * torch.finfo(torch.float32).eps


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_fused_rms_norm")
    or not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA"),
    reason="this PyTorch has no fused RMS norm on CUDA",
)
def test_a_patched_norm_is_one_kernel() -> None:
    stock, patched = stock_and_patched_norm(torch.float16)
    x = rows(torch.float16)
    assert kernels(profile_call(lambda: lambda: patched(x), DEVICE, calls=2)) == 1
    assert kernels(profile_call(lambda: lambda: stock(x), DEVICE, calls=2)) > 3


@every_kind
def test_a_model_loaded_in_fp16_keeps_its_results(kind: zoo.Kind) -> None:
    """Its `wo` is in fp32, so an fp32 residual meets fp16 norms."""
    model, batch = in_precision(built(kind, torch.float32), Precision.FP16_LOADED), batch_of(kind)
    stock = logits(model, batch)
    t5fastpatch.apply(model, PATCHES)
    patched = logits(model, batch)
    assert patched.dtype == stock.dtype
    assert (patched.double() - stock.double()).norm() <= 1e-2 * stock.double().norm()


@every_half
def test_under_autocast_dtypes_are_stocks(dtype: torch.dtype) -> None:
    model, batch = built(dtype=torch.float32), batch_of()
    with torch.autocast("cuda", dtype=dtype):
        stock = model(**batch)
        t5fastpatch.apply(model, PATCHES)
        patched = model(**batch)
    assert patched.logits.dtype == stock.logits.dtype
    assert (patched.logits.double() - stock.logits.double()).norm() <= 0.05 * stock.logits.double().norm()
    patched.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_an_exact_patch_generates_the_same_tokens() -> None:
    model, batch = built(), batch_of()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        stock = search(model, inputs, num_beams=1, max_new_tokens=16)
        t5fastpatch.apply(model, ["skip_inf_check"])
        assert torch.equal(stock, search(model, inputs, num_beams=1, max_new_tokens=16))


def test_all_patches_choose_the_same_tokens_but_where_two_are_as_good() -> None:
    model, batch = built(), batch_of()
    stock = logits(model, batch).float()
    t5fastpatch.apply(model, PATCHES)
    chosen = logits(model, batch).argmax(-1, keepdim=True)
    lost = stock.max(-1).values - stock.gather(-1, chosen).squeeze(-1)
    assert lost.max() <= 0.01 * stock.abs().max()


# Kernels and waits


@every_half
def test_a_rescaled_product_is_finite_where_the_plain_one_is_not(dtype: torch.dtype) -> None:
    """The factor acts on the accumulator: in fp16 the plain product is infinite, and this one is off by a rounding."""
    linear = torch.nn.Linear(512, 256, bias=False, device=DEVICE, dtype=dtype)
    x = torch.rand(4, 7, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype) + 1
    with torch.no_grad():
        linear.weight.fill_(200)
        found = scaled_product(linear, x, 2.0**-4).double()
        exact = x.double() @ linear.weight.double().T * 2.0**-4
        assert linear(x).isinf().all() == (dtype == torch.float16)
    assert ((found - exact).abs() <= torch.finfo(dtype).eps * exact).all()


@every_kind
def test_a_model_that_overflows_in_fp16_is_near_fp32_once_it_is_patched(kind: zoo.Kind) -> None:
    model, batch = built(kind), batch_of(kind)
    with torch.no_grad():
        for block in model.encoder.block:
            block.layer[-1].DenseReluDense.wo.weight.mul_(2.0**14)
    exact = logits(copy.deepcopy(model).float(), batch)
    assert t5fastpatch.apply(model)["residual_rescale"].state is t5fastpatch.State.ON
    found = logits(model, batch)
    assert found.isfinite().all()
    assert torch.cosine_similarity(found.float(), exact, dim=-1).min() > 0.999


def kernels(profile: Profile) -> float:
    """How many there are in a call."""
    return sum(kernel.calls for kernel in profile.kernels)


def step_of(model: Any) -> Workload:
    return decoder_step(model, batch_of())


def test_a_patched_decoder_step_launches_fewer_kernels() -> None:
    model = built()
    step = step_of(model)
    stock = profile_call(step.prepare, DEVICE, calls=2)
    t5fastpatch.apply(model, PATCHES)
    patched = profile_call(step.prepare, DEVICE, calls=2)
    assert 0 < kernels(patched) < kernels(stock)
    assert 0 < patched.launches < stock.launches


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """The times that the host waits for the device in the `with` block, as PyTorch warns of them; filled at its end."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(each.message) for each in caught if "called a synchronizing" in str(each.message)]


def waited(step: Workload) -> tuple[int, int]:
    """How often the host waits in one call: as PyTorch warns of it, and as a census counts it."""
    with torch.no_grad():
        step.prepare()()
        call = step.prepare()
        with waits() as found:
            call()
        return len(found), census(step.prepare(), step.module).syncs


def test_a_wait_is_seen() -> None:
    with waits() as found:
        torch.ones(1, device=DEVICE).item()
    assert found


def test_the_patches_take_away_the_waits_that_a_census_says() -> None:
    model = built()
    step = step_of(model)
    stock, stock_census = waited(step)
    t5fastpatch.apply(model, PATCHES)
    patched, patched_census = waited(step)
    assert patched >= patched_census
    assert stock - patched == stock_census - patched_census


def test_a_patched_block_never_waits() -> None:
    model, batch = built(), batch_of()
    t5fastpatch.apply(model, PATCHES)
    first = block(model, batch)
    with torch.no_grad():
        first.prepare()()
        call = first.prepare()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_patched_encoder_can_be_captured_as_a_graph() -> None:
    model = built()
    if t5fastpatch.status(model).transformers.startswith("5.") and attention_of(model) == "eager":
        pytest.skip("stock's eager mask of these releases copies a number from the host, which no capture allows")
    t5fastpatch.apply(model, PATCHES)
    tokens = batch_of()["input_ids"]
    with torch.no_grad():
        expected = model.encoder(input_ids=tokens)[0]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is made at a first call must not be made in the capture
            for _ in range(3):
                model.encoder(input_ids=tokens)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model.encoder(input_ids=tokens)[0]
        graph.replay()
        torch.cuda.synchronize()
    assert captured.isfinite().all()
    # In a capture some releases take another way to the same mask.
    assert (captured.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="Triton needs a C compiler")
def test_a_patched_encoder_compiles_to_one_graph() -> None:
    model = built()
    if t5fastpatch.status(model).transformers.startswith(("4.26", "4.30", "4.41")):
        pytest.skip("stock of these releases does not compile to one graph")
    t5fastpatch.apply(model, PATCHES)
    tokens = batch_of()["input_ids"]
    torch._dynamo.reset()
    try:
        compiled = torch.compile(model.encoder, fullgraph=True)
        with torch.no_grad():
            expected, found = (encoder(input_ids=tokens)[0].float() for encoder in (model.encoder, compiled))
    finally:
        torch._dynamo.reset()
    assert (found - expected).norm() <= 1e-2 * expected.norm()


def decoded(model: Any, new: int = 16, **arguments: Any) -> torch.Tensor:
    tokens = {name: value for name, value in batch_of().items() if name != "labels"}
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        found: torch.Tensor = model.generate(**tokens, max_new_tokens=new, **arguments)
    return found


def launches_of_a_step(model: Any) -> float:
    """As the difference of generating few tokens and many, per token."""
    few, many = (
        profile_call(lambda new=new: functools.partial(decoded, model, new), DEVICE, calls=2).launches
        for new in (8, 24)
    )
    return (many - few) / 16


def test_a_captured_decoder_step_gives_the_same_tokens_in_fewer_launches() -> None:
    model = built()
    if t5fastpatch.status(model)["static_decode"].state is t5fastpatch.State.ABSENT:
        pytest.skip(t5fastpatch.status(model)["static_decode"].why)
    t5fastpatch.apply(model, PATCHES)
    expected = {do_sample: seeded(model, do_sample) for do_sample in (False, True)}
    eager = launches_of_a_step(model)
    t5fastpatch.apply(model, "static_decode")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        for do_sample, tokens in expected.items():
            for _ in range(3):  # warm up, capture, replay
                assert torch.equal(seeded(model, do_sample), tokens)
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == 1
        assert counters["inductor"]["cudagraph_skips"] == 0
        for _ in range(3):
            decoded(model, 24)
        assert 0 < launches_of_a_step(model) < eager / 2
    finally:
        t5fastpatch.remove(model, "static_decode")
        torch._dynamo.reset()


def seeded(model: Any, do_sample: bool) -> torch.Tensor:
    torch.manual_seed(0)
    return decoded(model, do_sample=do_sample)


def test_a_captured_step_has_the_bits_of_the_same_step_uncaptured() -> None:
    model = built()
    if t5fastpatch.status(model)["static_decode"].state is t5fastpatch.State.ABSENT:
        pytest.skip(t5fastpatch.status(model)["static_decode"].why)
    t5fastpatch.apply(model, [*PATCHES, "static_decode"])
    seen: list[torch.Tensor] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.clone())
        return scores

    decoded(model, logits_processor=[look], cache_implementation="static", disable_compile=True)
    uncaptured = torch.stack(seen)
    torch._dynamo.reset()
    try:
        for _ in range(3):
            seen.clear()
            decoded(model, logits_processor=[look])
            assert torch.equal(torch.stack(seen), uncaptured)
    finally:
        torch._dynamo.reset()


# The instruments


def test_the_stopwatch_sees_what_the_device_does_after_the_call_has_returned() -> None:
    stopwatch = stopwatch_for(DEVICE)
    sleep: Any = torch.cuda._sleep  # returns at once; the device is busy for so many cycles
    _, short, long = (stopwatch(functools.partial(sleep, cycles)) for cycles in (1_000, 1_000, 20_000_000))
    assert 0 < short < long < 60


def test_memory_on_the_device_is_bracketed() -> None:
    size = 64 * 2**20

    def kept() -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=DEVICE)

    held, memory = bracket(kept, DEVICE)
    assert held.numel() == size
    assert (memory.device_delta, memory.device_peak) == (size, size)
    _, memory = bracket(lambda: kept().shape, DEVICE)
    assert (memory.device_delta, memory.device_peak) == (0, size)


def test_a_profile_tells_of_kernels_and_tensor_cores() -> None:
    profile = profile_call(step_of(built()).prepare, DEVICE, calls=2)
    assert profile.device == "cuda"
    assert kernels(profile) > 0
    assert all(0 <= share <= 1 for share in profile.tensor_core_shares())
    assert 0 < profile.seconds < 60
    assert sum(profile.by_category().values()) == pytest.approx(profile.seconds)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (7, 0), reason="this device has no tensor cores"
)
def test_a_large_product_in_fp16_is_known_to_run_on_tensor_cores() -> None:
    a = torch.ones(1024, 1024, device=DEVICE, dtype=torch.float16)
    profile = profile_call(lambda: lambda: a @ a, DEVICE, calls=2)
    assert profile.tensor_core_shares()[1] > 0.5, [kernel.name for kernel in profile.kernels]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="this device has no tf32"
)
def test_tf32_is_on_where_it_is_asked_for_and_nowhere_else() -> None:
    a = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    exact = a.double() @ a.double()
    with tensor_cores_for_fp32(False):
        fp32 = a @ a
    with tensor_cores_for_fp32(True):
        tf32 = a @ a
    errors = [(product.double() - exact).norm() / exact.norm() for product in (fp32, tf32)]
    assert 10 * errors[0] < errors[1] < 1e-2
