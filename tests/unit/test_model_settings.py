"""A model's settings: what makes sense, from what they are read, and what is said of what makes none."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.model_settings import ModelSettings, PriorityPolicy

COUNTS: Final = (
    *("max_batch_size", "max_queue_size", "max_queue_bytes", "max_body_bytes"),
    *("max_expiration_ms", "result_ttl_ms"),
)
OPTIONAL_COUNTS: Final = ("max_batch_cost", "default_expiration_ms")
NUMBERS: Final = (*COUNTS, *OPTIONAL_COUNTS, "max_queue_delay_ms", "target_latency_ms")
LEFT_OPEN: Final = {*OPTIONAL_COUNTS, "target_latency_ms"}
EMPTY: Final[dict[str, Any]] = {"preferred_batch_sizes": (), "priority_policies": {}, "tenant_weights": {}}
MOST: Final = 1 << 53

fast = settings(deadline=None)


def cases(*values: Any) -> tuple[Any, ...]:
    """Values of any types, one beside another."""
    return values


def test_the_names_are_those_of_the_registration() -> None:
    assert ModelSettings.names() == [
        "max_batch_size",
        "max_batch_cost",
        "max_queue_delay_ms",
        "preferred_batch_sizes",
        "max_queue_size",
        "max_queue_bytes",
        "max_body_bytes",
        "default_expiration_ms",
        "max_expiration_ms",
        "allow_expiration_override",
        "expiration_action",
        "priority_policies",
        "preserve_ordering",
        "tenant_weights",
        "policy",
        "target_latency_ms",
        "result_ttl_ms",
    ]
    assert list(ModelSettings.meanings()) == ModelSettings.names()
    assert all(ModelSettings.meanings().values())


def test_what_is_not_said_has_its_default() -> None:
    assert ModelSettings.from_mapping({}) == ModelSettings()
    assert all(getattr(ModelSettings(), name) is None for name in LEFT_OPEN)
    assert ModelSettings().expiration_action == "reject"
    assert ModelSettings().policy == "eager"


# --- single settings: a value, its text, and what each becomes ---------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "becomes"),
    [
        *[(name, value, 8) for name in (*COUNTS, *OPTIONAL_COUNTS) for value in (8, 8.0, "8", " 8 ")],
        *[(name, MOST - 1, MOST - 1) for name in COUNTS],
        *[(name, value, None) for name in LEFT_OPEN for value in (None, "", "none", "None", "null")],
        *[("max_queue_delay_ms", value, 0.25) for value in (0.25, "0.25", ".25", "25e-2")],
        *[("max_queue_delay_ms", value, 0) for value in (0, "0", 0.0)],
        ("target_latency_ms", "0.5", 0.5),
        *[
            ("preferred_batch_sizes", value, (4, 8, 16))
            for value in cases(
                "4,8,16", "16 8 4", "8, 4,16,8", [16, 4, 8], (16, 4, 8), {4, 8, 16}, ["4", 8, 16.0]
            )
        ],
        *[("preferred_batch_sizes", value, ()) for value in cases("", "none", [], ())],
        *[("allow_expiration_override", value, True) for value in (True, "true", "True", "1", "yes", 1)],
        *[("allow_expiration_override", value, False) for value in (False, "false", "FALSE", "0", "no", 0)],
        *[("expiration_action", value, value) for value in ("reject", "delay")],
        *[("policy", value, value) for value in ("eager", "deferred", "my.module:Mine")],
        *[
            ("tenant_weights", value, {"gold": 4, "a:b": 0.5})
            for value in cases("gold:4,a:b:0.5", "a:b:.5 gold:4.0", {"gold": 4, "a:b": "0.5"})
        ],
        *[("tenant_weights", value, {}) for value in cases("", "none", {})],
        *[
            ("priority_policies", value, {0: PriorityPolicy(max_queue_size=5)})
            for value in cases(
                '{"0": {"max_queue_size": 5}}',
                {0: {"max_queue_size": "5"}},
                {"0": PriorityPolicy(max_queue_size=5)},
            )
        ],
        *[("priority_policies", value, {}) for value in cases("", "none", "{}", {})],
    ],
)
def test_a_setting_is_read_from_a_value_or_its_text(name: str, value: Any, becomes: Any) -> None:
    assert getattr(ModelSettings(**{name: value}), name) == becomes
    if value is not None:
        assert getattr(ModelSettings.from_mapping({name: value}), name) == becomes


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        *[
            (name, value, "a number, 1 or more")
            for name in (*COUNTS, *OPTIONAL_COUNTS)
            for value in (0, -1, 1.5, "0", "1.5", MOST)
        ],
        *[
            (name, value, "must be a number, ")
            for name in NUMBERS
            for value in (True, math.nan, math.inf, -1, "-1", "nan", "inf", "many", "8 apples", b"8", [8])
        ],
        *[(name, value, "must be a number, ") for name in COUNTS for value in ("", "none")],
        *[(name, "many", ", or none") for name in LEFT_OPEN],
        ("max_queue_delay_ms", float(MOST), "a number, 0 or more"),
        ("target_latency_ms", 0, "a number, 0.001 or more"),
        *[
            ("preferred_batch_sizes", value, "must be sizes, 1 or more, as in 4,8,16")
            for value in ("0", "4,,x", "4,-8", [0], 8, True, b"8", [b"8"], [True], "1.5")
        ],
        *[
            ("allow_expiration_override", value, "must be true or false")
            for value in ("", "maybe", 2, 1.5, b"true", [True])
        ],
        *[("expiration_action", value, "must be reject or delay") for value in ("", "Reject", "drop", True)],
        *[("policy", value, "eager or deferred") for value in ("", "lazy", ":", "module:", True, b"eager")],
        *[
            ("tenant_weights", value, "as in gold:4,silver:2")
            for value in ("gold", "gold:4,silver", "gold:0", "gold:-1", "gold:x", {"a": True}, [1], 8)
        ],
        *[
            ("priority_policies", value, "as in {")
            for value in ("[]", "8", "{", '{"x": {}}', '{"0": 5}', '{"0": {"max_queue_size": 0}}', [1], 8)
        ],
        ("priority_policies", {10: {}}, "priorities from 0 to 9"),
        ("priority_policies", '{"-1": {}}', "priorities from 0 to 9"),
        ("priority_policies", {0: {"max_queue": 1}}, "max_queue is none of max_queue_size, default_exp"),
        ("priority_policies", {0: PriorityPolicy(expiration_action="drop")}, "must be reject or delay"),
    ],
)
def test_what_makes_no_sense_is_named_with_what_would(name: str, value: Any, right: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: ") as refused:
        ModelSettings(**{name: value})
    assert right in str(refused.value)
    with pytest.raises(ValueError, match=f"^{name}: ") as registered:
        ModelSettings.from_mapping({name: value})
    assert str(registered.value) == str(refused.value)


@pytest.mark.parametrize("name", sorted(set(ModelSettings.names()) - LEFT_OPEN - EMPTY.keys()))
def test_only_some_may_be_left_open(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        ModelSettings(**dict[str, Any]({name: None}))


def test_what_is_quoted_of_a_wrong_value_is_short() -> None:
    with pytest.raises(ValueError, match="max_batch_size") as refused:
        ModelSettings.from_mapping({"max_batch_size": "x" * 10_000})
    assert len(str(refused.value)) < 200


def test_other_registered_fields_are_left_out() -> None:
    registration = {"max_batch_size": "8", "inputs": "[]", "colour": "blue", "max_batch_cost": None}
    assert ModelSettings.from_mapping(registration) == ModelSettings(max_batch_size=8)


# --- what they mean together -------------------------------------------------------------------------------


VIP_MAY_ASK: Final = {
    "allow_expiration_override": False,
    "priority_policies": {9: {"allow_expiration_override": True}},
}


@pytest.mark.parametrize(
    ("given", "priority", "asked_ms", "expires_ms"),
    [
        ({}, 4, None, None),
        ({}, 4, 500, 500),
        ({"max_expiration_ms": 300}, 4, 500, 300),
        ({"default_expiration_ms": 100}, 4, None, 100),
        ({"default_expiration_ms": 100}, 4, 500, 500),
        ({"default_expiration_ms": 100, "allow_expiration_override": False}, 4, 500, 100),
        ({"allow_expiration_override": False}, 4, 500, None),
        ({"priority_policies": {0: {"default_expiration_ms": 7}}}, 0, None, 7),
        ({"priority_policies": {0: {"default_expiration_ms": 7}}}, 4, None, None),
        ({"priority_policies": {0: {"default_expiration_ms": 7}}}, 0, 500, 500),
        ({"priority_policies": {0: {"allow_expiration_override": False}}}, 0, 500, None),
        ({"priority_policies": {0: {"allow_expiration_override": False}}}, 4, 500, 500),
        (VIP_MAY_ASK, 9, 500, 500),
        (VIP_MAY_ASK, 4, 500, None),
    ],
)  # fmt: skip
def test_when_a_request_expires(
    given: dict[str, Any], priority: int, asked_ms: int | None, expires_ms: int | None
) -> None:
    assert ModelSettings(**given).expiration_ms(priority, asked_ms) == expires_ms


def test_whether_who_has_expired_is_delayed() -> None:
    assert not ModelSettings().delays_expired(4)
    assert ModelSettings(expiration_action="delay").delays_expired(4)
    delay, reject = PriorityPolicy(expiration_action="delay"), PriorityPolicy(expiration_action="reject")
    one_level = ModelSettings(priority_policies={0: delay, 9: PriorityPolicy()})
    assert [one_level.delays_expired(priority) for priority in (0, 4, 9)] == [True, False, False]
    all_but_one = ModelSettings(expiration_action="delay", priority_policies={9: reject, 0: PriorityPolicy()})
    assert [all_but_one.delays_expired(priority) for priority in (0, 4, 9)] == [True, True, False]


# --- through Redis -----------------------------------------------------------------------------------------

whole = st.integers(1, MOST - 1)
some_policy = st.builds(
    PriorityPolicy,
    max_queue_size=st.none() | whole,
    default_expiration_ms=st.none() | whole,
    allow_expiration_override=st.none() | st.booleans(),
    expiration_action=st.sampled_from([None, "reject", "delay"]),
)
some_settings = st.builds(
    ModelSettings,
    **dict.fromkeys(COUNTS, whole),
    **dict.fromkeys(OPTIONAL_COUNTS, st.none() | whole),
    max_queue_delay_ms=st.integers(0, MOST - 1) | st.floats(0, 1e9),
    target_latency_ms=st.none() | st.floats(0.001, 1e9),
    preferred_batch_sizes=st.sets(whole, max_size=4),
    allow_expiration_override=st.booleans(),
    expiration_action=st.sampled_from(["reject", "delay"]),
    priority_policies=st.dictionaries(st.integers(0, 9), some_policy, max_size=3),
    tenant_weights=st.dictionaries(
        st.from_regex(r"[A-Za-z0-9._:-]{1,8}", fullmatch=True), st.floats(0.001, 1e9), max_size=4
    ),
    policy=st.sampled_from(["eager", "deferred"]),
)


@fast
@given(some_settings)
def test_settings_are_the_same_after_a_trip_through_redis(sent: ModelSettings) -> None:
    texts = sent.as_text()
    assert list(texts) == ModelSettings.names()
    assert all(type(text) is str for text in texts.values())
    assert ModelSettings.from_mapping(texts) == sent
