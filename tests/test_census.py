from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.nn.modules import module

from t5fastpatch import T5FastPatchError
from t5fastpatch.measure.census import Census, Work, census
from t5fastpatch.measure.census.fake import fake_cuda_census, shapes_only, without_data
from t5fastpatch.measure.workloads import (
    Workload,
    block,
    decoder_step,
    encoder_forward,
    encoder_inputs,
    forward,
    generate,
)

Figures = tuple[int, int, int]

# (ops, casts, syncs) of stock's decoder step in fp32 and after `.half()`, by release, with torch 2.13.
STOCK: dict[str, tuple[Figures, Figures]] = {
    "4.26": ((296, 4, 0), (413, 67, 18)),
    "4.30": ((296, 4, 0), (485, 67, 0)),
    "4.41": ((296, 4, 0), (485, 67, 0)),
    "4.48": ((303, 3, 0), (491, 65, 0)),
    "4.57": ((291, 3, 0), (479, 65, 0)),
    "5.0": ((289, 3, 1), (477, 65, 1)),
    "5.12": ((284, 3, 1), (472, 65, 1)),
    "5.17": ((237, 3, 1), (401, 41, 1)),
    "5.24": ((243, 3, 1), (407, 41, 1)),
}
RELEASE = ".".join(transformers.__version__.split(".")[:2])
TORCH = ".".join(torch.__version__.split(".")[:2])


def t5(**shape: int) -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(**shape, decoder_start_token_id=0, feed_forward_proj="relu")
    return transformers.T5ForConditionalGeneration(config).eval()


def batch(target_length: int = 2) -> dict[str, torch.Tensor]:
    tokens = torch.randint(2, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens[:, :target_length].contiguous(),
    }


@pytest.fixture(scope="module")
def small_shaped() -> Any:
    return t5(vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8)


@pytest.fixture
def tiny() -> Any:
    return t5(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)


def counted(workload: Workload) -> Census:
    return census(workload.prepare())


@pytest.mark.skipif(RELEASE not in STOCK, reason=f"no figures for transformers {RELEASE}")
@pytest.mark.skipif(TORCH != "2.13", reason=f"the figures are from torch 2.13, this is {TORCH}")
def test_stock_figures_of_the_release_are_reproduced(small_shaped: Any) -> None:
    fp32 = counted(decoder_step(small_shaped, batch()))
    fp16 = counted(decoder_step(small_shaped.half(), batch()))
    assert ((fp32.ops, fp32.casts, fp32.syncs), (fp16.ops, fp16.casts, fp16.syncs)) == STOCK[RELEASE]


def test_the_same_call_gives_the_same_census(tiny: Any) -> None:
    half = tiny.half()
    made = [make(half, batch()) for make in (block, encoder_forward, decoder_step, forward)]
    for workload in [*made, generate(half, batch(), 4), generate(half, batch(), 4, num_beams=2, free=True)]:
        assert counted(workload) == counted(workload)


def test_a_decoder_step_starts_from_the_same_cache_every_time(tiny: Any) -> None:
    workload = decoder_step(tiny, batch(5))
    first, second = workload.prepare()(), workload.prepare()()
    assert torch.equal(first.logits, second.logits)
    assert first.logits.shape[1] == 1


def test_a_decoder_step_gives_what_a_forward_without_cache_gives(tiny: Any) -> None:
    inputs = batch(5)
    with torch.no_grad():
        expected = tiny(**inputs, use_cache=False).logits[:, -1:]
        step = decoder_step(tiny, inputs).prepare()().logits
    torch.testing.assert_close(step, expected)


def test_a_decoder_step_needs_a_token_before_it(tiny: Any) -> None:
    with pytest.raises(T5FastPatchError, match="two tokens or more"):
        decoder_step(tiny, batch(1))


def test_a_block_is_the_encoders_first(tiny: Any) -> None:
    workload = block(tiny, batch())
    assert workload.module is tiny.encoder.block[0]
    with torch.no_grad():
        hidden = workload.prepare()()[0]
        expected = tiny.encoder(**encoder_inputs(batch()), output_hidden_states=True).hidden_states[1]
    assert torch.equal(hidden, expected)
    assert not workload.module._forward_pre_hooks
    with pytest.raises(T5FastPatchError, match="a Linear has no block"):
        block(torch.nn.Linear(1, 1), {})


