from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from t5fastpatch import T5FastPatchError
from t5fastpatch.measure.census import Census, census
from t5fastpatch.measure.workloads import Workload, decoder_step, workloads_for

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
    for workload in workloads_for(tiny.half(), batch(), 4):
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


def test_an_encoder_alone_has_only_a_forward() -> None:
    config = transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    workloads = workloads_for(transformers.T5EncoderModel(config).eval(), batch(), 4)
    assert [workload.name for workload in workloads] == ["forward"]
    assert counted(workloads[0]).ops > 0


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
    @torch.library.custom_op("t5fastpatch_test::hidden", mutates_args=())
    def hidden(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * 2

    found = census(lambda: hidden(torch.ones(2)))
    assert found.by_op == {"ones.default": 1, "add.Tensor": 1, "mul.Tensor": 1}


def test_an_operation_of_a_library_that_calls_nothing_is_one() -> None:
    @torch.library.custom_op("t5fastpatch_test::opaque", mutates_args=("x",))
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
    assert figures == {
        "ops": 2,
        "leaf_ops": 2,
        "casts": 1,
        "syncs": 0,
        "host_scalars": 0,
        "by_op": {"ones.default": 1, "_to_copy.default": 1},
        "leaf_by_op": {"ones.default": 1, "_to_copy.default": 1},
    }


def test_an_error_passes_through_and_leaves_no_mode_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        census(lambda: 1 // 0)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.overrides._is_torch_function_mode_enabled()
