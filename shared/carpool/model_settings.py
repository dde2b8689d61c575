"""The settings of a model: each with its default, its valid values and its meaning.

A model declares settings as attributes, its workers register them as text in a Redis hash, and an operator
may override any of them with `carpool config`. An invalid value is a ValueError that names the setting, the
value and what is valid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from carpool.messages.requests import PRIORITY_LEVELS
from carpool.units import BYTES, MILLISECONDS, number_in

_NUMBER_MAX: Final = 1 << 53  # exclusive; a float holds every smaller integer exactly
_RESULT_TTL_MS_DOUBTED: Final = 1000
CONCURRENT_BATCHES_MAX: Final = 1024  # of one process
DEAD_LETTERS_MAX: Final = 100_000  # of one model, whatever its settings are
RESULT_BYTES_DEFAULT: Final = 64 * 1024 * 1024
# A chunk is written twice in one argument of a script, and Redis takes arguments of less than 512 MiB.
RESULT_BYTES_MAX: Final = 128 * 1024 * 1024
MAX_RESULT_TTL_MS: Final = 7 * 24 * 3600 * 1000
SLOTS_PREFETCHED_RATIO: Final = 8
_TEXTS_FOR_NONE: Final = ("", "none", "null")


class ModelKind(StrEnum):
    """How a model executes requests, which decides the settings that have a meaning for it."""

    PLAIN = "plain"  # batches, each by itself
    STEPPING = "stepping"  # step by step, with requests that join and end between two steps
    STATEFUL = "stateful"  # batches, with a state for each sequence that is kept between its requests
    BOUND = "bound"  # batches of one process each: a sequence stays with the process that has its state

    @property
    def has_sequences(self) -> bool:
        """Whether each request must be a part of a sequence."""
        return self in (ModelKind.STATEFUL, ModelKind.BOUND)

    @classmethod
    def of(cls, registration: Mapping[str, str]) -> ModelKind:
        """How a registered model executes requests."""
        others = (kind for kind in cls if kind is not cls.PLAIN)
        return next((kind for kind in others if registration.get(kind) == "true"), cls.PLAIN)

    @property
    def fields(self) -> dict[str, str]:
        """The fields of a registration that say it: one of the name of each kind but PLAIN."""
        return {str(kind): str(self is kind).lower() for kind in ModelKind if kind is not ModelKind.PLAIN}


class Kind(NamedTuple):
    """A type of settings. `read` takes a value or its text, and raises ValueError; `show` makes the text."""

    read: Callable[[Any], Any]
    show: Callable[[Any], str] = str


def _setting(default: Any, kind: Kind, meaning: str) -> Any:
    metadata = {"kind": kind, "meaning": meaning}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


# --- types of settings -------------------------------------------------------------------------------------


_NO_UNITS: Final[Mapping[str, int]] = {}


def _integer(lowest: int, units: Mapping[str, int] = _NO_UNITS, *, highest: int = _NUMBER_MAX - 1) -> Kind:
    valid = f"of at least {lowest}" if highest == _NUMBER_MAX - 1 else f"from {lowest} to {highest}"

    def read(value: Any) -> int:
        number = _to_float(value, units)
        if number is None or not number.is_integer() or not lowest <= number <= highest:
            raise ValueError(f"must be a whole number {valid}{_or_with_a_unit(units)}")
        return int(number)

    return Kind(read)


def _number(lowest: float, units: Mapping[str, int] = _NO_UNITS, *, highest: float = _NUMBER_MAX - 1) -> Kind:
    valid = f"of at least {lowest:g}" if highest == _NUMBER_MAX - 1 else f"from {lowest:g} to {highest:g}"

    def read(value: Any) -> float:
        number = _to_float(value, units)
        if number is None or not lowest <= number <= highest:
            raise ValueError(f"must be a number {valid}{_or_with_a_unit(units)}")
        return int(number) if number.is_integer() else number

    return Kind(read)


def _or_with_a_unit(units: Mapping[str, int]) -> str:
    if not units:
        return ""
    return ", in bytes or such as 64MiB" if units is BYTES else ", in milliseconds or such as 5s"


def _to_float(value: Any, units: Mapping[str, int]) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
    except ValueError:
        return number_in(units, str(value))


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in _TEXTS_FOR_NONE)


def _optional(kind: Kind) -> Kind:
    def read(value: Any) -> Any:
        if _is_none(value):
            return None
        try:
            return kind.read(value)
        except ValueError as error:
            raise ValueError(f"{error}, or none") from None

    return Kind(read, lambda value: "none" if value is None else kind.show(value))


def _choice(*names: str) -> Kind:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"must be {' or '.join(names)}")
        return str(value)

    return Kind(read)


def _read_flag(value: Any) -> bool:
    flags = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in flags:
        raise ValueError("must be true or false")
    return flags[str(value).lower()]


def _read_sizes(value: Any) -> tuple[int, ...]:
    if _is_none(value):
        return ()
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    try:
        if isinstance(items, bytes):  # iterating over bytes gives integers
            raise TypeError
        return tuple(sorted({_integer(1).read(item) for item in items}))
    except (TypeError, ValueError):
        raise ValueError("must be a list of batch sizes of at least 1, such as 4,8,16") from None


WEIGHT: Final = _number(0.001)


def _read_weights(value: Any) -> Mapping[str, float]:
    if _is_none(value):
        return MappingProxyType({})
    try:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = json.loads(value)
        elif isinstance(value, str):  # split at the last colon: the name of a tenant may contain colons
            value = dict(item.rsplit(":", 1) for item in value.replace(",", " ").split())
        weights = {str(name): float(WEIGHT.read(weight)) for name, weight in value.items()}
    except (AttributeError, ValueError):
        raise ValueError(
            'must map tenants to weights of at least 0.001, such as gold:4,silver:2 or {"gold": 4}'
        ) from None
    return MappingProxyType(weights)


def _read_policy(value: Any) -> str:
    if value not in POLICIES and not (isinstance(value, str) and all(value.rpartition(":"))):
        raise ValueError(f"must be {', '.join(POLICIES)}, or one of the batcher's --policies")
    return str(value)


FLAG: Final = Kind(_read_flag, lambda value: str(value).lower())
SIZES: Final = Kind(_read_sizes, lambda value: ",".join(map(str, value)))
WEIGHTS: Final = Kind(
    _read_weights,
    lambda weights: ",".join(f"{name}:{WEIGHT.read(weight)}" for name, weight in weights.items()),
)
UNKNOWN_FIELDS: Final = _choice("pass", "refuse")
EXPIRATION_ACTION: Final = _choice("reject", "delay")
POLICIES: Final = ("eager", "deferred")
POLICY: Final = Kind(_read_policy)


# --- the settings ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PriorityPolicy:
    """Settings of one priority, which replace the model's. None: the model's setting applies."""

    max_queue_size: int | None = _setting(
        None, _optional(_integer(1)), "maximum number of requests of this priority that may wait"
    )
    default_expiration_ms: int | None = _setting(
        None,
        _optional(_integer(1, MILLISECONDS)),
        "expiration of a request of this priority that does not set one",
    )
    allow_expiration_override: bool | None = _setting(
        None, _optional(FLAG), "whether requests of this priority may set their own expiration"
    )
    expiration_action: str | None = _setting(
        None, _optional(EXPIRATION_ACTION), "what happens to expired requests of this priority"
    )


def _read_policies(value: Any) -> Mapping[int, PriorityPolicy]:
    try:
        given = {} if _is_none(value) else json.loads(value) if isinstance(value, str) else value
        policies = {int(level): _priority_policy(policy) for level, policy in given.items()}
    except (TypeError, AttributeError, ValueError) as error:
        example = '{"0": {"max_queue_size": 100, "expiration_action": "delay"}}'
        raise ValueError(f"must map priorities to settings, as in {example} ({error})") from None
    if any(not 0 <= level < PRIORITY_LEVELS for level in policies):
        raise ValueError(f"must have priorities from 0 to {PRIORITY_LEVELS - 1}")
    return MappingProxyType(policies)


def _priority_policy(given: Any) -> PriorityPolicy:
    if isinstance(given, PriorityPolicy):
        given = {spec.name: getattr(given, spec.name) for spec in fields(given)}
    return PriorityPolicy(**_read(PriorityPolicy, given, strict=True))


def _show_policies(policies: Mapping[int, PriorityPolicy]) -> str:
    def given(policy: PriorityPolicy) -> dict[str, Any]:
        values = {spec.name: getattr(policy, spec.name) for spec in fields(policy)}
        return {name: value for name, value in values.items() if value is not None}

    return json.dumps({str(level): given(policy) for level, policy in policies.items()})


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings of a model. Times are in milliseconds, sizes in requests or bytes, as their names say."""

    max_batch_size: int = _setting(32, _integer(1), "maximum number of requests in a batch")
    max_batch_cost: int | None = _setting(
        None, _optional(_integer(1)), "largest sum of the costs of the requests in a batch"
    )
    max_queue_delay_ms: float = _setting(
        0,
        _number(0, MILLISECONDS),
        "how long the oldest request may wait for others before a partial batch is dispatched",
    )
    preferred_batch_sizes: tuple[int, ...] = _setting(
        (), SIZES, "sizes at which a batch is dispatched without further delay"
    )
    max_queue_size: int = _setting(
        10_000, _integer(1), "maximum number of requests that may wait; further ones are refused"
    )
    max_queue_bytes: int = _setting(
        256 * 1024 * 1024,
        _integer(1, BYTES),
        "maximum bytes of requests that may wait; further requests are refused",
    )
    max_delayed_share: float = _setting(
        0.5,
        _number(0, highest=1),
        "share of max_queue_size and max_queue_bytes that delayed requests (not_before) may take",
    )
    max_body_bytes: int = _setting(8 * 1024 * 1024, _integer(1, BYTES), "largest body of a request")
    max_result_bytes: int = _setting(
        RESULT_BYTES_DEFAULT,
        _integer(1, BYTES, highest=RESULT_BYTES_MAX),
        "largest result of a request, all chunks of a stream together; one that is larger fails",
    )
    default_expiration_ms: int | None = _setting(
        None, _optional(_integer(1, MILLISECONDS)), "expiration of a request that does not set one"
    )
    max_expiration_ms: int = _setting(
        24 * 3600 * 1000, _integer(1, MILLISECONDS), "longest expiration that a request may set"
    )
    allow_expiration_override: bool = _setting(True, FLAG, "whether requests may set their own expiration")
    expiration_action: str = _setting(
        "reject",
        EXPIRATION_ACTION,
        "reject: an expired request is refused; delay: it is executed after all others",
    )
    priority_policies: Mapping[int, PriorityPolicy] = _setting(
        MappingProxyType({}),
        Kind(_read_policies, _show_policies),
        "limits for individual priorities: queue size and expiration",
    )
    preserve_ordering: bool = _setting(
        False, FLAG, "deliver results in the order in which the requests arrived"
    )
    tenant_weights: Mapping[str, float] = _setting(
        MappingProxyType({}), WEIGHTS, "relative shares of tenants under load; 1 for tenants not listed"
    )
    policy: str = _setting(
        "eager",
        POLICY,
        "when to dispatch: eager (a process is free), deferred (as late as deadlines allow), or a custom "
        "policy",
    )
    target_latency_ms: float | None = _setting(
        None,
        _optional(_number(0.001, MILLISECONDS)),
        "latency that the policy deferred aims for where requests have no deadline",
    )
    result_ttl_ms: int = _setting(
        60_000, _integer(1, MILLISECONDS), "how long a result is kept for its producer"
    )
    max_result_ttl_ms: int = _setting(
        MAX_RESULT_TTL_MS,
        _integer(1, MILLISECONDS),
        "longest time for which a request that is enqueued may have its result kept",
    )
    max_prefill_cost: int | None = _setting(
        None,
        _optional(_integer(1)),
        "largest sum of the costs of the requests that a stepping model begins between two steps",
    )
    stream_buffer: int = _setting(
        256, _integer(1), "number of unread chunks from which on further ones are merged"
    )
    reader_idle_ms: int = _setting(
        10_000, _integer(1, MILLISECONDS), "after which time a stream that nobody reads is cancelled"
    )
    max_candidate_sequences: int = _setting(
        10_000, _integer(1), "maximum number of sequences that are kept at a time; others wait to start"
    )
    max_sequence_idle_ms: int = _setting(
        60_000, _integer(1, MILLISECONDS), "after which time a sequence without requests is ended"
    )
    unknown_fields: str = _setting(
        "pass",
        UNKNOWN_FIELDS,
        "fields that Carpool does not define: passed on to the model, or the request is refused",
    )
    max_execution_ms: int | None = _setting(
        None,
        _optional(_integer(1, MILLISECONDS)),
        "longest execution of a batch, or of a step; a model process that takes longer is replaced",
    )
    max_requests_per_process: int | None = _setting(
        None,
        _optional(_integer(1)),
        "number of requests after which a model process is replaced by a new one, between two batches",
    )
    max_process_memory: int | None = _setting(
        None,
        _optional(_integer(1, BYTES)),
        "resident memory at which a model process is replaced by a new one, between two batches",
    )
    max_concurrent_batches: int = _setting(
        1,
        _integer(1, highest=CONCURRENT_BATCHES_MAX),
        "number of batches that a process of a model with an async predict executes at a time",
    )
    max_dead_letters: int = _setting(
        10_000,
        _integer(1, highest=DEAD_LETTERS_MAX),
        "number of dead letters that are kept; the oldest go first",
    )
    max_dead_letter_bytes: int = _setting(
        64 * 1024 * 1024, _integer(1, BYTES), "bytes of Redis's memory that dead letters may take together"
    )
    max_dead_letter_age_ms: int = _setting(
        7 * 24 * 3600 * 1000, _integer(1, MILLISECONDS), "how long a dead letter is kept"
    )
    min_workers: int = _setting(1, _integer(0), "number of workers that are wanted at least")
    max_workers: int | None = _setting(
        None, _optional(_integer(1)), "number of workers that are wanted at most"
    )
    scale_wait_ms: int = _setting(
        1000,
        _integer(1, MILLISECONDS),
        "how long a request may wait; more workers are wanted before it waits longer",
    )
    scale_down_ms: int = _setting(
        60_000, _integer(0, MILLISECONDS), "for how long fewer workers must be enough before fewer are wanted"
    )
    scale_idle_ms: int = _setting(
        300_000,
        _integer(0, MILLISECONDS),
        "after which time without requests no worker is wanted, if min_workers is 0",
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = _read_value(spec.name, spec.metadata["kind"], getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)

    def expiration_ms(self, priority: int, asked_ms: int | None) -> int | None:
        """The expiration of a request of this priority that sets `asked_ms`; None: it does not expire."""
        default_ms, may_override = self.default_expiration_ms, self.allow_expiration_override
        if self.priority_policies and (policy := self.priority_policies.get(priority)):
            if policy.default_expiration_ms is not None:
                default_ms = policy.default_expiration_ms
            if policy.allow_expiration_override is not None:
                may_override = policy.allow_expiration_override
        if asked_ms is None or not may_override:
            return default_ms
        return min(asked_ms, self.max_expiration_ms)

    def queue_size_of(self, priority: int) -> int | None:
        """How many requests of this priority may wait; None: as many as of the model."""
        policy = self.priority_policies.get(priority) if self.priority_policies else None
        return None if policy is None else policy.max_queue_size

    def delays_expired(self, priority: int) -> bool:
        """Whether an expired request of this priority is executed after all others, and not refused."""
        policy = self.priority_policies.get(priority) if self.priority_policies else None
        action = (policy.expiration_action if policy else None) or self.expiration_action
        return action == "delay"

    def concurrent_batches(self, kind: ModelKind) -> int:
        """How many batches each process of a model of this kind executes at a time."""
        return self.max_concurrent_batches if kind in _ONLY_OF["max_concurrent_batches"] else 1

    def check_sizes(self) -> None:
        """Raise ValueError for a preferred size above `max_batch_size`.

        To be called when a model declares preferred sizes or an operator sets them. It is not part of
        validation, because such a size does no harm: no batch reaches it. An operator must be able to lower
        `max_batch_size` of a running model without having to change anything else.
        """
        too_large = [str(size) for size in self.preferred_batch_sizes if size > self.max_batch_size]
        if too_large:
            raise ValueError(
                f"preferred_batch_sizes: {', '.join(too_large)} can never be filled, "
                f"because max_batch_size is {self.max_batch_size}"
            )

    def doubts(self) -> list[str]:
        """What is allowed and yet can hardly be meant, each a sentence that begins with a setting's name.

        For a person to read: `carpool config` and a worker's log show it, and nothing depends on it.
        """
        doubts = []
        if self.result_ttl_ms < _RESULT_TTL_MS_DOUBTED:
            doubts.append(
                f"result_ttl_ms: a result that nobody has read after {self.result_ttl_ms} ms is lost"
            )
        if self.max_body_bytes > self.max_queue_bytes:
            doubts.append(
                f"max_body_bytes: bodies of more than {self.max_queue_bytes} (max_queue_bytes) never wait: "
                "they are refused"
            )
        if self.max_queue_size < self.max_batch_size:
            doubts.append(
                f"max_queue_size: with at most {self.max_queue_size} waiting requests, batches of "
                f"{self.max_batch_size} (max_batch_size) are never full"
            )
        if self.max_workers is not None and self.min_workers > self.max_workers:
            doubts.append(
                f"min_workers: {self.min_workers} are never wanted, because max_workers is {self.max_workers}"
            )
        expiration_ms = self.default_expiration_ms
        if expiration_ms is not None and expiration_ms <= self.max_queue_delay_ms:
            doubts.append(
                f"max_queue_delay_ms: a request expires after {expiration_ms} ms (default_expiration_ms), "
                "before that delay has passed"
            )
        return doubts

    def check_slots(self, declared: int) -> None:
        """Raise ValueError for more slots than the processes of a bound model have, which it declares."""
        if self.max_batch_size > declared:
            raise ValueError(
                f"max_batch_size: {self.max_batch_size} is more than the {declared} slots of a process"
            )

    def check_kind(self, kind: ModelKind) -> None:
        """Raise ValueError for a setting that would have no meaning for a model of this kind, or a wrong one.

        Each request of a stepping model is dispatched by itself, as soon as a slot is free, and takes as long
        as it generates: batches are not formed, and l(n) is not known.
        """
        defaults = type(self)()
        for name, reason in _UNUSABLE[kind].items():
            if getattr(self, name) != getattr(defaults, name):
                raise ValueError(f"{name}: {reason}")

    def for_workers(self, kind: ModelKind) -> str:
        """The settings that a worker needs for batches of such a model, as JSON.

        Of a stepping model all of these: see `with_those_for_steps`. Of another one those that are not the
        defaults, and an empty text if all are: see `of_batch`.
        """
        if kind is ModelKind.STEPPING:
            values = self.as_text()
            return json.dumps({name: values[name] for name in _OF_STEPS})
        needed = {name: text for name, text in type(self)().changes_to(self).items() if name in _OF_BATCHES}
        return json.dumps(needed) if needed else ""

    def with_those_for_steps(self, text: str) -> Self:
        """These settings with those that `for_workers` gave for a stepping model in place of their own."""
        return self.from_mapping({**self.as_text(), **json.loads(text)})

    @classmethod
    def of_batch(cls, text: str | bytes) -> Self:
        """The settings in the field `settings` of a batch; of others the defaults. Raises ValueError."""
        return cls.from_mapping(json.loads(text) if text else {})

    @classmethod
    def tightest(cls, declared: Sequence[Self], latest: Self) -> Self:
        """The settings that are in force where the workers of a model declare these: of each the value that
        breaks no worker, and loses nothing that any of them keeps. So limits are the lowest, but the highest
        are the times after which something is given up, and what is kept. The policy and the weights of
        tenants, which have no order, are those of `latest`.
        """
        values = {}
        for spec in fields(cls):
            of_all = [getattr(settings, spec.name) for settings in declared]
            if all(value == of_all[0] for value in of_all):
                values[spec.name] = of_all[0]
            elif spec.name in _WITHOUT_ORDER:
                values[spec.name] = getattr(latest, spec.name)
            elif spec.name == "priority_policies":
                levels = sorted({level for policies in of_all for level in policies})
                values[spec.name] = {level: _tightest_priority(declared, level) for level in levels}
            else:
                values[spec.name] = _tightest_value(spec.name, of_all)
        return cls(**values)

    @classmethod
    def names(cls) -> list[str]:
        """The names of all settings, in the order in which they are documented."""
        return [spec.name for spec in fields(cls)]

    @classmethod
    def names_without_effect(cls, kind: ModelKind) -> tuple[str, ...]:
        """The names of the settings that have no meaning for a model of this kind."""
        of_others = [name for name, only_of in _ONLY_OF.items() if kind not in only_of]
        return (*_UNUSABLE[kind], *of_others)

    @classmethod
    def only_kinds(cls, name: str) -> Sequence[ModelKind]:
        """The only kinds of models for which this setting has a meaning; empty: it has one for all, or for
        all but those with a reason."""
        return _ONLY_OF.get(name, ())

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """The meaning of each setting, by name."""
        return {spec.name: spec.metadata["meaning"] for spec in fields(cls)}

    @classmethod
    def from_readable(cls, values: Mapping[str, str]) -> Self:
        """As `from_mapping`, of text that another version wrote: what this one cannot read is its default."""
        readable = {}
        for spec in fields(cls):
            try:
                readable[spec.name] = spec.metadata["kind"].read(values[spec.name])
            except (KeyError, ValueError):
                continue
        return cls(**readable)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings from values or their text, as declared or registered. Unknown names are ignored."""
        return cls(**_read(cls, values, strict=False))

    def as_text(self) -> dict[str, str]:
        """Every setting as text, from which `from_mapping` makes equal settings."""
        return {spec.name: spec.metadata["kind"].show(getattr(self, spec.name)) for spec in fields(self)}

    def changes_to(self, other: ModelSettings) -> dict[str, str]:
        """The settings of `other` that differ from these, as text."""
        before = self.as_text()
        return {name: text for name, text in other.as_text().items() if text != before[name]}


_ONLY_OF: Final[Mapping[str, Sequence[ModelKind]]] = {
    "max_delayed_share": (ModelKind.PLAIN, ModelKind.STEPPING),
    "max_concurrent_batches": (ModelKind.PLAIN, ModelKind.STATEFUL),
    "max_prefill_cost": (ModelKind.STEPPING,),
    "stream_buffer": (ModelKind.STEPPING,),
    "reader_idle_ms": (ModelKind.STEPPING,),
    "max_candidate_sequences": (ModelKind.STATEFUL,),
    "max_sequence_idle_ms": (ModelKind.STATEFUL, ModelKind.BOUND),
}
_OF_BATCHES: Final = (
    *("max_execution_ms", "max_result_bytes", "max_batch_cost"),
    *("max_requests_per_process", "max_process_memory"),
)
_OF_STEPS: Final = (
    *("max_batch_size", "max_prefill_cost", "stream_buffer", "reader_idle_ms"),
    *_OF_BATCHES,
)
_IN_ORDER_ANYWAY: Final = (
    "results of a sequence come in its order anyway, and sequences do not wait for each other"
)
_HAS_STATES: Final = (
    "a process of a bound model has the states of its sequences, with which no other process can go on"
)
_UNUSABLE: Final[Mapping[ModelKind, Mapping[str, str]]] = {
    ModelKind.PLAIN: {},
    ModelKind.STEPPING: {
        "policy": "a stepping model takes a request as soon as a slot is free, so only eager applies",
        "target_latency_ms": "it is for the policy deferred, which a stepping model cannot have",
        "max_queue_delay_ms": "a stepping model forms no batches, so a request would only lose time",
        "preferred_batch_sizes": "a stepping model forms no batches: requests join and end between its steps",
        "preserve_ordering": "the outputs of a stepping model are of different lengths and end in any order",
    },
    ModelKind.STATEFUL: {"preserve_ordering": _IN_ORDER_ANYWAY},
    ModelKind.BOUND: {
        "policy": "a sequence of a bound model cannot go to another process, so only eager applies",
        "target_latency_ms": "it is for the policy deferred, which a bound model cannot have",
        "preserve_ordering": _IN_ORDER_ANYWAY,
        "max_requests_per_process": _HAS_STATES,
        "max_process_memory": _HAS_STATES,
    },
}


_WITHOUT_ORDER: Final = ("policy", "tenant_weights")
_HIGHEST_IS_SAFE: Final = (
    *("result_ttl_ms", "max_result_ttl_ms", "reader_idle_ms", "max_sequence_idle_ms", "max_execution_ms"),
    *("max_dead_letters", "max_dead_letter_bytes", "max_dead_letter_age_ms"),
    *("min_workers", "max_workers", "scale_down_ms", "scale_idle_ms"),
)
_FIRST_IS_SAFE: Final[Mapping[str, Sequence[Any]]] = {
    "allow_expiration_override": (False, True),
    "expiration_action": ("reject", "delay"),
    "preserve_ordering": (True, False),
    "unknown_fields": ("refuse", "pass"),
}


def prefetched_slots(slots: int) -> int:
    """How many requests a process of a stepping model has fetched ahead, beyond those in its `slots`."""
    return max(1, slots // SLOTS_PREFETCHED_RATIO)


def _tightest_value(name: str, of_all: Sequence[Any]) -> Any:
    if name == "preferred_batch_sizes":  # those that all prefer
        return set(of_all[0]).intersection(*of_all)
    if name in _FIRST_IS_SAFE:
        return min(of_all, key=_FIRST_IS_SAFE[name].index)
    choose = max if name in _HIGHEST_IS_SAFE else min
    return choose(of_all, key=lambda value: float("inf") if value is None else value)  # None: no limit


def _tightest_priority(declared: Sequence[ModelSettings], level: int) -> PriorityPolicy:
    """Of each limit of this priority what it is for each worker, also if only the model has it, and of these
    the tightest. The queue of a priority is beside the model's, which holds anyway."""
    values = {}
    for spec in fields(PriorityPolicy):
        of_all = []
        for settings in declared:
            value = getattr(settings.priority_policies.get(level), spec.name, None)
            inherits = value is None and spec.name != "max_queue_size"
            of_all.append(getattr(settings, spec.name) if inherits else value)
        values[spec.name] = _tightest_value(spec.name, of_all)
    return PriorityPolicy(**values)


def _read(cls: type[Any], values: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    kinds = {spec.name: spec.metadata["kind"] for spec in fields(cls)}
    for name in values if strict else ():
        if name not in kinds:
            raise ValueError(f"{name} is not one of {', '.join(kinds)}")
    given = {name: values[name] for name in kinds if values.get(name) is not None}
    return {name: _read_value(name, kinds[name], value) for name, value in given.items()}


def _read_value(name: str, kind: Kind, value: Any) -> Any:
    try:
        return kind.read(value)
    except ValueError as error:
        raise ValueError(f"{name} is {value!r:.80}: {error}") from None
