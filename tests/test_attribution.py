from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5fastpatch.measure.attribution import Coalition, Share, attribution, coalitions, orders_for, shapley

PLAYERS = ("a", "b", "c", "d", "e")
Game = Callable[[Coalition], Any]


def values(game: Game, players: tuple[str, ...], seed: int = 0) -> dict[str, Any]:
    orders = orders_for(players, seed)
    return shapley({each: game(each) for each in coalitions(orders)}, orders)


def by_definition(game: Game, players: tuple[str, ...]) -> dict[str, Fraction]:
    """Shapley's own formula, a weighted sum over the sets without the player."""
    found = {}
    for player in players:
        others = [each for each in players if each != player]
        total = Fraction(0)
        for size in range(len(players)):
            weight = Fraction(math.factorial(size) * math.factorial(len(others) - size), math.factorial(len(players)))
            for chosen in itertools.combinations(others, size):
                total += weight * (game(frozenset((*chosen, player))) - game(frozenset(chosen)))
        found[player] = total
    return found


def test_an_additive_game_gives_each_its_own() -> None:
    worth = dict(zip(PLAYERS, map(Fraction, (3, 1, 4, 1, 5)), strict=True))
    assert values(lambda coalition: sum((worth[each] for each in coalition), Fraction(0)), PLAYERS) == worth


def test_an_interaction_is_shared_by_those_who_make_it() -> None:
    """Two patches that remove the same cast: each alone saves 4, both save 4; a third saves 1 by itself."""

    def game(coalition: Coalition) -> Fraction:
        return Fraction(4 * bool(coalition & {"a", "b"}) + ("c" in coalition))

    assert values(game, ("a", "b", "c")) == {"a": 2, "b": 2, "c": 1}


@given(st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_game_is_exact_up_to_five_players(count: int, generator: Any) -> None:
    players = PLAYERS[:count]
    worth = {
        frozenset(chosen): Fraction(generator.randint(-50, 50))
        for size in range(count + 1)
        for chosen in itertools.combinations(players, size)
    }
    found = values(worth.__getitem__, players)
    assert found == by_definition(worth.__getitem__, players)
    assert sum(found.values()) == worth[frozenset(players)] - worth[frozenset()]


def test_beyond_five_a_sample_still_adds_up_and_is_exact_where_nothing_interacts() -> None:
    players = ("a", "b", "c", "d", "e", "f", "g")
    worth = dict(zip(players, map(Fraction, range(7)), strict=True))
    orders = orders_for(players)
    assert len(orders) < math.factorial(7)
    assert all(sorted(order) == list(players) for order in orders)
    assert values(lambda coalition: sum((worth[each] for each in coalition), Fraction(0)), players) == worth
    synergy = values(lambda coalition: Fraction(len(coalition) ** 2), players)
    assert sum(synergy.values()) == 49


def test_the_sampling_error_is_the_spread_over_the_orders() -> None:
    players = ("a", "b", "c", "d", "e", "f")
    orders = orders_for(players, seed=1)
    # What "a" saves depends on whether "b" is on; "c" saves the same whatever else is on.
    rounds = range(8)

    def seconds(coalition: Coalition) -> list[float]:
        saved = 0.05 * ("c" in coalition) + (0.02 if "b" in coalition else 0.1) * ("a" in coalition)
        return [1 - saved for _ in rounds]

    found = attribution({each: seconds(each) for each in coalitions(orders)}, orders)
    assert not found.exact
    assert found.orders == len(orders)
    assert found.shares["c"].sampling_error == pytest.approx(0, abs=1e-12)
    error = found.shares["a"].sampling_error
    assert error is not None
    # Antithetic orders: "b" comes before "a" in one of each pair and after it in the other.
    assert error == pytest.approx(0, abs=1e-12)
    assert found.shares["a"].share == pytest.approx(0.06)
    assert sum(share.share for share in found.shares.values()) == pytest.approx(found.saved.share)


def test_a_sample_that_depends_on_the_orders_has_an_error() -> None:
    players = ("a", "b", "c", "d", "e", "f")
    orders = orders_for(players, seed=1)

    def seconds(coalition: Coalition) -> list[float]:
        return [1 - 0.1 * ({"a", "b", "c"} <= coalition)] * 8

    found = attribution({each: seconds(each) for each in coalitions(orders)}, orders)
    error = found.shares["a"].sampling_error
    assert error is not None
    # "a" adds all of it where it is the last of the three; an order and its reverse are one observation.
    adds = [0.1 * (max(order.index(each) for each in "abc") == order.index("a")) for order in orders]
    pairs = [(one + other) / 2 for one, other in zip(adds[::2], adds[1::2], strict=True)]
    assert error == pytest.approx(statistics.stdev(pairs) / math.sqrt(len(pairs)))
    assert error > 0
    assert abs(found.shares["a"].share - 0.1 / 3) < 4 * error


def test_up_to_five_patches_there_is_no_sampling_error() -> None:
    orders = orders_for(("a", "b"))
    found = attribution({each: [1 - 0.1 * len(each)] * 8 for each in coalitions(orders)}, orders)
    assert found.exact
    assert {name: share.sampling_error for name, share in found.shares.items()} == {"a": None, "b": None}
    assert [share.share for share in found.shares.values()] == pytest.approx([0.1, 0.1])


def shares_of(saved: list[float]) -> Share:
    """Of one patch that saves this, round by round."""
    seconds = {frozenset(): [1.0] * len(saved), frozenset("a"): [1 - each for each in saved]}
    return attribution(seconds, orders_for(("a",))).shares["a"]


def test_a_share_is_claimed_at_99_per_cent_and_over_eight_rounds_or_more() -> None:
    saved = [0.02, 0.01, 0.03, 0.02, 0.01, 0.02, 0.03, 0.02]
    assert shares_of(saved).measurable
    assert not shares_of(saved[:7]).measurable
    # A quarter of the rounds on the other side: above 0 at 95%, and not at 99%.
    unsure = shares_of([-0.02] * 5 + [0.02 + 0.001 * each for each in range(15)])
    assert unsure.low > 0
    assert not unsure.measurable


def test_the_empty_set_and_the_whole_are_always_timed() -> None:
    found = coalitions(orders_for(("a", "b", "c", "d", "e", "f")))
    assert found[0] == frozenset()
    assert found[-1] == frozenset("abcdef")
    assert len(coalitions(orders_for(PLAYERS))) == 2**5
