"""Whatever fields producers write, under any settings: nothing raises, and all requests leave.

`support.any_fields` has the batcher, in virtual time, and the fields. `make fuzz` sends it very many entries.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from carpool.model_settings import ModelKind, ModelSettings
from support import fuzzing_batcher
from support.any_fields import Batcher, any_settings, steps


@pytest.mark.parametrize("kind", list(ModelKind))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(taken=st.lists(steps, max_size=25), chosen=any_settings)
def test_nothing_raises_and_all_requests_leave(
    kind: ModelKind, taken: list[Any], chosen: dict[str, Any]
) -> None:
    batcher = Batcher(ModelSettings(**chosen), kind)
    for step, *values in taken:
        step(batcher, *values)
        batcher.turn()
    batcher.end()


@pytest.mark.parametrize("seed", range(3))
def test_hostile_entries_at_random(seed: int) -> None:
    """A few thousand of the entries that `make fuzz` sends, with the same bounds of steps and memory."""
    fuzzing_batcher.fuzz(entries=1000, seed=seed, report=lambda line: None)
