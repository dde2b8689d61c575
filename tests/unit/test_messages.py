"""A model's settings: what makes sense, from what they are read, and what is said of what makes none."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.messages import ModelSettings

OPTIONAL = {"max_batch_cost", "default_expiration_ms"}
WHOLE = sorted(set(ModelSettings.names()) - {"max_queue_delay_ms"})

fast = settings(deadline=None)


def test_the_names_are_those_of_the_registration() -> None:
    assert ModelSettings.names() == [
        "max_batch_size",
        "max_batch_cost",
        "max_queue_delay_ms",
        "max_queue_size",
        "max_queue_bytes",
        "max_body_bytes",
        "default_expiration_ms",
        "max_expiration_ms",
        "result_ttl_ms",
    ]


def test_what_is_not_said_has_its_default() -> None:
    assert ModelSettings.from_mapping({}) == ModelSettings()
    assert ModelSettings().max_batch_cost is None
    assert ModelSettings().default_expiration_ms is None


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, math.nan, math.inf, 1 << 53, "8"])
def test_a_value_that_makes_no_sense_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        ModelSettings(**{name: value})


@pytest.mark.parametrize("value", [-1, -0.1, True, math.nan, math.inf, float(1 << 53), "8", None])
def test_a_delay_that_makes_no_sense_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^max_queue_delay_ms: "):
        ModelSettings(max_queue_delay_ms=value)


@pytest.mark.parametrize("value", [0, 0.25, 5, 1e6])
def test_a_delay_may_be_none_or_a_fraction(value: float) -> None:
    assert ModelSettings(max_queue_delay_ms=value).max_queue_delay_ms == value


@pytest.mark.parametrize("name", WHOLE)
def test_only_some_may_be_left_open(name: str) -> None:
    left_open: dict[str, Any] = {name: None}
    if name in OPTIONAL:
        assert getattr(ModelSettings(**left_open), name) is None
    else:
        with pytest.raises(ValueError, match=f"^{name}: "):
            ModelSettings(**left_open)


@pytest.mark.parametrize("name", ModelSettings.names())
@pytest.mark.parametrize("value", ["", "many", "8 apples", "nan", "inf", b"8", [8], True, "-1"])
def test_what_is_registered_wrongly_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        ModelSettings.from_mapping({name: value})


def test_other_registered_fields_are_left_out() -> None:
    registration = {"max_batch_size": "8", "inputs": "[]", "colour": "blue", "max_batch_cost": None}
    assert ModelSettings.from_mapping(registration) == ModelSettings(max_batch_size=8)


whole = st.integers(1, (1 << 53) - 1)
delays = st.one_of(st.integers(0, (1 << 53) - 1), st.floats(0, 1e9))
some_settings = st.builds(
    ModelSettings,
    **{name: whole for name in WHOLE if name not in OPTIONAL},
    **{name: st.none() | whole for name in OPTIONAL},
    max_queue_delay_ms=delays,
)


@fast
@given(some_settings)
def test_settings_are_the_same_after_a_trip_through_redis(sent: ModelSettings) -> None:
    # Given: the text of each number, as Redis keeps it, and nothing for what is None
    texts = {name: str(getattr(sent, name)) for name in sent.names() if getattr(sent, name) is not None}
    # Expect
    assert ModelSettings.from_mapping(texts) == sent
