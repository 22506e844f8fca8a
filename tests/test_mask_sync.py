"""`mask_sync`: one question a padding mask, stock's bits at every step, and nothing kept longer than the mask."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import inspect
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
import zoo
from test_contracts import DTYPES, every_dtype, every_kind, gradients, same
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.t5 import modeling_t5

import t5fastpatch
from t5fastpatch import State, UnexpectedSourceError
from t5fastpatch.families import role_of
from t5fastpatch.measure.census import census
from t5fastpatch.measure.workloads import decoder_step
from t5fastpatch.patch import Role
from t5fastpatch.patches import mask_sync
from t5fastpatch.rewrite import Method

T5 = zoo.BY_NAME["t5"]
MASK_FILES = ("masking_utils.py", "mask_sync.py")
PADDINGS = ("none", "right", "left", "row", "first")

where_t5_has_it = pytest.mark.skipif(
    not hasattr(modeling_t5, "create_bidirectional_mask"), reason="T5 of this release builds its masks without asking"
)
# Of what a decoder has seen, of its queries now, and of its mask.
LENGTHS = [(0, 4, 4), (3, 1, 4), (3, 2, 5), (0, 4, 8), (0, 1, 8), (3, 1, 8), (7, 1, 8), (2, 1, 2), (0, 4, 2)]
every_padding = pytest.mark.parametrize("padding", PADDINGS)


def padded(padding: str, length: int = 16, dtype: torch.dtype = torch.long) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=dtype)
    places = {"right": slice(length // 2, None), "left": slice(None, length // 2), "row": slice(None), "first": 0}
    if padding in places:
        mask[1, places[padding]] = 0
    return mask


def patched(model: Any) -> Any:
    model = copy.deepcopy(model)
    report = t5fastpatch.apply(model, "mask_sync")
    if report["mask_sync"].state is State.UPSTREAM:
        pytest.skip("already upstream")
    return model


def questions(call: Any) -> int:
    """How often the host waits for what is in a mask."""
    return sum(count for site, count in census(call).sync_sites.items() if site.startswith(MASK_FILES))


@pytest.fixture
def stock() -> Any:
    return T5.build()


@pytest.fixture
def model(stock: Any) -> Any:
    return patched(stock)


def stacks(model: Any) -> list[Any]:
    return [module for module in model.modules() if role_of(type(module)) is Role.STACK]


@every_kind
def test_it_applies_where_a_stack_calls_a_mask_function_and_nowhere_else(kind: zoo.Kind) -> None:
    model = kind.build()
    sources = [inspect.getsource(inspect.unwrap(type(stack).forward)) for stack in stacks(model)]
    functions = "create_bidirectional_mask(", "self.invert_attention_mask("
    calls = any(function in source for source in sources for function in functions)
    assert t5fastpatch.status(model)["mask_sync"].state is (State.APPLIES if calls else State.UPSTREAM)


@every_kind
@every_dtype
def test_each_result_and_gradient_is_stocks_from_memory_too(kind: zoo.Kind, dtype: torch.dtype) -> None:
    kind.check_dtype(dtype)
    stock = kind.build().to(dtype)
    model = patched(stock)
    batch = kind.batch(dtype)
    clean = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    bare = {name: value for name, value in batch.items() if name != "attention_mask"}
    with torch.no_grad():
        for inputs in (batch, batch, clean, clean, bare):
            assert same(stock(**inputs, output_hidden_states=True), model(**inputs, output_hidden_states=True))
    if dtype == torch.float32:
        for inputs in (batch, clean):
            assert same(gradients(stock.train(), inputs), gradients(model.train(), inputs))


@every_kind
def test_a_decoder_step_asks_nothing_and_does_less(kind: zoo.Kind) -> None:
    stock = kind.build()
    model = patched(stock)
    batch = kind.batch()
    for inputs in (batch, {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}):
        before, after = (census(decoder_step(each, inputs).prepare()) for each in (stock, model))
        assert before.ops > after.ops
        asks = any(site.startswith(MASK_FILES) for site in before.sync_sites)
        assert before.syncs > after.syncs if asks else before.syncs == after.syncs
        assert not [site for site in after.sync_sites if site.startswith(MASK_FILES)]


@pytest.mark.skipif(hasattr(modeling_t5, "create_bidirectional_mask"), reason="this release does not invert masks")
def test_an_inverted_mask_follows_its_mask_and_the_model(stock: Any, model: Any) -> None:
    decoder, mask = model.decoder, padded("right")
    first = decoder.t5fastpatch_inverted_mask(mask)
    assert decoder.t5fastpatch_inverted_mask(mask) is first
    assert same(first, stock.decoder.invert_attention_mask(mask))
    mask[0, -1] = 0
    changed = decoder.t5fastpatch_inverted_mask(mask)
    assert not torch.equal(first, changed)
    assert same(changed, stock.decoder.invert_attention_mask(mask))
    half = model.half().decoder.t5fastpatch_inverted_mask(mask)
    assert same(half, stock.half().decoder.invert_attention_mask(mask))
    three = mask[:, None, :].expand(2, 5, 16)
    assert same(decoder.t5fastpatch_inverted_mask(three), stock.decoder.invert_attention_mask(three))
    changed = half.clone()
    half.zero_()
    assert torch.equal(decoder.t5fastpatch_inverted_mask(mask), changed)


@where_t5_has_it
@every_padding
def test_the_whole_model_asks_once_a_mask(stock: Any, model: Any, padding: str) -> None:
    inputs = {"input_ids": zoo.ids(16, 1), "attention_mask": padded(padding), "labels": zoo.ids(6, 3)}
    counts = [questions(lambda: model(**inputs)) for _ in range(3)]
    assert questions(lambda: stock(**inputs)) == 2
    # A float mask is kept for a row of each dtype, and the encoder's states have the decoder's here.
    assert counts == [1, 0, 0]


@where_t5_has_it
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"cache_implementation": "static", "disable_compile": True},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_generation_asks_once_and_gives_stocks_tokens(
    stock: Any, model: Any, padding: str, options: dict[str, Any]
) -> None:
    many = {"input_ids": zoo.ids(16, 1), "attention_mask": padded(padding)}
    inputs = {name: value[1:] for name, value in many.items()} if "prompt_lookup_num_tokens" in options else many
    made = []

    def generate(each: Any) -> None:
        made.append(each.generate(**inputs, **options, max_new_tokens=4, min_new_tokens=4, do_sample=False))

    asked, before = questions(lambda: generate(model)), questions(lambda: generate(stock))
    assert torch.equal(*made)
    assert asked <= 2 < before  # beams have a mask of their own


@where_t5_has_it
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@every_padding
def test_a_bidirectional_mask_is_stocks_in_bits_shape_and_strides(stock: Any, attention: str, padding: str) -> None:
    create = modeling_t5.create_bidirectional_mask
    config = copy.deepcopy(stock.config)
    config._attn_implementation = attention
    for mask_dtype in (torch.long, torch.bool, torch.float32):
        mask = padded(padding, 16, mask_dtype)
        for dtype in DTYPES:
            states = torch.zeros(2, 16, 32, dtype=dtype)
            for queries in (1, 3, 1, 16, 0):
                embeds = torch.zeros(2, queries, 32, dtype=dtype)
                for extra in ({"encoder_hidden_states": states}, {}):
                    arguments = {**embedded(create, embeds), "config": config, "attention_mask": mask, **extra}
                    assert alike(create(**arguments), mask_sync.bidirectional_mask(create)(**arguments))


def embedded(create: Any, embeds: torch.Tensor) -> dict[str, torch.Tensor]:
    names = inspect.signature(create).parameters
    return {"inputs_embeds" if "inputs_embeds" in names else "input_embeds": embeds}


def alike(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    layout = [(each.dtype, each.shape, each.stride()) for each in (one, other)]
    return layout[0] == layout[1] and torch.equal(one, other)


@where_t5_has_it
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@every_padding
def test_a_causal_mask_is_stocks_at_every_length(stock: Any, attention: str, padding: str) -> None:
    create = modeling_t5.create_causal_mask
    config = copy.deepcopy(stock.config)
    config._attn_implementation = attention
    for seen, queries, length in [
        (0, 4, 4),
        (3, 1, 4),
        (3, 2, 5),
        (0, 4, 8),
        (0, 1, 8),
        (3, 1, 8),
        (7, 1, 8),
        (2, 1, 2),
    ]:
        for cache in (dynamic_cache(seen), None, static_cache(config, seen)):
            if cache is None and seen:
                continue
            mask = padded(padding, length)
            positions = {"cache_position": torch.arange(seen, seen + queries)}
            names = inspect.signature(create).parameters
            arguments = {
                **embedded(create, torch.zeros(2, queries, 32)),
                **({"cache": cache} if "cache" in names else {"past_key_values": cache}),
                **(positions if "cache_position" in names else {}),
                **{"config": config, "attention_mask": mask},
            }
            outcomes = []
            for function in (create, mask_sync.causal_mask(create), mask_sync.causal_mask(create)):
                try:
                    outcomes.append(function(**arguments))
                except (RuntimeError, IndexError) as error:
                    outcomes.append(type(error))
            assert all(
                found is outcomes[0] if isinstance(outcomes[0], type) else alike(outcomes[0], found)
                for found in outcomes
            )


def dynamic_cache(seen: int) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    if seen:
        cache.update(torch.zeros(2, 4, seen, 8), torch.zeros(2, 4, seen, 8), 0)
    return cache


def static_cache(config: Any, seen: int) -> Any:
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=8)
    if seen:
        keys = torch.zeros(2, 4, seen, 8)
        cache.update(keys, keys, 0, {"cache_position": torch.arange(seen)})
    return cache


@where_t5_has_it
@every_padding
def test_a_decoders_mask_is_asked_about_at_most_once(stock: Any, model: Any, padding: str) -> None:
    inputs = {"input_ids": zoo.ids(16, 1), "decoder_input_ids": zoo.ids(6, 3)}
    inputs["decoder_attention_mask"] = padded(padding, 6)
    counts = [questions(lambda: model(**inputs)) for _ in range(2)]
    asks = questions(lambda: stock(**inputs)) > 0  # SDPA only
    assert counts == [int(asks), 0]
    with torch.no_grad():
        assert same(stock(**inputs), model(**inputs))


def test_the_ones_that_a_stack_makes_are_not_asked_about() -> None:
    model = patched(zoo.BY_NAME["pop2piano"].build())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert questions(lambda: model.encoder(input_ids=zoo.ids(16, 1))) == 0


@where_t5_has_it
def test_a_mask_that_is_changed_in_place_is_looked_into_again(stock: Any, model: Any) -> None:
    inputs = {"input_ids": zoo.ids(16, 1), "attention_mask": padded("none"), "labels": zoo.ids(6, 3)}
    mask = inputs["attention_mask"]

    def pad(length: int) -> None:
        mask[0, length:] = 0

    def pad_in_inference_mode() -> None:
        with torch.inference_mode():
            mask[1, 9:] = 0

    def exchange() -> None:
        mask.data = padded("left")

    for change in (lambda: None, lambda: pad(12), lambda: pad(5), mask.fill_, pad_in_inference_mode, exchange):
        change(1) if change == mask.fill_ else change()
        assert questions(lambda: model(**inputs)) == 1
        with torch.no_grad():
            assert same(stock(**inputs), model(**inputs))


@where_t5_has_it
def test_a_row_that_someone_changes_is_built_again(stock: Any, model: Any) -> None:
    def change(module: Any, arguments: tuple[Any, ...]) -> None:
        arguments[4].zero_()

    inputs = {"input_ids": zoo.ids(16, 1), "attention_mask": padded("right"), "decoder_input_ids": zoo.ids(1, 3)}
    with torch.no_grad():
        for each in (model, model):
            handle = each.decoder.block[-1].register_forward_pre_hook(change)
            each(**inputs)
            handle.remove()
            assert same(stock(**inputs), each(**inputs))


@where_t5_has_it
def test_a_mask_that_tells_no_versions_is_looked_into_each_time(stock: Any, model: Any) -> None:
    with torch.inference_mode():
        inputs = {"input_ids": zoo.ids(16, 1), "attention_mask": padded("none"), "labels": zoo.ids(6, 3)}
        for length in (16, 12, 5):
            inputs["attention_mask"][:, length:] = 0
            assert same(stock(**inputs), model(**inputs))
        assert inputs["attention_mask"] not in mask_sync._paddings


@where_t5_has_it
def test_what_inference_mode_made_is_not_used_in_training(stock: Any, model: Any) -> None:
    inputs = {"input_ids": zoo.ids(16, 1), "attention_mask": padded("right"), "labels": zoo.ids(6, 3)}
    with torch.inference_mode():
        assert same(stock(**inputs), model(**inputs))
        assert questions(lambda: model(**inputs)) == 0
    assert same(gradients(stock.train(), inputs), gradients(model.train(), inputs))


@where_t5_has_it
def test_what_is_kept_goes_with_the_mask(model: Any) -> None:
    mask = padded("right")
    with torch.no_grad():
        model(input_ids=zoo.ids(16, 1), attention_mask=mask, labels=zoo.ids(6, 3))
    rows = [weakref.ref(row) for row, _ in mask_sync._paddings[mask].rows.values()]
    alive = weakref.ref(mask)
    del mask
    assert rows
    assert alive() is None
    assert all(row() is None for row in rows)


@where_t5_has_it
def test_a_few_rows_are_kept_however_many_uses_a_mask_has(stock: Any) -> None:
    create = modeling_t5.create_bidirectional_mask
    mask = padded("right")
    for batch in (1, 2):
        for dtype in (*DTYPES, torch.float64):
            arguments = {**embedded(create, torch.zeros(batch, 512, 32, dtype=dtype)), "config": stock.config}
            mask_sync.bidirectional_mask(create)(**arguments, attention_mask=mask)
    rows = [row for row, _ in mask_sync._paddings[mask].rows.values()]
    assert len(rows) == mask_sync._KEPT
    assert all(row.untyped_storage().nbytes() <= mask.numel() * 8 for row in rows)


@where_t5_has_it
def test_one_mask_serves_several_batches_and_attentions(stock: Any) -> None:
    create = modeling_t5.create_bidirectional_mask
    mask = padded("right")
    for attention in ("eager", "sdpa"):
        config = copy.deepcopy(stock.config)
        config._attn_implementation = attention
        for batch in (1, 2):
            arguments = {**embedded(create, torch.zeros(batch, 3, 32)), "config": config, "attention_mask": mask}
            assert alike(create(**arguments), mask_sync.bidirectional_mask(create)(**arguments))


@where_t5_has_it
def test_models_in_several_threads_share_a_mask(stock: Any) -> None:
    stocks = {dtype: copy.deepcopy(stock).to(dtype) for dtype in DTYPES}
    models = [patched(each) for each in stocks.values()]
    inputs = {"input_ids": zoo.ids(16, 1), "labels": zoo.ids(6, 3)}
    masks = [padded("right"), padded("none")]
    with torch.no_grad():
        expected = {
            (dtype, index): each(**inputs, attention_mask=mask).logits
            for dtype, each in stocks.items()
            for index, mask in enumerate(masks)
        }
    wrong = []

    @torch.no_grad()
    def run(number: int) -> None:
        model, index = models[number % 3], number % 2
        for _ in range(4):
            logits = model(**inputs, attention_mask=masks[index]).logits
            if not torch.equal(logits, expected[DTYPES[number % 3], index]):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@where_t5_has_it
def test_compiled_it_is_as_many_graphs_as_stock_and_remembers_nothing() -> None:
    from torch._dynamo.testing import CompileCounter

    stock = T5.build(num_layers=1)
    masks = [padded("right", length) for length in (16, 12, 9)]
    graphs = []
    for each in (stock, patched(stock)):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(each.encoder, backend=counter, fullgraph=True)
        with torch.no_grad():
            for mask in masks:
                compiled(input_ids=zoo.ids(mask.shape[1], 1), attention_mask=mask)
        graphs.append(counter.frame_count)
    torch._dynamo.reset()
    assert graphs[0] == graphs[1]
    assert not any(mask in mask_sync._paddings for mask in masks)


@where_t5_has_it
def test_while_a_graph_is_traced_upstreams_way_is_taken(stock: Any) -> None:
    create = modeling_t5.create_bidirectional_mask
    known = padded("none")

    def build() -> Any:
        arguments = {**embedded(create, torch.zeros(2, 3, 32)), "config": stock.config, "attention_mask": known}
        return mask_sync.bidirectional_mask(create)(**arguments)

    assert build() is None
    built = []
    torch.jit.trace(lambda tensor: built.append(build()) or tensor + 1, (torch.ones(1),), check_trace=False)
    assert built[0] is not None


@where_t5_has_it
def test_tensors_without_data_are_upstreams_affair(stock: Any, model: Any) -> None:
    inputs = {"input_ids": zoo.ids(16, 1), "attention_mask": padded("right"), "labels": zoo.ids(6, 3)}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(value) for name, value in inputs.items()}
        assert model(**fake).logits.shape == (2, 6, zoo.VOCABULARY)
        model(**inputs)
    with torch.no_grad():
        assert same(stock(**inputs), model(**inputs))
    meta = {name: value.to("meta") for name, value in inputs.items()}
    assert mask_sync.known(meta["attention_mask"]) is None


@where_t5_has_it
def test_a_transform_of_functions_leaves_nothing_of_itself_behind(stock: Any, model: Any) -> None:
    inputs = {"input_ids": zoo.ids(16, 1), "attention_mask": padded("right"), "labels": zoo.ids(6, 3)}

    def loss(parameters: Any, mask: torch.Tensor) -> torch.Tensor:
        arguments = {**inputs, "attention_mask": mask}
        return torch.func.functional_call(model, parameters, kwargs=arguments).loss

    parameters = {name: value.detach() for name, value in model.named_parameters()}
    found = torch.func.grad(loss)(parameters, inputs["attention_mask"])
    torch.func.grad(lambda each: loss(each, inputs["attention_mask"]))(parameters)
    assert same([found[name] for name, _ in stock.named_parameters()], gradients(stock, inputs))
    assert same(gradients(stock, inputs), gradients(model, inputs))


@where_t5_has_it
def test_a_mask_function_of_someone_elses_is_called_each_time(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    calls = []
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda **given: calls.append(given))
    config = copy.deepcopy(stock.config)
    config._attn_implementation = "sdpa"
    create = modeling_t5.create_bidirectional_mask
    arguments = {**embedded(create, torch.zeros(2, 3, 32)), "config": config, "attention_mask": padded("right")}
    for _ in range(2):
        mask_sync.bidirectional_mask(create)(**arguments)
    assert [given["attention_mask"].shape for given in calls] == [(2, 16)] * 2


@where_t5_has_it
def test_finished_masks_pass_through(stock: Any, model: Any) -> None:
    mask = torch.zeros(2, 1, 16, 16).masked_fill(padded("right")[:, None, None, :] == 0, torch.finfo().min)
    inputs = {"input_ids": zoo.ids(16, 1), "attention_mask": mask}
    with torch.no_grad():
        assert same(stock.encoder(**inputs), model.encoder(**inputs))


@where_t5_has_it
@pytest.mark.parametrize("arguments", ["self.config, ", "or_mask_function=any, "], ids=["positional", "unknown"])
def test_a_call_with_other_arguments_is_refused(arguments: str) -> None:
    method = Method.of(modeling_t5.T5Stack)
    source = ast.unparse(method.tree).replace("create_causal_mask(", "create_causal_mask(" + arguments)
    (tree,) = ast.parse(source).body
    with pytest.raises(UnexpectedSourceError, match="create_causal_mask is called with"):
        mask_sync.edits(dataclasses.replace(method, tree=tree))


@where_t5_has_it
def test_copies_keep_it_pickles_do_not_and_removing_leaves_stock(stock: Any, model: Any) -> None:
    inputs = {"input_ids": zoo.ids(16, 1), "attention_mask": padded("right"), "labels": zoo.ids(6, 3)}
    duplicate, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    t5fastpatch.remove(model)
    for each, count in ((duplicate, 0), (loaded, 2), (model, 2)):
        with torch.no_grad():
            assert same(stock(**inputs), each(**inputs))
        assert questions(functools.partial(each, **inputs)) == count
    assert type(model.encoder) is type(stock.encoder)
