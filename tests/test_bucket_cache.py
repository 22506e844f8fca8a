"""`bucket_cache`: the buckets of relative positions looked up in a table, bit for bit upstream's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import zoo

import t5fastpatch
from t5fastpatch.families import role_of
from t5fastpatch.measure.census import census
from t5fastpatch.patch import Role
from t5fastpatch.patches import bucket_cache
from t5fastpatch.patches.bucket_cache import position_bias

every_kind = pytest.mark.parametrize("kind", zoo.KINDS, ids=str)


def with_table(model: Any) -> list[Any]:
    """The attention modules that have a relative attention bias of queries and keys."""
    modules = [each for each in model.modules() if role_of(type(each)) is Role.ATTENTION]
    modules = [each for each in modules if getattr(each, "has_relative_attention_bias", False)]
    return [each for each in modules if "key_length" in inspect.signature(each.compute_bias).parameters]


def positions(attention: Any, start: int, length: int) -> dict[str, Any]:
    """How this release says where the queries stand."""
    known = inspect.signature(attention.compute_bias).parameters
    if "past_seen_tokens" in known:
        return {"past_seen_tokens": start}
    return {"cache_position": torch.arange(start, start + length)} if "cache_position" in known else {}


@every_kind
def test_every_bias_is_upstreams_at_any_length(kind: zoo.Kind) -> None:
    attentions = with_table(kind.build())
    assert attentions
    for attention in attentions:
        # Lengths grow and shrink, far beyond the largest distance that has a bucket of its own.
        for query_length, key_length, start in ((5, 5, 0), (1, 1, 0), (1, 700, 699), (3, 20, 4), (40, 900, 860)):
            where = positions(attention, start, query_length)
            stock = attention.compute_bias(query_length, key_length, **where)
            found = position_bias(attention, query_length, key_length, **where)
            assert torch.equal(stock, found)
        with torch.no_grad():
            for start in (0, 3, 300, 299, 5000, 7):
                where = positions(attention, start, 1)
                for key_length in (start + 1, start + 9):
                    stock = attention.compute_bias(1, key_length, **where)
                    assert torch.equal(stock, position_bias(attention, 1, key_length, **where))
    assert len(bucket_cache._known) < 20


def test_the_gradient_of_the_embeddings_is_upstreams() -> None:
    for attention in with_table(zoo.BY_NAME["t5"].build()):
        weight, found = attention.relative_attention_bias.weight, []
        for bias in (attention.compute_bias(9, 200), position_bias(attention, 9, 200)):
            found += torch.autograd.grad((bias * torch.linspace(-1, 1, bias.numel()).view_as(bias)).sum(), weight)
        assert torch.equal(*found)


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (32, 17), (8, 20), (32, 8), (64, 16), (2, 3)])
def test_buckets_and_distances_of_any_configuration(buckets: int, distance: int) -> None:
    """Where the distances do not reach beyond the exact buckets there is no table, and upstream's way is taken."""
    more = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": distance}
    for attention in with_table(zoo.BY_NAME["t5"].build(**more)):
        try:
            stock = attention.compute_bias(30, 300)
        except (IndexError, RuntimeError, ValueError, ZeroDivisionError) as error:
            with pytest.raises(type(error)):
                position_bias(attention, 30, 300)
            continue
        assert torch.equal(stock, position_bias(attention, 30, 300))


def test_a_decoder_step_spends_a_handful_of_ops_on_its_bias() -> None:
    model = zoo.BY_NAME["t5"].build()
    decoder = with_table(model)[-1]
    where = positions(decoder, 20, 1)
    with torch.no_grad():
        position_bias(decoder, 1, 21, **where)
        stock = census(lambda: decoder.compute_bias(1, 21, **where))
        found = census(lambda: position_bias(decoder, 1, 21, **where))
    assert found.ops == (6 if "cache_position" in where else 1)
    assert found.syncs == 0
    assert stock.ops - found.ops >= 9


def test_a_length_that_is_on_the_device_is_not_asked_for() -> None:
    """Releases 4.48 to 4.57 give the number of queries as a tensor, beside their positions, and do not use it."""
    model = zoo.BY_NAME["t5"].build()
    decoder = with_table(model)[-1]
    where = positions(decoder, 20, 1)
    if "cache_position" not in where:
        pytest.skip("this release has no cache_position")
    with torch.no_grad():
        assert census(lambda: position_bias(decoder, torch.tensor(21), 21, **where)).syncs == 0


def test_a_table_made_in_inference_mode_serves_training() -> None:
    bucket_cache._known.clear()
    model, batch = zoo.BY_NAME["t5"].build(), zoo.BY_NAME["t5"].batch()
    t5fastpatch.apply(model, "bucket_cache")
    with torch.inference_mode():
        model(**batch)
    model(**batch).loss.backward()
    assert model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.abs().sum() > 0


def test_hooks_of_the_embeddings_still_run() -> None:
    model, batch, seen = zoo.BY_NAME["t5"].build(), zoo.BY_NAME["t5"].batch(), []
    t5fastpatch.apply(model, "bucket_cache")
    embedding = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    embedding.register_forward_hook(lambda module, args, output: seen.append(output))
    model(**batch)
    with torch.no_grad():
        model(**batch)
    assert len(seen) == 2


def test_other_buckets_than_t5s_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.BY_NAME["t5"].build()
    cls = type(with_table(model)[0])
    compute = cls.compute_bias
    monkeypatch.setattr(cls, "compute_bias", lambda self, *args, **kwargs: compute(self, *args, **kwargs).flip(-1))
    with pytest.raises(t5fastpatch.T5FastPatchError, match="does not give T5's buckets"):
        bucket_cache._check_buckets(cls)


@pytest.mark.parametrize("where", ["a subclass", "a module"])
@pytest.mark.parametrize("method", ["compute_bias", "_relative_position_bucket"])
def test_a_method_of_somebodys_own_is_called(where: str, method: str) -> None:
    model, batch = zoo.BY_NAME["t5"].build(), zoo.BY_NAME["t5"].batch()
    with t5fastpatch.patched(model, "bucket_cache"), torch.no_grad():
        upstream = model(**batch).logits  # by the table of T5's buckets
    for attention in with_table(model):
        compute = attention.compute_bias
        own = {
            "compute_bias": lambda *args, compute=compute, **where: 3 * compute(*args[-2:], **where),
            "_relative_position_bucket": staticmethod(lambda positions, **_: positions.abs() % 7),
        }[method]
        if where == "a subclass":
            attention.__class__ = type("Own", (type(attention),), {method: own})
        else:
            setattr(attention, method, getattr(own, "__func__", own))
    with torch.no_grad():
        stock = model(**batch).logits
        t5fastpatch.apply(model, "bucket_cache")
        assert torch.equal(model(**batch).logits, stock)
    assert not torch.equal(stock, upstream)
