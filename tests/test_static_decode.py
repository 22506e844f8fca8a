"""`static_decode`: upstream's tokens from a static cache and one compiled step, and upstream's way elsewhere.

No graph is captured on a CPU: a backend that counts what it is given stands in for the one that captures.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
import zoo

import t5fastpatch
from t5fastpatch import State
from t5fastpatch.patches import static_decode

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
SHALLOW = {"num_layers": 1, "num_decoder_layers": 1}
KINDS = [zoo.BY_NAME[name] for name in ("t5", "t5-v1.1", "mt5", "umt5")]

compiling = pytest.mark.skipif(VERSION < (4, 57), reason="generate compiles no decoder step of T5 in this release")


@pytest.fixture(autouse=True)
def no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def built(kind: zoo.Kind = zoo.BY_NAME["t5"], dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    model = kind.build(**more).to(dtype)
    model.generation_config.eos_token_id = None  # or a random model may stop at its first token
    return model


def patched(kind: zoo.Kind = zoo.BY_NAME["t5"], dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    model = built(kind, dtype, **more)
    t5fastpatch.apply(model, "static_decode")
    return model


class Counting:
    """A backend of torch.compile that runs eager's code and counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.config = compile_config(backend=self, fullgraph=True, mode=None)

    def __deepcopy__(self, memo: Any) -> Counting:
        return self

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return module.forward


def compile_config(**arguments: Any) -> Any:
    config = transformers.generation.configuration_utils.CompileConfig(**arguments)
    config._compile_all_devices = True
    return config


def tokens(model: Any, inputs: dict[str, Any], **arguments: Any) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.generate(**inputs, **arguments)
    return out if isinstance(out, torch.Tensor) else out.sequences


def logits(model: Any, inputs: dict[str, Any], **arguments: Any) -> torch.Tensor:
    """What each step gives; asked for like this, nothing of the step is handed out."""
    seen: list[torch.Tensor] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.clone())
        return scores

    tokens(model, inputs, logits_processor=[look], **arguments)
    return torch.stack(seen)


CALLS: dict[str, dict[str, Any]] = {
    "sampling": {"max_new_tokens": 8, "do_sample": True},
    "several samples": {"max_new_tokens": 5, "do_sample": True, "num_return_sequences": 2},
    "lengths": {"min_length": 7, "max_length": 9},
    "prefix": {"max_new_tokens": 5, "decoder_input_ids": zoo.ids(3, 7)},
    "one token": {"max_new_tokens": 1},
}


@compiling
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_tokens_are_upstreams_and_the_step_is_one_graph(kind: zoo.Kind) -> None:
    model, inputs, backend = patched(kind, **SHALLOW), kind.inputs(), Counting()
    expected = tokens(built(kind, **SHALLOW), inputs, max_new_tokens=8)
    for _ in range(2):
        assert torch.equal(tokens(model, inputs, max_new_tokens=8, compile_config=backend.config), expected)
    # UMT5's decoder of 5.17 is not causal, which a static cache would hide.
    assert backend.graphs == (not static_decode._lost_causality(model))


@compiling
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]], ids=str)
def test_the_tokens_are_upstreams_however_generate_is_called(kind: zoo.Kind) -> None:
    stock, model, inputs, backend = built(kind, **SHALLOW), patched(kind, **SHALLOW), kind.inputs(), Counting()
    for call, arguments in CALLS.items():
        expected = tokens(stock, inputs, **arguments)
        assert torch.equal(tokens(model, inputs, compile_config=backend.config, **arguments), expected), call


@compiling
def test_a_batch_of_one_and_a_given_encoder_output_change_nothing() -> None:
    stock, model = built(**SHALLOW), patched(**SHALLOW)
    one = {name: value[:1] for name, value in zoo.text_inputs().items()}
    with torch.no_grad():
        encoded = stock.encoder(**one)
    backend = Counting()
    for inputs in (one, {"encoder_outputs": encoded, "attention_mask": one["attention_mask"]}):
        expected = tokens(stock, copy.deepcopy(inputs), max_new_tokens=6)
        found = tokens(model, copy.deepcopy(inputs), max_new_tokens=6, compile_config=backend.config)
        assert torch.equal(found, expected)
    assert backend.graphs == 1


@compiling
def test_other_lengths_and_batches_cost_a_few_graphs_and_not_one_each() -> None:
    stock, model, backend = built(**SHALLOW), patched(**SHALLOW), Counting()
    for length, batch in ((16, 2), (12, 2), (9, 2), (20, 2), (31, 3), (7, 4), (16, 2)):
        inputs = {"input_ids": zoo.ids(length, length, batch), "attention_mask": torch.ones(batch, length).long()}
        expected = tokens(stock, inputs, max_new_tokens=6)
        assert torch.equal(tokens(model, inputs, max_new_tokens=6, compile_config=backend.config), expected)
    assert backend.graphs <= 4