def test_views_are_not_counted() -> None:
    x = torch.ones(4, 6)
    views: list[Callable[[], object]] = [
        lambda: x.t(),
        lambda: x.view(2, 12)[None, :, 1:].expand(3, -1, -1),
        lambda: x.transpose(0, 1).reshape(6, 4).unbind(0),
        lambda: x.detach().split(2),
    ]
    for view in views:
        assert census(view).leaf_ops == 0
    # A product of more than two dimensions ends in a view that the schema does not mark.
    assert set(census(lambda: x[None] @ x.t()).by_op) == {"mm.default"}


def test_a_reshape_that_copies_is_counted() -> None:
    x = torch.ones(4, 6).t()
    assert census(lambda: x.reshape(-1)).by_op == {"clone.default": 1}


@pytest.mark.parametrize("norm", [F.rms_norm, torch.rms_norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm_is_one_operation(norm: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x, weight = torch.ones(2, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    found = census(lambda: norm(x, (8,), weight, 1e-6))
    assert found.by_op == {"rms_norm": 1}
    assert found.leaf_ops > 1
    assert found.casts == 0


def test_rms_norm_of_mixed_dtypes_is_no_single_kernel_anywhere() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8, dtype=torch.float16)
    found = census(lambda: F.rms_norm(x, (8,), weight, 1e-6))
    assert found.ops == found.leaf_ops > 1


def test_attention_is_one_operation() -> None:
    x = torch.ones(2, 4, 8, 16)
    # Dropout keeps the CPU from a fused kernel of its own.
    found = census(lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    assert found.by_op == {"scaled_dot_product_attention": 1}
    assert found.leaf_ops > 1


def test_casts_are_copies_into_another_dtype() -> None:
    x = torch.ones(3)
    assert census(lambda: x.half().float()).casts == 2
    assert census(lambda: x.half().copy_(x)).casts == 2
    assert census(lambda: x.float()).casts == 0
    assert census(lambda: x.to(torch.float32, copy=True)).casts == 0


FLAG = torch.tensor(True)
NUMBERS = torch.tensor([1.0, 0.0, 2.0])
MASK = NUMBERS > 0

SYNCS: dict[str, Callable[[], object]] = {
    "item": lambda: NUMBERS[0].item(),
    "bool": lambda: bool(FLAG),
    "if": lambda: 1 if (NUMBERS > 0).any() else 0,
    "int": lambda: int(NUMBERS[0]),
    "float": lambda: float(NUMBERS[0]),
    "index": lambda: range(torch.ones((), dtype=torch.int64)),
    "tolist": lambda: NUMBERS.tolist(),
    "tolist of one": lambda: FLAG.tolist(),
    "nonzero": lambda: NUMBERS.nonzero(),
    "where with one argument": lambda: torch.where(MASK),
    "masked_select": lambda: NUMBERS.masked_select(MASK),
    "mask": lambda: NUMBERS[MASK],
    "byte mask": lambda: torch.ops.aten.index.Tensor(NUMBERS, [MASK.byte()]),
    "assignment under a mask": lambda: NUMBERS.clone().index_put_((MASK,), torch.ones(2)),
    "equal": lambda: torch.equal(NUMBERS, NUMBERS),
    "allclose": lambda: torch.allclose(NUMBERS, NUMBERS),
    "one_hot": lambda: F.one_hot(MASK.long()),
    "unique": lambda: NUMBERS.unique(),
    "repeat_interleave": lambda: NUMBERS.repeat_interleave(MASK.long()),
}


@pytest.mark.parametrize("name", SYNCS)
def test_each_kind_of_synchronisation_counts_once(name: str) -> None:
    assert census(SYNCS[name]).syncs == 1


NO_SYNCS: dict[str, Callable[[], object]] = {
    "where": lambda: torch.where(MASK, NUMBERS, 0.0),
    "masked_fill": lambda: NUMBERS.masked_fill(MASK, 0.0),
    "index by integers": lambda: NUMBERS[torch.ones(2, dtype=torch.int64)],
    "a number under a mask": lambda: NUMBERS.clone().__setitem__(MASK, 0.0),
    "one_hot of known width": lambda: F.one_hot(MASK.long(), num_classes=2),
    "clamp": lambda: NUMBERS.clamp(max=1.0),
}


@pytest.mark.parametrize("name", NO_SYNCS)
def test_what_does_not_wait_is_no_synchronisation(name: str) -> None:
    assert census(NO_SYNCS[name]).syncs == 0


def test_host_scalars_are_operations() -> None:
    found = census(lambda: torch.where(FLAG, 1.0, 2.0))
    assert (found.host_scalars, found.ops) == (2, 3)
    assert census(lambda: torch.tensor(0.0)).host_scalars == 1


def test_an_operation_of_a_library_is_expanded() -> None:
    @torch.library.custom_op("t5fastpatch_test::hidden", mutates_args=(), schema="(Tensor x) -> Tensor")
    def hidden(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * 2

    found = census(lambda: hidden(torch.ones(2)))
    assert found.by_op == {"ones.default": 1, "add.Tensor": 1, "mul.Tensor": 1}


def test_an_operation_of_a_library_that_calls_nothing_is_one() -> None:
    @torch.library.custom_op("t5fastpatch_test::opaque", mutates_args=("x",), schema="(Tensor(a!) x) -> ()")
    def opaque(x: torch.Tensor) -> None:
        x.numpy()[:] = 0

    x = torch.ones(2)
    assert census(lambda: opaque(x)).by_op == {"t5fastpatch_test::opaque.default": 1}


def test_the_difference_names_what_one_call_does_more() -> None:
    x = torch.ones(2)
    more, less = census(lambda: (x + 1).half() * 2), census(lambda: x + 1 + 1)
    assert more.difference(less) == {"_to_copy.default": 1, "add.Tensor": -1, "mul.Tensor": 1}
    assert more.difference(more) == {}


def test_the_dict_holds_every_figure() -> None:
    figures = census(lambda: torch.ones(2).half()).to_dict()
    whole = {
        "ops": 2,
        "leaf_ops": 2,
        "views": 0,
        "casts": 1,
        "syncs": 0,
        "host_scalars": 0,
        "bytes_read": 8,
        "bytes_written": 12,
        "flops": 0,
        "flops_by_dtype": {},
        "fp32_share": None,
        "by_op": {"ones.default": 1, "_to_copy.default": 1},
        "leaf_by_op": {"ones.default": 1, "_to_copy.default": 1},
        "sync_sites": {},
    }
    assert figures == {**whole, "by_module": {"": whole}}


def test_the_dict_is_plain_data(tiny: Any) -> None:
    figures = counted(decoder_step(tiny.half(), batch())).to_dict()
    assert json.loads(json.dumps(figures)) == figures


def test_every_synchronisation_has_its_place() -> None:
    def waits() -> bool:
        return bool(FLAG) and NUMBERS.tolist() == [1.0, 0.0, 2.0]

    found = census(waits)
    line = waits.__code__.co_firstlineno + 1
    assert found.sync_sites == {f"test_census.py:{line} waits": 2}
    assert found.syncs == 2


def test_a_place_inside_of_torch_is_that_of_its_caller() -> None:
    # The waiting itself happens in a line of torch/functional.py.
    (place,) = census(lambda: torch.unique_consecutive(NUMBERS)).sync_sites
    assert re.fullmatch(r"test_census\.py:\d+ <lambda>", place)


X, Y = torch.ones(4, 6), torch.ones(6)
TABLE = torch.ones(100, 8, dtype=torch.float16)
ROWS, VALUES = torch.tensor([3, 3, 5]), TABLE[:3].clone()

# (call, bytes read, bytes written)
TRAFFIC: dict[str, tuple[Callable[[], object], int, int]] = {
    "elementwise": (lambda: X + 1, 96, 96),
    "broadcast": (lambda: X + Y, 96 + 24, 96),
    "expanded": (lambda: Y.expand(4, 6) * 2, 24, 96),
    "a part": (lambda: X[:, :3] * 2, 48, 48),
    "the same twice": (lambda: X * X, 96, 96),
    "windows that overlap": (lambda: Y.unfold(0, 3, 1) * 2, 24, 48),
    "one strided row": (lambda: X[:, 0] * 2, 16, 16),
    "in place": (lambda: X.mul_(1), 96, 96),
    "overwriting": (lambda: X.copy_(Y), 24, 96),
    "filling": (lambda: X.fill_(1), 0, 96),
    "into an argument": (lambda: torch.add(X, 0, out=X), 96, 96),
    "cast": (lambda: X.half(), 96, 48),
    "several": (lambda: torch.cat([X, X[:2]]), 96 + 48, 144),
    "reduction": (lambda: X.sum(), 96, 4),
    "rows of a table": (lambda: F.embedding(ROWS, TABLE), 24 + 48, 48),
    "rows by index": (lambda: TABLE[ROWS], 24 + 48, 48),
    "rows into a table": (lambda: TABLE.index_copy_(0, ROWS, VALUES), 24 + 48, 48),
    "allocation": (lambda: torch.empty(4, 6), 0, 0),
    "product": (lambda: X @ X.t(), 96, 64),
    "view": (lambda: X.t(), 0, 0),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_bytes_are_those_of_the_storage_that_is_covered(name: str) -> None:
    call, read, written = TRAFFIC[name]
    found = census(call)
    assert (found.bytes_read, found.bytes_written) == (read, written)


def test_a_composite_moves_its_own_inputs_and_output() -> None:
    x, weight = torch.ones(2, 8, dtype=torch.float16), torch.ones(8, dtype=torch.float16)
    found = census(lambda: F.rms_norm(x, (8,), weight, 1e-6))
    assert (found.bytes_read, found.bytes_written, found.flops) == (32 + 16, 32, 0)
    q, kv = torch.ones(2, 4, 1, 16), torch.ones(2, 4, 8, 16)
    bias = torch.zeros(1, 4, 1, 8).expand(2, 4, 1, 8)
    found = census(lambda: F.scaled_dot_product_attention(q, kv, kv, attn_mask=bias))
    assert (found.bytes_read, found.bytes_written) == (512 + 4096 + 128, 512)
    assert found.flops == 2 * (2 * 2 * 4 * 1 * 8 * 16)


def test_an_allocation_is_no_kernel() -> None:
    found = census(lambda: torch.empty(3).fill_(1))
    assert (found.ops, found.kernels.total()) == (2, 1)


# (call, FLOPs): two for each multiplication and addition.
PRODUCTS: dict[str, tuple[Callable[[], object], int]] = {
    "mm": (lambda: X @ X.t(), 2 * 4 * 6 * 4),
    "addmm": (lambda: torch.addmm(Y, X, torch.ones(6, 6)), 2 * 4 * 6 * 6),
    "linear": (lambda: F.linear(X[None], X, torch.ones(4)), 2 * 4 * 6 * 4),
    "bmm": (lambda: torch.bmm(X[None], X.t()[None]), 2 * 4 * 6 * 4),
    "baddbmm": (lambda: torch.baddbmm(torch.ones(1, 4, 4), X[None], X.t()[None]), 2 * 4 * 6 * 4),
    "matmul": (lambda: torch.ones(2, 3, 4, 6) @ X.t(), 2 * 2 * 3 * 4 * 6 * 4),
    "attention": (lambda: F.scaled_dot_product_attention(X[None], X[None], X[None]), 2 * (2 * 4 * 6 * 4)),
    "no product": (lambda: X * X, 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_of_matrix_products(name: str) -> None:
    call, flops = PRODUCTS[name]
    assert census(call).flops == flops


def test_products_are_told_apart_by_dtype() -> None:
    half = X.half()
    found = census(lambda: (X @ X.t(), half @ half.t(), half @ half.t(), half @ half.t()))
    assert found.flops_by_dtype == {"float32": 192, "float16": 3 * 192}
    assert found.fp32_share == 0.25
    assert census(lambda: X + 1).fp32_share is None


def test_half_a_model_in_fp32_shows_in_the_share(tiny: Any) -> None:
    assert counted(decoder_step(tiny, batch())).fp32_share == 1
    assert counted(decoder_step(tiny.half(), batch())).fp32_share == 0


def test_work_is_assigned_to_the_module_that_does_it(tiny: Any) -> None:
    found = census(decoder_step(tiny, batch()).prepare(), tiny)
    assert "decoder.block.0.layer.1.EncDecAttention" in found.by_module
    query = found.by_module["decoder.block.1.layer.0.SelfAttention.q"]
    assert (query.ops, query.flops) == (1, 2 * 2 * 32 * 32)
    assert not any(path.startswith("encoder") for path in found.by_module)


def test_modules_add_up_to_the_call(tiny: Any) -> None:
    found = census(decoder_step(tiny.half(), batch()).prepare(), tiny)
    assert sum(found.by_module.values(), Work()).figures() == found.figures() == found.within("").figures()
    blocks = [found.within(f"decoder.block.{number}").ops for number in (0, 1)]
    assert blocks[0] > blocks[1] > found.within("decoder.block.1.layer.0").ops > 0
    assert sum(blocks) < found.within("decoder").ops
    assert found.within("decoder.block.7") == Work()


def test_without_a_model_paths_begin_with_a_class(tiny: Any) -> None:
    paths = counted(decoder_step(tiny, batch())).by_module
    assert "T5ForConditionalGeneration.decoder.block.0.layer.1.EncDecAttention" in paths
    encoders = census(lambda: tiny.encoder(**encoder_inputs(batch()))).by_module
    assert "T5Stack.block.0.layer.0.SelfAttention.q" in encoders


def test_a_module_that_raises_is_left() -> None:
    class Fails(torch.nn.Module):
        def forward(self) -> None:
            raise ZeroDivisionError

    class Recovers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Fails()

        def forward(self) -> torch.Tensor:
            with contextlib.suppress(ZeroDivisionError):
                self.inner()
            return X + 1

    model = Recovers()
    assert list(census(model, model).by_module) == [""]
    with pytest.raises(ZeroDivisionError):
        census(model.inner)
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks
    assert not module._global_forward_hooks_always_called


def test_a_difference_by_figure_and_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.ReLU())
    other = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.Identity())
    more, less = census(lambda: model(X), model), census(lambda: other(X), other)
    figures = {"ops": 1, "leaf_ops": 1, "bytes_read": 96, "bytes_written": 96}
    assert more.figures_difference(less) == figures
    assert less.figures_difference(more) == {name: -value for name, value in figures.items()}
    assert more.module_difference(less) == {"1": figures}
    assert more.module_difference(more) == {}


@pytest.mark.parametrize("workload", [forward, decoder_step])
def test_shapes_alone_give_the_census_of_a_run(tiny: Any, workload: Callable[..., Workload]) -> None:
    stock = tiny.half()
    with shapes_only():
        shape = without_data(stock)
        without = census(workload(shape, batch()).prepare(), shape)
    found = census(workload(stock, batch()).prepare(), stock)
    assert without.flops_by_dtype == found.flops_by_dtype
    if RELEASE.startswith("4."):  # later ones keep a mask that masks nothing where they cannot look at it
        assert without == found


def test_shapes_alone_need_no_weights_and_touch_no_model() -> None:
    with torch.device("meta"):
        stock = t5(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    before = dict(stock.named_parameters())
    with shapes_only():
        shape = without_data(stock, torch.float16)
        assert len(list(shape.parameters())) == len(before)
        assert counted(decoder_step(shape, batch(5))).fp32_share == 0
    assert all(before[name] is each for name, each in stock.named_parameters())
    assert {each.dtype for each in before.values()} == {torch.float32}


def test_shapes_alone_answer_that_nothing_is_infinite() -> None:
    with shapes_only():
        x = torch.full((3,), float("inf"))
        assert not torch.isinf(x).any()
        assert census(lambda: 1 if torch.isinf(x).any() else 0).syncs == 1
    assert torch.isinf(torch.full((3,), float("inf"))).any()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch is built with CUDA")
def test_cuda_without_a_cuda_build_is_refused(tiny: Any) -> None:
    with pytest.raises(T5FastPatchError, match="needs a CUDA build of PyTorch"):
        fake_cuda_census(tiny, lambda model: lambda: None)


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is built without CUDA, so it has no CUDA kernels")
@pytest.mark.skipif(TORCH != "2.13", reason="PyTorch 2.4 asks for a GPU, and rms_norm is one kernel in later ones only")
def test_cuda_without_a_gpu_shows_its_own_kernels(tiny: Any) -> None:
    def normed(model: Any) -> Callable[[], object]:
        weight = model.shared.weight
        return lambda: F.rms_norm(weight, weight.shape[-1:], weight[0], 1e-6)

    found = fake_cuda_census(tiny, normed)
    assert found.leaf_by_op == {"_fused_rms_norm.default": 1}
    assert found.by_op == {"rms_norm": 1}
    assert tiny.shared.weight.device.type == "cpu"


def test_an_error_passes_through_and_leaves_no_mode_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        census(lambda: 1 // 0)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.overrides._is_torch_function_mode_enabled()
