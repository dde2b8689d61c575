"""Queues, batches and sequences of a configuration, in Carpool's settings. Pure.

Times in microseconds become milliseconds; a setting that takes whole milliseconds gets the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from carpool.messages.requests import PRIORITY_DEFAULT, PRIORITY_LEVELS
from carpool_worker.triton.config import Config
from carpool_worker.triton.tensors import datatype_of

DEFAULT_LEVEL: Final = PRIORITY_LEVELS - PRIORITY_DEFAULT  # Triton's number for a request that names none
IDLE_US_DEFAULT: Final = 1_000_000  # of a sequence, in Triton
_US: Final = 1000  # in a millisecond
_CONTROL: Final = "CONTROL_SEQUENCE_"
_VALUES: Final = ("int32_false_true", "fp32_false_true", "bool_false_true")

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """An input that says where in its sequence a request is. `kind`: START, READY, END or CORRID. `values`:
    for false and for true; none of CORRID."""

    kind: str
    name: str
    datatype: str
    values: tuple[Any, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state that is an output and an input. `shape`: of one sequence. `file`: with the first state; empty
    for zeros."""

    input: str
    output: str
    datatype: str
    shape: tuple[int, ...]
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """How a model has sequences. `slots`: how many a process has, if it keeps them inside."""

    controls: tuple[Control, ...]
    states: tuple[State, ...]
    slots: int


def milliseconds(microseconds: int) -> float:
    """For a setting that takes fractions."""
    return microseconds / _US


# --- dynamic batching ---------------------------------------------------------------------------------------


def batching_settings(batching: Mapping[str, Any], problems: list[str]) -> Settings:
    """The settings for `dynamic_batching`. What has no counterpart is appended to `problems`."""
    found: Settings = {}
    if batching["preferred_batch_size"]:
        found["preferred_batch_sizes"] = batching["preferred_batch_size"]
    if batching["max_queue_delay_microseconds"]:
        found["max_queue_delay_ms"] = milliseconds(batching["max_queue_delay_microseconds"])
    if batching["preserve_ordering"]:
        found["preserve_ordering"] = True
    if "default_queue_policy" in batching:
        found |= _queue_settings(batching["default_queue_policy"])
    found |= _priorities(batching, problems)
    return found


def _queue_settings(policy: Mapping[str, Any]) -> Settings:
    """Settings for a queue policy; the same names are those of one priority."""
    found: Settings = {"allow_expiration_override": policy["allow_timeout_override"]}
    if policy["timeout_action"] == "DELAY":
        found["expiration_action"] = "delay"
    if policy["default_timeout_microseconds"]:
        found["default_expiration_ms"] = ceil(policy["default_timeout_microseconds"] / _US)
    if policy["max_queue_size"]:
        found["max_queue_size"] = policy["max_queue_size"]
    return found


def _priorities(batching: Mapping[str, Any], problems: list[str]) -> Settings:
    levels, default = batching["priority_levels"], batching["default_priority_level"]
    policies = {int(level): policy for level, policy in batching["priority_queue_policy"].items()}
    path = "dynamic_batching."
    if levels > PRIORITY_LEVELS:
        problems.append(f"{path}priority_levels: {levels} are more than the {PRIORITY_LEVELS} that there are")
        return {}
    if levels and not 1 <= default <= levels:
        problems.append(
            f"{path}default_priority_level: {default} must be 1 to {levels}, as priority_levels says"
        )
        return {}
    if levels and default != min(levels, DEFAULT_LEVEL):
        problems.append(
            f"{path}default_priority_level: {default} has no counterpart: a request that names none has "
            f"level {DEFAULT_LEVEL} here; let clients name theirs, and write {min(levels, DEFAULT_LEVEL)}"
        )
        return {}
    for level in policies:
        if not 1 <= level <= levels:
            problems.append(
                f"{path}priority_queue_policy: {level} must be 1 to {levels}, as priority_levels says"
            )
            return {}
    if not policies:
        return {}
    by_priority = {PRIORITY_LEVELS - level: _queue_settings(policy) for level, policy in policies.items()}
    if default in policies:  # also for requests that name no priority
        by_priority[PRIORITY_DEFAULT] = _queue_settings(policies[default])
    return {"priority_policies": by_priority}


# --- sequences ----------------------------------------------------------------------------------------------


