"""How a model wants its requests batched: every setting once, with what it may be and what it means.

A model declares them as attributes, its workers register them as text in a hash, and an operator's word goes
before both. What makes no sense is a ValueError that names the setting and says what would be right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from carpool.messages import PRIORITY_LEVELS

_MOST: Final = 1 << 53
_NOTHING: Final = ("", "none", "null")


class Kind(NamedTuple):
    """What a setting may be. `read` takes a value or its text and raises ValueError; `show` is its text."""

    read: Callable[[Any], Any]
    show: Callable[[Any], str] = str


def _setting(default: Any, kind: Kind, meaning: str) -> Any:
    metadata = {"kind": kind, "meaning": meaning}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


# --- what a setting may be ---------------------------------------------------------------------------------


def _whole(lowest: int) -> Kind:
    def read(value: Any) -> int:
        number = _float(value)
        if number is None or not number.is_integer() or not lowest <= number < _MOST:
            raise ValueError(f"must be a number, {lowest} or more")
        return int(number)

    return Kind(read)


def _number(lowest: float) -> Kind:
    def read(value: Any) -> float:
        number = _float(value)
        if number is None or not lowest <= number < _MOST:
            raise ValueError(f"must be a number, {lowest:g} or more")
        return int(number) if number.is_integer() else number

    return Kind(read)


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING)


def _or_none(kind: Kind) -> Kind:
    def read(value: Any) -> Any:
        if _says_nothing(value):
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
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError("must be true or false")
    return words[str(value).lower()]


def _read_sizes(value: Any) -> tuple[int, ...]:
    if _says_nothing(value):
        return ()
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    try:
        if isinstance(items, bytes):  # which are numbers too
            raise TypeError
        return tuple(sorted({_whole(1).read(item) for item in items}))
    except (TypeError, ValueError):
        raise ValueError("must be sizes, 1 or more, as in 4,8,16") from None


WEIGHT: Final = _number(0.001)


def _read_weights(value: Any) -> Mapping[str, float]:
    if _says_nothing(value):
        return MappingProxyType({})
    try:
        if isinstance(value, str):  # the last colon counts: a tenant may have some in its name
            value = dict(item.rsplit(":", 1) for item in value.replace(",", " ").split())
        weights = {str(name): float(WEIGHT.read(weight)) for name, weight in value.items()}
    except (AttributeError, ValueError):
        raise ValueError("must be weights of tenants, 0.001 or more, as in gold:4,silver:2") from None
    return MappingProxyType(weights)


def _read_policy(value: Any) -> str:
    if value not in POLICIES and not (isinstance(value, str) and all(value.rpartition(":"))):
        raise ValueError(f"must be {' or '.join(POLICIES)}, or module:Name of a batcher's --policies")
    return str(value)


FLAG: Final = Kind(_read_flag, lambda value: str(value).lower())
SIZES: Final = Kind(_read_sizes, lambda value: ",".join(map(str, value)))
WEIGHTS: Final = Kind(
    _read_weights, lambda weights: ",".join(f"{name}:{WEIGHT.read(one)}" for name, one in weights.items())
)
EXPIRATION_ACTION: Final = _choice("reject", "delay")
POLICIES: Final = ("eager", "deferred")
POLICY: Final = Kind(_read_policy)


# --- the settings ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PriorityPolicy:
    """What holds for one priority instead of the model's own; None: the model's own holds."""

    max_queue_size: int | None = _setting(None, _or_none(_whole(1)), "requests of this priority that wait")
    default_expiration_ms: int | None = _setting(
        None, _or_none(_whole(1)), "when one expires that says nothing"
    )
    allow_expiration_override: bool | None = _setting(None, _or_none(FLAG), "whether a request may say when")
    expiration_action: str | None = _setting(None, _or_none(EXPIRATION_ACTION), "reject, or delay")


def _read_policies(value: Any) -> Mapping[int, PriorityPolicy]:
    try:
        given = {} if _says_nothing(value) else json.loads(value) if isinstance(value, str) else value
        policies = {int(level): _policy(policy) for level, policy in given.items()}
    except (TypeError, AttributeError, ValueError) as error:
        example = '{"0": {"max_queue_size": 100, "expiration_action": "delay"}}'
        raise ValueError(f"must be settings by priority, as in {example} ({error})") from None
    if any(not 0 <= level < PRIORITY_LEVELS for level in policies):
        raise ValueError(f"must name priorities from 0 to {PRIORITY_LEVELS - 1}")
    return MappingProxyType(policies)


def _policy(given: Any) -> PriorityPolicy:
    if isinstance(given, PriorityPolicy):
        given = {spec.name: getattr(given, spec.name) for spec in fields(given)}
    return PriorityPolicy(**_read(PriorityPolicy, given, strict=True))


def _show_policies(policies: Mapping[int, PriorityPolicy]) -> str:
    def given(policy: PriorityPolicy) -> dict[str, Any]:
        named = {spec.name: getattr(policy, spec.name) for spec in fields(policy)}
        return {name: value for name, value in named.items() if value is not None}

    return json.dumps({str(level): given(policy) for level, policy in policies.items()})


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """See the module. Times in ms, sizes in requests or bytes."""

    max_batch_size: int = _setting(32, _whole(1), "requests in a batch")
    max_batch_cost: int | None = _setting(None, _or_none(_whole(1)), "sum of the requests' cost in a batch")
    max_queue_delay_ms: float = _setting(0, _number(0), "the longest the oldest request waits for company")
    preferred_batch_sizes: tuple[int, ...] = _setting((), SIZES, "go as soon as one of these can be filled")
    max_queue_size: int = _setting(10_000, _whole(1), "with so many waiting, the newest is refused")
    max_queue_bytes: int = _setting(256 * 1024 * 1024, _whole(1), "and with so many bytes")
    max_body_bytes: int = _setting(8 * 1024 * 1024, _whole(1), "the largest body")
    default_expiration_ms: int | None = _setting(
        None, _or_none(_whole(1)), "when a request that says nothing expires"
    )
    max_expiration_ms: int = _setting(24 * 3600 * 1000, _whole(1), "the most a request may ask for")
    allow_expiration_override: bool = _setting(True, FLAG, "whether a request may say when it expires")
    expiration_action: str = _setting(
        "reject", EXPIRATION_ACTION, "an expired request is answered, or goes behind all others"
    )
    priority_policies: Mapping[int, PriorityPolicy] = _setting(
        MappingProxyType({}), Kind(_read_policies, _show_policies), "limits of single priorities"
    )
    preserve_ordering: bool = _setting(
        False, FLAG, "results come in the order of arrival: one that is done early is held"
    )
    tenant_weights: Mapping[str, float] = _setting(
        MappingProxyType({}), WEIGHTS, "shares of tenants under load; 1 for who is not named"
    )
    policy: str = _setting(
        "eager",
        POLICY,
        "eager: when a worker is free; deferred: as late as deadlines allow; or your own",
    )
    target_latency_ms: float | None = _setting(
        None, _or_none(_number(0.001)), "what deferred aims at for requests that do not expire"
    )
    result_ttl_ms: int = _setting(60_000, _whole(1), "how long a result waits to be read")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = _value(spec.name, spec.metadata["kind"], getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)

    def expiration_ms(self, priority: int, asked_ms: int | None) -> int | None:
        """When a request of this priority expires that asks for `asked_ms`; None: never."""
        default_ms, may_ask = self.default_expiration_ms, self.allow_expiration_override
        if self.priority_policies and (policy := self.priority_policies.get(priority)):
            if policy.default_expiration_ms is not None:
                default_ms = policy.default_expiration_ms
            if policy.allow_expiration_override is not None:
                may_ask = policy.allow_expiration_override
        if asked_ms is None or not may_ask:
            return default_ms
        return min(asked_ms, self.max_expiration_ms)

    def delays_expired(self, priority: int) -> bool:
        """Whether an expired request of this priority goes behind all others, instead of being answered."""
        policy = self.priority_policies.get(priority) if self.priority_policies else None
        action = (policy.expiration_action if policy else None) or self.expiration_action
        return action == "delay"

    def check_sizes(self) -> None:
        """Raise ValueError for a preferred size that no batch can have, being full before.

        For whoever says such a size, a model or an operator. No settings are wrong for it: an operator who
        needs smaller batches lowers `max_batch_size` and nothing else, and must not be told to mend the model
        first, nor batchers refuse what holds then. What cannot be reached is never reached, and does no harm.
        """
        too_large = [str(size) for size in self.preferred_batch_sizes if size > self.max_batch_size]
        if too_large:
            raise ValueError(
                f"preferred_batch_sizes: {', '.join(too_large)} can never be filled, "
                f"because max_batch_size is {self.max_batch_size}"
            )

    @classmethod
    def names(cls) -> list[str]:
        """The settings' names, in the order in which they are documented."""
        return [spec.name for spec in fields(cls)]

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each setting means."""
        return {spec.name: spec.metadata["meaning"] for spec in fields(cls)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings from registered or declared values, or their text. Unknown names are left out."""
        return cls(**_read(cls, values, strict=False))

    def as_text(self) -> dict[str, str]:
        """Every setting as text: `from_mapping` of it gives the same settings."""
        return {spec.name: spec.metadata["kind"].show(getattr(self, spec.name)) for spec in fields(self)}


def _read(cls: type[Any], values: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    kinds = {spec.name: spec.metadata["kind"] for spec in fields(cls)}
    for name in values if strict else ():
        if name not in kinds:
            raise ValueError(f"{name} is none of {', '.join(kinds)}")
    given = {name: values[name] for name in kinds if values.get(name) is not None}
    return {name: _value(name, kinds[name], value) for name, value in given.items()}


def _value(name: str, kind: Kind, value: Any) -> Any:
    try:
        return kind.read(value)
    except ValueError as error:
        raise ValueError(f"{name}: {value!r:.80} {error}") from None
