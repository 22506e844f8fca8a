"""Under torch.compile: one graph with every patch, no more compilations than stock, stock's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
import zoo
from test_fast_path import FAST_PATH, patch
from torch._dynamo.testing import CompileCounter

import t5fastpatch
from t5fastpatch.measure.workloads import decoder_step, encoder_forward

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
# Stock of older releases does not compile to one graph with the torch that is tested.
pytestmark = pytest.mark.skipif(RELEASE < (4, 48), reason="stock itself breaks the graph in this release")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch_of(kind: zoo.Kind, length: int) -> dict[str, Any]:
    batch = kind.batch(torch.float16)
    if kind.inputs is zoo.text_inputs:
        batch |= {**zoo.text_inputs(length)}
    return batch


def compiled_calls(kind: zoo.Kind, patches: Any, what: Callable[..., Any], lengths: list[int]) -> tuple[int, list[Any]]:
    """How many graphs were made, and the results."""
    model, counter = kind.build().half(), CompileCounter()
    if patches:
        patch(model, patches)
    results = []
    torch._dynamo.reset()
    with torch.no_grad():
        calls = [what(model, batch_of(kind, length)) for length in lengths]
        calls[0].module.compile(backend=counter)
        for call in calls:
            results.append(call.prepare()()[0])
    return counter.frame_count, results


SWITCH = zoo.BY_NAME["switch"]


@pytest.mark.parametrize("what", [encoder_forward, decoder_step], ids=["encoder", "decoder step"])
@pytest.mark.parametrize("kind", [kind for kind in zoo.KINDS if kind is not SWITCH], ids=str)
def test_with_all_patches_each_call_is_one_graph(kind: zoo.Kind, what: Callable[..., Any]) -> None:
    graphs, (found,) = compiled_calls(kind, "all", what, [16])
    assert graphs == 1
    with torch.no_grad():
        model = kind.build().half()
        patch(model, "all")
        eager = what(model, batch_of(kind, 16)).prepare()()[0]
    # The compiler's own way takes the place of tables and merged masks.
    assert (found.float() - eager.float()).abs().max() <= 2e-2 * eager.float().abs().max()


@pytest.mark.parametrize("name", FAST_PATH)
@pytest.mark.parametrize("what", [encoder_forward, decoder_step], ids=["encoder", "decoder step"])
def test_with_each_patch_it_is_one_graph(name: str, what: Callable[..., Any]) -> None:
    assert compiled_calls(zoo.BY_NAME["t5-v1.1"], [name], what, [16])[0] == 1


@pytest.mark.parametrize("patches", [FAST_PATH, "all"], ids=["fast path", "all"])
@pytest.mark.parametrize("what", [encoder_forward, decoder_step], ids=["encoder", "decoder step"])
def test_changing_lengths_compile_no_more_often_than_stock(patches: Any, what: Callable[..., Any]) -> None:
    kind = zoo.BY_NAME["t5-v1.1"]
    stock, _ = compiled_calls(kind, None, what, [16, 24, 33, 150])
    patched, _ = compiled_calls(kind, patches, what, [16, 24, 33, 150])
    assert patched <= stock


@pytest.mark.parametrize("name", ["longt5-local", "longt5-global", "pix2struct"])
def test_what_breaks_stocks_graph_in_fp16_is_gone(name: str) -> None:
    what = decoder_step if name == "pix2struct" else encoder_forward
    stock, _ = compiled_calls(zoo.BY_NAME[name], None, what, [16])
    assert stock > 1
    assert compiled_calls(zoo.BY_NAME[name], "all", what, [16])[0] == 1


def test_a_proof_elsewhere_in_the_process_is_no_concern_of_a_compiled_switch() -> None:
    stock, _ = compiled_calls(SWITCH, None, encoder_forward, [16])
    proven = zoo.BY_NAME["t5"].build().half()
    assert t5fastpatch.apply(proven)["skip_inf_check"].state is t5fastpatch.State.ON
    again, _ = compiled_calls(SWITCH, None, encoder_forward, [16])
    patched, _ = compiled_calls(SWITCH, "all", encoder_forward, [16])
    assert again == stock
    assert patched <= stock
