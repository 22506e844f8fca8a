from __future__ import annotations

from typing import Any

import pytest
import zoo

from t5fastpatch import patched, status
from t5fastpatch.headroom import steady
from t5fastpatch.headroom.steady import steady_weights


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models whose bound has been found, each time."""
    found: list[Any] = []
    bound = steady.bound

    def counted(root: Any, stacks: Any) -> Any:
        found.append(root)
        return bound(root, stacks)

    monkeypatch.setattr(steady, "bound", counted)
    return found


def test_while_weights_stay_the_bound_of_each_model_is_found_once(bounds: list[Any]) -> None:
    one, other = (zoo.BY_NAME[name].build().half() for name in ("t5", "t5-v1.1"))
    with steady_weights():
        for model in (one, other, one):
            with patched(model, "safe") as report:
                assert report["skip_inf_check"].state.value == "on"
    assert bounds == [one, other]


def test_otherwise_new_weights_have_a_new_bound(bounds: list[Any]) -> None:
    model = zoo.BY_NAME["t5"].build()
    before = status(model)["skip_inf_check"].why
    model.encoder.block[0].layer[-1].DenseReluDense.wo.weight.data *= 2
    assert status(model)["skip_inf_check"].why != before
    assert bounds == [model, model]