@compiling
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_captured_step_has_the_bits_of_the_same_step_uncaptured(dtype: torch.dtype) -> None:
    """With what is taken on CUDA, capture aside."""
    if not static_decode._lite_options():
        pytest.skip("this PyTorch has no mode that keeps eager's kernels")
    model, inputs = patched(dtype=dtype, **SHALLOW), zoo.text_inputs()
    ours = static_decode.captured()
    ours._compile_all_devices = True
    uncaptured = logits(model, inputs, max_new_tokens=5, cache_implementation="static", disable_compile=True)
    assert torch.equal(logits(model, inputs, max_new_tokens=5, compile_config=ours), uncaptured)


@compiling
def test_a_static_cache_is_no_further_from_fp64_than_a_growing_one() -> None:
    inputs, found = zoo.text_inputs(), {"stock": [], "patched": []}
    for seed in range(2):
        stock, backend = built(seed=seed), Counting()
        model = copy.deepcopy(stock)
        t5fastpatch.apply(model, "static_decode")
        exact = logits(copy.deepcopy(stock).double(), inputs, max_new_tokens=6)
        found["stock"].append(logits(stock, inputs, max_new_tokens=6) - exact)
        found["patched"].append(logits(model, inputs, max_new_tokens=6, compile_config=backend.config) - exact)
    growing, fixed = (torch.stack(each).abs().quantile(0.9) for each in found.values())
    assert fixed <= 1.1 * growing


@compiling
def test_it_goes_with_the_other_patches() -> None:
    model, inputs = built(dtype=torch.float16), zoo.text_inputs()
    t5fastpatch.apply(model, "all")
    expected = tokens(model, inputs, max_new_tokens=6)
    t5fastpatch.apply(model, "static_decode")
    backend = Counting()
    assert torch.equal(tokens(model, inputs, max_new_tokens=6, compile_config=backend.config), expected)
    assert backend.graphs == 1


@compiling
def test_a_patch_that_comes_later_is_in_the_step() -> None:
    model, inputs, backend = patched(**SHALLOW), zoo.text_inputs(), Counting()
    tokens(model, inputs, max_new_tokens=4, compile_config=backend.config)
    t5fastpatch.apply(model, "layer_norm")
    found = logits(model, inputs, max_new_tokens=4, compile_config=backend.config)
    assert backend.graphs == 2
    eager = logits(model, inputs, max_new_tokens=4, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, eager)


@compiling
def test_a_call_in_inference_mode_does_not_spoil_the_next_one() -> None:
    model, inputs, backend = patched(**SHALLOW), zoo.text_inputs(), Counting()
    expected = tokens(built(**SHALLOW), inputs, max_new_tokens=4)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert torch.equal(tokens(model, inputs, max_new_tokens=4, compile_config=backend.config), expected)
    assert backend.graphs == 2


# Upstream's way


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "beams": ("greedy search and sampling only", {"num_beams": 2}),
    "a result with more than tokens": ("gets the cache", {"return_dict_in_generate": True, "output_scores": True}),
    "no cache": ("wants no cache", {"use_cache": False}),
    "another cache": ("chose a cache", {"cache_implementation": "static"}),
    "no compiling": ("forbids compiling", {"disable_compile": True}),
}


@contextlib.contextmanager
def reasons(caplog: Any) -> Iterator[list[str]]:
    found: list[str] = []
    with caplog.at_level(logging.DEBUG, logger=static_decode.__name__):
        yield found
    found += [record.getMessage() for record in caplog.records if record.name == static_decode.__name__]


@compiling
@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_forbid_it_go_upstreams_way(case: str, caplog: Any) -> None:
    why, arguments = REFUSED[case]
    inputs, backend = zoo.text_inputs(), Counting()
    expected = tokens(built(), inputs, max_new_tokens=5, **arguments)
    with reasons(caplog) as said:
        found = tokens(patched(), inputs, max_new_tokens=5, compile_config=backend.config, **arguments)
    assert torch.equal(found, expected)
    assert [each for each in said if why in each]
    assert backend.graphs == (case == "another cache")  # which is the caller's, and upstream compiles it


@compiling
def test_assisted_generation_goes_upstreams_way() -> None:
    inputs = {name: value[:1] for name, value in zoo.text_inputs().items()}
    assistant, backend = built(seed=1), Counting()
    expected = tokens(built(), inputs, max_new_tokens=6, assistant_model=assistant)
    found = tokens(patched(), inputs, max_new_tokens=6, assistant_model=assistant, compile_config=backend.config)
    assert torch.equal(found, expected)
    assert backend.graphs == 0


@compiling
def test_a_cache_of_the_callers_is_taken() -> None:
    model, inputs, backend = patched(**SHALLOW), zoo.text_inputs(), Counting()
    config = model.config
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(config=config), transformers.DynamicCache(config=config)
    )
    name = "cache" if VERSION >= (5, 20) else "past_key_values"
    found = tokens(model, inputs, max_new_tokens=5, compile_config=backend.config, **{name: cache})
    assert torch.equal(found, tokens(built(**SHALLOW), inputs, max_new_tokens=5))
    assert cache.get_seq_length() == 5
    assert backend.graphs == 0


