"""The settings of a model: which values are valid, how they are read, and the errors for invalid ones."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.model_settings import ModelKind, ModelSettings, PriorityPolicy

COUNTS: Final = (
    *("max_batch_size", "max_queue_size", "max_queue_bytes", "max_body_bytes"),
    *("max_expiration_ms", "result_ttl_ms", "max_result_ttl_ms", "stream_buffer", "reader_idle_ms"),
    "scale_wait_ms",
)
OPTIONAL_COUNTS: Final = (
    *("max_batch_cost", "default_expiration_ms", "max_prefill_cost", "max_execution_ms"),
    *("max_requests_per_process", "max_process_memory", "max_workers"),
)
FRACTIONS: Final = ("max_queue_delay_ms", "target_latency_ms")
SIZES: Final = ("max_queue_bytes", "max_body_bytes", "max_result_bytes")
DURATIONS: Final = tuple(name for name in ModelSettings.names() if name.endswith("_ms"))
NUMBERS: Final = (*COUNTS, *OPTIONAL_COUNTS, *FRACTIONS)
OPTIONAL: Final = {*OPTIONAL_COUNTS, "target_latency_ms"}
EMPTY_DEFAULTS: Final[dict[str, Any]] = {
    "preferred_batch_sizes": (),
    "priority_policies": {},
    "tenant_weights": {},
}
NUMBER_MAX: Final = 1 << 53

fast = settings(deadline=None)


def cases(*values: Any) -> tuple[Any, ...]:
    """Values of mixed types."""
    return values


def test_names_are_in_the_documented_order_and_each_has_a_meaning() -> None:
    assert ModelSettings.names() == [
        "max_batch_size",
        "max_batch_cost",
        "max_queue_delay_ms",
        "preferred_batch_sizes",
        "max_queue_size",
        "max_queue_bytes",
        "max_delayed_share",
        "max_body_bytes",
        "max_result_bytes",
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
        "max_result_ttl_ms",
        "max_prefill_cost",
        "stream_buffer",
        "reader_idle_ms",
        "max_candidate_sequences",
        "max_sequence_idle_ms",
        "unknown_fields",
        "max_execution_ms",
        "max_requests_per_process",
        "max_process_memory",
        "max_concurrent_batches",
        "max_dead_letters",
        "max_dead_letter_bytes",
        "max_dead_letter_age_ms",
        "min_workers",
        "max_workers",
        "scale_wait_ms",
        "scale_down_ms",
        "scale_idle_ms",
    ]
    assert list(ModelSettings.meanings()) == ModelSettings.names()
    assert all(ModelSettings.meanings().values())


def test_settings_not_given_have_defaults() -> None:
    assert ModelSettings.from_mapping({}) == ModelSettings()
    assert all(getattr(ModelSettings(), name) is None for name in OPTIONAL)
    assert ModelSettings().expiration_action == "reject"
    assert ModelSettings().policy == "eager"


# --- single settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *[(name, value, 8) for name in (*COUNTS, *OPTIONAL_COUNTS) for value in (8, 8.0, "8", " 8 ")],
        *[(name, NUMBER_MAX - 1, NUMBER_MAX - 1) for name in COUNTS],
        *[(name, value, None) for name in OPTIONAL for value in (None, "", "none", "None", "null")],
        *[(name, "1.5KiB", 1536) for name in SIZES],
        *[(name, value, 64 << 20) for name in SIZES for value in ("64MiB", " 64 mib ", "65536KiB")],
        *[(name, "1MB", 1_000_000) for name in SIZES],
        *[(name, value, 5000) for name in DURATIONS for value in ("5s", "5000ms", " 5 S ")],
        *[(name, value, 5_400_000) for name in DURATIONS for value in ("1.5h", "90min")],
        ("max_queue_delay_ms", "0.1ms", 0.1),
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
        *[("unknown_fields", value, value) for value in ("pass", "refuse")],
        *[("policy", value, value) for value in ("eager", "deferred", "my.module:Mine")],
        *[
            ("tenant_weights", value, {"gold": 4, "a:b": 0.5})
            for value in cases(
                "gold:4,a:b:0.5",
                "a:b:.5 gold:4.0",
                ' {"gold": 4, "a:b": 0.5}',
                {"gold": 4, "a:b": "0.5"},
            )
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
def test_setting_is_read_from_a_value_or_its_text(name: str, value: Any, expected: Any) -> None:
    assert getattr(ModelSettings(**{name: value}), name) == expected
    if value is not None:
        assert getattr(ModelSettings.from_mapping({name: value}), name) == expected


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        *[
            (name, value, "must be a whole number of at least 1")
            for name in (*COUNTS, *OPTIONAL_COUNTS)
            for value in (0, -1, 1.5, "0", "1.5", NUMBER_MAX)
        ],
        *[
            (name, value, "must be a number " if name in FRACTIONS else "must be a whole number ")
            for name in NUMBERS
            for value in (True, math.nan, math.inf, -1, "-1", "nan", "inf", "many", "8 apples", b"8", [8])
        ],
        *[(name, value, "must be a whole number ") for name in COUNTS for value in ("", "none")],
        *[(name, value, "such as 64MiB") for name in SIZES for value in ("5s", "64 MiBs", "MiB", "0.5B")],
        *[(name, value, "such as 5s") for name in DURATIONS for value in ("5GiB", "-5s", "5 sec", "s")],
        *[
            (name, "5s", "must be a whole number of at least 1")
            for name in ("max_batch_size", "stream_buffer")
        ],
        *[(name, "many", ", or none") for name in OPTIONAL],
        *[
            ("max_result_bytes", value, "from 1 to 134217728, in bytes or such as 64MiB")
            for value in (0, "none", "129MiB", NUMBER_MAX)
        ],
        ("max_queue_delay_ms", float(NUMBER_MAX), "a number of at least 0"),
        ("target_latency_ms", 0, "a number of at least 0.001"),
        *[
            ("preferred_batch_sizes", value, "must be a list of batch sizes of at least 1, such as 4,8,16")
            for value in ("0", "4,,x", "4,-8", [0], 8, True, b"8", [b"8"], [True], "1.5")
        ],
        *[
            ("allow_expiration_override", value, "must be true or false")
            for value in ("", "maybe", 2, 1.5, b"true", [True])
        ],
        *[("expiration_action", value, "must be reject or delay") for value in ("", "Reject", "drop", True)],
        *[("unknown_fields", value, "must be pass or refuse") for value in ("", "reject", True)],
        *[("policy", value, "eager, deferred") for value in ("", "lazy", ":", "module:", True, b"eager")],
        *[
            ("tenant_weights", value, "such as gold:4,silver:2")
            for value in (
                "gold",
                "{",
                '{"gold": 0}',
                "gold:4,silver",
                "gold:0",
                "gold:-1",
                "gold:x",
                {"a": True},
                [1],
                8,
            )
        ],
        *[
            ("priority_policies", value, "as in {")
            for value in ("[]", "8", "{", '{"x": {}}', '{"0": 5}', '{"0": {"max_queue_size": 0}}', [1], 8)
        ],
        ("priority_policies", {10: {}}, "priorities from 0 to 9"),
        ("priority_policies", '{"-1": {}}', "priorities from 0 to 9"),
        ("priority_policies", {0: {"max_queue": 1}}, "max_queue is not one of max_queue_size, default_exp"),
        ("priority_policies", {0: PriorityPolicy(expiration_action="drop")}, "must be reject or delay"),
    ],
)
def test_error_names_the_setting_and_what_is_valid(name: str, value: Any, valid: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is ") as declared:
        ModelSettings(**{name: value})
    assert valid in str(declared.value)
    with pytest.raises(ValueError, match=f"^{name} is ") as registered:
        ModelSettings.from_mapping({name: value})
    assert str(registered.value) == str(declared.value)


@pytest.mark.parametrize("name", sorted(set(ModelSettings.names()) - OPTIONAL - EMPTY_DEFAULTS.keys()))
def test_only_optional_settings_may_be_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is "):
        ModelSettings(**dict[str, Any]({name: None}))


def test_invalid_value_is_cut_short_in_the_error() -> None:
    with pytest.raises(ValueError, match="max_batch_size") as error:
        ModelSettings.from_mapping({"max_batch_size": "x" * 10_000})
    assert len(str(error.value)) < 200


def test_other_registered_fields_are_ignored() -> None:
    registration = {"max_batch_size": "8", "inputs": "[]", "colour": "blue", "max_batch_cost": None}
    assert ModelSettings.from_mapping(registration) == ModelSettings(max_batch_size=8)


# --- settings that depend on each other --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "doubted"),
    [
        ({}, []),
        ({"result_ttl_ms": 5}, ["result_ttl_ms"]),
        ({"max_body_bytes": "1GiB"}, ["max_body_bytes"]),
        ({"max_batch_size": 64, "max_queue_size": 8}, ["max_queue_size"]),
        ({"default_expiration_ms": 20, "max_queue_delay_ms": 20}, ["max_queue_delay_ms"]),
        ({"default_expiration_ms": 20, "max_queue_delay_ms": 19}, []),
        ({"result_ttl_ms": 1, "max_queue_size": 1}, ["result_ttl_ms", "max_queue_size"]),
        ({"min_workers": 3, "max_workers": 2}, ["min_workers"]),
        ({"min_workers": 3}, []),
    ],
)
def test_settings_that_can_hardly_be_meant_are_doubted(given: dict[str, Any], doubted: list[str]) -> None:
    assert [doubt.partition(": ")[0] for doubt in ModelSettings(**given).doubts()] == doubted


PRIORITY_9_MAY_OVERRIDE: Final = {
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
        (PRIORITY_9_MAY_OVERRIDE, 9, 500, 500),
        (PRIORITY_9_MAY_OVERRIDE, 4, 500, None),
    ],
)  # fmt: skip
def test_expiration_of_a_request(
    given: dict[str, Any], priority: int, asked_ms: int | None, expires_ms: int | None
) -> None:
    assert ModelSettings(**given).expiration_ms(priority, asked_ms) == expires_ms


def test_expired_requests_are_delayed_by_model_or_priority() -> None:
    assert not ModelSettings().delays_expired(4)
    assert ModelSettings(expiration_action="delay").delays_expired(4)
    delay, reject = PriorityPolicy(expiration_action="delay"), PriorityPolicy(expiration_action="reject")
    one_level = ModelSettings(priority_policies={0: delay, 9: PriorityPolicy()})
    assert [one_level.delays_expired(priority) for priority in (0, 4, 9)] == [True, False, False]
    all_but_one = ModelSettings(expiration_action="delay", priority_policies={9: reject, 0: PriorityPolicy()})
    assert [all_but_one.delays_expired(priority) for priority in (0, 4, 9)] == [True, True, False]


# --- through Redis -----------------------------------------------------------------------------------------

integers = st.integers(1, NUMBER_MAX - 1)
priority_policies = st.builds(
    PriorityPolicy,
    max_queue_size=st.none() | integers,
    default_expiration_ms=st.none() | integers,
    allow_expiration_override=st.none() | st.booleans(),
    expiration_action=st.sampled_from([None, "reject", "delay"]),
)
model_settings = st.builds(
    ModelSettings,
    **dict.fromkeys(COUNTS, integers),
    **dict.fromkeys(OPTIONAL_COUNTS, st.none() | integers),
    max_queue_delay_ms=st.integers(0, NUMBER_MAX - 1) | st.floats(0, 1e9),
    target_latency_ms=st.none() | st.floats(0.001, 1e9),
    preferred_batch_sizes=st.sets(integers, max_size=4),
    allow_expiration_override=st.booleans(),
    expiration_action=st.sampled_from(["reject", "delay"]),
    priority_policies=st.dictionaries(st.integers(0, 9), priority_policies, max_size=3),
    tenant_weights=st.dictionaries(
        st.from_regex(r"[A-Za-z0-9._:-]{1,8}", fullmatch=True), st.floats(0.001, 1e9), max_size=4
    ),
    policy=st.sampled_from(["eager", "deferred"]),
)


@fast
@given(model_settings)
def test_settings_are_unchanged_by_a_round_trip_as_text(sent: ModelSettings) -> None:
    texts = sent.as_text()
    assert list(texts) == ModelSettings.names()
    assert all(type(text) is str for text in texts.values())
    assert ModelSettings.from_mapping(texts) == sent


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "deferred"),
        ("target_latency_ms", 5),
        ("max_queue_delay_ms", 1),
        ("preferred_batch_sizes", (4,)),
        ("preserve_ordering", True),
    ],
)
def test_settings_without_a_meaning_for_a_stepping_model_are_refused(name: str, value: Any) -> None:
    ModelSettings(max_batch_size=8, max_prefill_cost=4).check_kind(ModelKind.STEPPING)
    with pytest.raises(ValueError, match=rf"^{name}: .*stepping model"):
        ModelSettings.from_mapping({name: value}).check_kind(ModelKind.STEPPING)


def test_changes_are_the_settings_that_differ() -> None:
    before = ModelSettings(max_batch_size=8, policy="eager")
    assert before.changes_to(before) == {}
    after = ModelSettings(max_batch_size=8, policy="deferred", max_queue_delay_ms=2)
    assert before.changes_to(after) == {"policy": "deferred", "max_queue_delay_ms": "2"}


# --- of several workers ------------------------------------------------------------------------------------

TIGHTEST: dict[str, tuple[Any, Any, Any]] = {  # two workers' values, and what is in force
    "max_batch_size": (4, 64, 4),
    "max_batch_cost": (None, 64, 64),
    "max_queue_delay_ms": (5, 0, 0),
    "preferred_batch_sizes": ((4, 8, 16), (8, 16, 32), (8, 16)),
    "max_queue_size": (10, 20, 10),
    "max_queue_bytes": (10, 20, 10),
    "max_delayed_share": (0.5, 0.9, 0.5),
    "max_body_bytes": (10, 20, 10),
    "max_result_bytes": (10, 20, 10),
    "default_expiration_ms": (None, 500, 500),
    "max_expiration_ms": (500, 1000, 500),
    "allow_expiration_override": (True, False, False),
    "expiration_action": ("delay", "reject", "reject"),
    "priority_policies": (
        {0: {"max_queue_size": 10}},
        {0: {"max_queue_size": 5}, 9: {"expiration_action": "delay"}},
        {
            0: {"max_queue_size": 5, "allow_expiration_override": True, "expiration_action": "reject"},
            9: {"allow_expiration_override": True, "expiration_action": "reject"},
        },
    ),
    "preserve_ordering": (False, True, True),
    "tenant_weights": ({"gold": 4}, {"gold": 2}, {"gold": 2}),  # those of the worker that registered last
    "policy": ("eager", "deferred", "deferred"),  # as well
    "target_latency_ms": (None, 20, 20),
    "result_ttl_ms": (1000, 60_000, 60_000),
    "max_result_ttl_ms": (1000, 60_000, 60_000),
    "max_prefill_cost": (None, 64, 64),
    "stream_buffer": (16, 256, 16),
    "reader_idle_ms": (1000, 10_000, 10_000),
    "max_candidate_sequences": (10, 20, 10),
    "max_sequence_idle_ms": (1000, 60_000, 60_000),
    "unknown_fields": ("pass", "refuse", "refuse"),
    "max_execution_ms": (1000, None, None),
    "max_requests_per_process": (10, None, 10),
    "max_process_memory": (10, None, 10),
    "max_concurrent_batches": (16, 1, 1),
    "max_dead_letters": (10, 20, 20),
    "max_dead_letter_bytes": (10, 20, 20),
    "max_dead_letter_age_ms": (10, 20, 20),
    "min_workers": (1, 2, 2),
    "max_workers": (5, None, None),
    "scale_wait_ms": (100, 1000, 100),
    "scale_down_ms": (1000, 60_000, 60_000),
    "scale_idle_ms": (1000, 60_000, 60_000),
}


def test_each_setting_of_several_workers_has_a_tightest_value() -> None:
    assert list(TIGHTEST) and set(TIGHTEST) == set(ModelSettings.names())


@pytest.mark.parametrize("name", TIGHTEST)
def test_tightest_value_is_in_force(name: str) -> None:
    one, other, expected = (ModelSettings.from_mapping({name: value}) for value in TIGHTEST[name])
    assert ModelSettings.tightest([one, other], other) == expected
    assert ModelSettings.tightest([other, one, other], other) == expected
    assert ModelSettings.tightest([one, one], one) == one


def test_priority_that_one_worker_limits_has_the_tightest_limits_of_the_models_beside() -> None:
    one = ModelSettings(default_expiration_ms=100, allow_expiration_override=False)
    policy = PriorityPolicy(default_expiration_ms=500, expiration_action="delay")
    other = ModelSettings(expiration_action="delay", priority_policies={3: policy})
    both = ModelSettings.tightest([one, other], one)
    assert both.expiration_ms(3, None) == both.expiration_ms(3, 900) == 100
    assert not both.delays_expired(3)


def test_what_another_version_wrote_and_this_one_cannot_read_is_the_default() -> None:
    settings = ModelSettings.from_readable({"max_batch_size": "7", "policy": "", "later": "1"})
    assert settings == ModelSettings(max_batch_size=7)


def test_a_batch_has_the_settings_for_its_worker_that_are_not_defaults() -> None:
    assert ModelSettings(max_batch_size=7).for_workers(ModelKind.PLAIN) == ""
    changed = ModelSettings(max_batch_size=7, max_execution_ms=500, max_result_bytes=1 << 20)
    read = ModelSettings.of_batch(changed.for_workers(ModelKind.PLAIN))
    assert read == ModelSettings(max_execution_ms=500, max_result_bytes=1 << 20)
    assert ModelSettings.of_batch("") == ModelSettings()
    with pytest.raises(ValueError, match="max_result_bytes"):
        ModelSettings.of_batch('{"max_result_bytes": "no"}')