def sequence_settings(batching: Mapping[str, Any], rows: int) -> Settings:
    """The settings for `sequence_batching` of a model with batches of up to `rows`."""
    idle_us = batching["max_sequence_idle_microseconds"] or IDLE_US_DEFAULT
    found: Settings = {"max_sequence_idle_ms": ceil(idle_us / _US)}
    oldest, direct = batching.get("oldest"), batching.get("direct")
    if oldest is not None:
        if oldest["max_candidate_sequences"] > 0:
            found["max_candidate_sequences"] = oldest["max_candidate_sequences"]
        if oldest["preferred_batch_size"]:
            found["preferred_batch_sizes"] = oldest["preferred_batch_size"]
        if oldest["max_queue_delay_microseconds"]:
            found["max_queue_delay_ms"] = milliseconds(oldest["max_queue_delay_microseconds"])
    elif (
        direct is not None
        and direct["minimum_slot_utilization"] > 0
        and direct["max_queue_delay_microseconds"]
    ):
        found["preferred_batch_sizes"] = [max(1, ceil(direct["minimum_slot_utilization"] * rows))]
        found["max_queue_delay_ms"] = milliseconds(direct["max_queue_delay_microseconds"])
    return found


def sequences_of(config: Config, rows: int, *, has_lead: bool, problems: list[str]) -> Sequences:
    """What a configuration with `sequence_batching` says of sequences. `has_lead`: shapes without batches
    begin with 1. What is wrong is appended to `problems`."""
    batching = config["sequence_batching"]
    candidates = batching.get("oldest", {}).get("max_candidate_sequences", 0)
    controls, states = [], []
    given = [(kind, one) for kind in ("control_input", "state") for one in batching[kind]]
    for kind, one in given:
        name = one["name" if kind == "control_input" else "input_name"]
        try:
            if kind == "control_input":
                controls += _controls(one)
            else:
                states.append(_state(one, has_lead=has_lead))
        except ValueError as error:
            problems.append(f"sequence_batching.{kind} {name or '?'}: {error}")
    kinds = [control.kind for control in controls]
    for kind in sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        problems.append(f"sequence_batching.control_input: {_CONTROL}{kind} is there twice; remove one")
    return Sequences(controls=tuple(controls), states=tuple(states), slots=max(candidates, rows))


def _controls(given: Mapping[str, Any]) -> list[Control]:
    if not given["name"]:
        raise ValueError("name: is missing; write the name of the input")
    return [_control(given["name"], one) for one in given["control"]]


def _control(name: str, given: Mapping[str, Any]) -> Control:
    kind = given["kind"].removeprefix(_CONTROL)
    if kind == "CORRID":
        datatype = datatype_of(given["data_type"])
        if datatype not in ("UINT64", "INT64", "UINT32", "INT32", "BYTES"):
            raise ValueError("control.data_type: must be TYPE_UINT64, INT64, UINT32, INT32 or STRING")
        return Control(kind=kind, name=name, datatype=datatype)
    pairs = [(key, given[key]) for key in _VALUES if given[key]]
    if len(pairs) != 1 or len(pairs[0][1]) != 2:
        raise ValueError(
            f"control: {kind} needs one of {', '.join(_VALUES)}, with a value for each, as in [ 0, 1 ]"
        )
    key, (false, true) = pairs[0]
    datatype = {"int32": "INT32", "fp32": "FP32", "bool": "BOOL"}[key.partition("_")[0]]
    return Control(kind=kind, name=name, datatype=datatype, values=(false, true))


def _state(given: Mapping[str, Any], *, has_lead: bool) -> State:
    for key in ("input_name", "output_name"):
        if not given[key]:
            raise ValueError(f"{key}: is missing; write the name of the model's tensor")
    datatype, dims = datatype_of(given["data_type"]), given["dims"]
    if datatype in ("", "BYTES"):
        raise ValueError("data_type: a state is of numbers; write one such as TYPE_FP32")
    if has_lead:
        if dims[:1] != [1]:
            raise ValueError(
                f"dims: {dims} must begin with 1, as all shapes of a model with max_batch_size 0"
            )
        dims = dims[1:]
    if any(size < 1 for size in dims):
        raise ValueError(f"dims: {dims} must be fixed, because a state is stored as bytes")
    initial = given["initial_state"]
    if len(initial) > 1:
        raise ValueError("initial_state: there are several; a sequence starts with one")
    file = initial[0].get("data_file", "") if initial else ""
    return State(
        input=given["input_name"],
        output=given["output_name"],
        datatype=datatype,
        shape=tuple(dims),
        file=file,
    )