@compiling
def test_a_model_in_training_mode_goes_upstreams_way(caplog: Any) -> None:
    backend, inputs = Counting(), zoo.text_inputs()
    with reasons(caplog) as said:
        found = tokens(patched().train(), inputs, max_new_tokens=5, compile_config=backend.config)
    assert torch.equal(found, tokens(built().train(), inputs, max_new_tokens=5))
    assert said == ["static_decode takes upstream's way: the model is in training mode"]


@compiling
def test_on_a_cpu_generate_goes_upstreams_way(caplog: Any) -> None:
    model, inputs = patched(), zoo.text_inputs()
    with reasons(caplog) as said:
        found = logits(model, inputs, max_new_tokens=5)
    assert torch.equal(found, logits(built(), inputs, max_new_tokens=5))
    assert said == ["static_decode takes upstream's way: the model is on cpu, which captures nothing"]
    assert not set(static_decode._KEPT) & set(vars(model))


@pytest.mark.parametrize("kind", zoo.KINDS, ids=str)
def test_where_upstream_does_not_compile_the_step_the_report_says_so(kind: zoo.Kind) -> None:
    model = kind.build()
    row = t5fastpatch.status(model)["static_decode"]
    if VERSION >= (4, 57) and kind in KINDS and static_decode._lite_options():
        assert row.state is State.UNSAFE
        assert "by its name alone" in row.why
    else:
        assert row.state is State.ABSENT
        assert row.why
        with pytest.raises(t5fastpatch.NothingToPatchError, match=row.why.split("(")[0]):
            t5fastpatch.apply(model, "static_decode")


@compiling
def test_no_preset_puts_it_on() -> None:
    model = built()
    t5fastpatch.apply(model, "all")
    assert type(model) is transformers.T5ForConditionalGeneration


# What is left of it


@compiling
def test_configurations_stay_as_they_are(tmp_path: Any) -> None:
    model, inputs, backend = patched(**SHALLOW), zoo.text_inputs(), Counting()
    given = transformers.GenerationConfig(max_new_tokens=5, decoder_start_token_id=0, pad_token_id=0)
    given.compile_config = backend.config
    before = model.generation_config.to_json_string(), model.config.to_json_string(), copy.deepcopy(vars(given))
    tokens(model, inputs, generation_config=given)
    assert backend.graphs == 1
    assert before == (model.generation_config.to_json_string(), model.config.to_json_string(), vars(given))
    model.save_pretrained(tmp_path)
    assert "static" not in (tmp_path / "generation_config.json").read_text()


@compiling
def test_removing_leaves_nothing_behind() -> None:
    model, inputs, backend = built(**SHALLOW), zoo.text_inputs(), Counting()
    before = set(vars(model))
    t5fastpatch.apply(model, "static_decode")
    tokens(model, inputs, max_new_tokens=5, compile_config=backend.config)
    assert "_compiled_call" in vars(model)
    t5fastpatch.remove(model)
    assert set(vars(model)) == before
    assert type(model) is transformers.T5ForConditionalGeneration


@compiling
def test_a_copy_decodes_with_its_own_weights() -> None:
    model, inputs, backend = patched(**SHALLOW), zoo.text_inputs(), Counting()
    tokens(model, inputs, max_new_tokens=5, compile_config=backend.config)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.neg_()
    expected = logits(other, inputs, max_new_tokens=5, cache_implementation="static", disable_compile=True)
    found = logits(other, inputs, max_new_tokens=5, compile_config=backend.config)
    assert torch.equal(found, expected)


@compiling
def test_a_model_that_has_decoded_pickles_as_upstreams() -> None:
    model, inputs, backend = patched(**SHALLOW), zoo.text_inputs(), Counting()
    expected = tokens(model, inputs, max_new_tokens=5, compile_config=backend.config)
    loaded = pickle.load(io.BytesIO(pickle.dumps(model)))
    assert type(loaded) is transformers.T5ForConditionalGeneration
    assert not set(static_decode._KEPT) & set(vars(loaded))
    assert torch.equal(tokens(loaded, inputs, max_new_tokens=5), expected)


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import test_static_decode as here, torch, zoo, t5fastpatch
backend, inputs, model = here.Counting(), zoo.text_inputs(), here.built()
found = here.tokens(model, inputs, max_new_tokens=5, compile_config=backend.config)
assert backend.graphs == 1
t5fastpatch.apply(model, "static_decode")
assert torch.equal(found, here.tokens(model, inputs, max_new_tokens=5, compile_config=backend.config))
assert torch.equal(found, here.tokens(model, inputs, max_new_tokens=5))
"""


@compiling
def test_it_may_be_on_for_the_process() -> None:
    script = SCRIPT.format(tests=os.path.dirname(__file__))
    environment = {**os.environ, "T5FASTPATCH": "static_decode", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
