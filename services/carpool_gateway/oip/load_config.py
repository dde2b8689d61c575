"""A model's configuration with which it is to be loaded, in Triton's words: a map -> what is wanted.

What has a counterpart here is read, and all else is refused by its name. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import msgspec

from carpool.messages.requests import PRIORITY_DEFAULT, PRIORITY_LEVELS
from carpool.model_settings import ModelSettings
from carpool.wire.nodes import REPLICAS_MAX
from carpool_gateway.oip import documents
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.models import OfferedModel

CONFIG: Final = "config"
_BACKENDS: Final = ("", documents.PLATFORM, "onnxruntime", "onnxruntime_onnx", "python")
_KINDS: Final = ("KIND_AUTO", "KIND_MODEL")
_ACTIONS: Final = {"REJECT": "reject", "DELAY": "delay"}


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What of a model is to be served.

    `version`: None for the newest one. `replicas`: how many model processes; None for as many as before, or
    as the entry declares. `adds_replica`: for one more than before, if it is loaded with these parameters.
    `parameters`: those of the model, as text. `settings`: those that the load sets, by name, as text.
    """

    version: str | None = None
    replicas: int | None = None
    adds_replica: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


def read_config(config: Any, name: str, version: str | None, model: OfferedModel | None) -> LoadRequest:
    """The load of a model with this configuration. `version`: which the client names besides, if any.
    `model`: as it is offered now, if it is. Raises ProtocolError."""
    return _Config(name, version, model).read(config)


class _Config:
    """Reads one."""

    def __init__(self, name: str, version: str | None, model: OfferedModel | None) -> None:
        self._name = name
        self._version = version
        self._model = model
        self._replicas: int | None = None
        self._parameters: dict[str, str] = {}
        self._settings: dict[str, str] = {}

    def read(self, config: Any) -> LoadRequest:
        """The request with this configuration. Raises ProtocolError."""
        self._read_fields(CONFIG, config, self._readers())
        try:
            ModelSettings.from_mapping(self._settings)
        except ValueError as error:
            raise ProtocolError(f"{CONFIG}: {error}") from None
        return LoadRequest(
            self._version, self._replicas, parameters=self._parameters, settings=self._settings
        )

    def _readers(self) -> Mapping[str, Callable[[str, Any], None]]:
        return {
            "name": self._read_name,
            "platform": self._read_backend,
            "backend": self._read_backend,
            "version_policy": self._read_version_policy,
            "max_batch_size": lambda at, value: self._set("max_batch_size", _whole(at, value, 1)),
            "input": self._read_declared,
            "output": self._read_declared,
            "model_transaction_policy": self._read_declared,
            "instance_group": self._read_instance_groups,
            "dynamic_batching": self._read_dynamic_batching,
            "sequence_batching": self._read_sequence_batching,
            "parameters": self._read_parameters,
            "response_cache": self._read_response_cache,
        }

    @staticmethod
    def _read_fields(at: str, value: Any, readers: Mapping[str, Callable[[str, Any], None]]) -> None:
        if type(value) is not dict:
            raise ProtocolError(f"{at}: must be a JSON object")
        for name, given in value.items():
            if name not in readers:
                _refuse(f"{at}.{name:.80}", f"there are {', '.join(readers)}")
            readers[name](f"{at}.{name}", given)

    def _set(self, setting: str, value: object) -> None:
        self._settings[setting] = str(value).lower() if type(value) is bool else str(value)

    def _read_name(self, at: str, value: Any) -> None:
        if value not in ("", self._name):
            raise ProtocolError(f"{at}: must be {self._name!r}, as in the path, or be left out")

    def _read_backend(self, at: str, value: Any) -> None:
        """It has no effect: a model's files say what it is."""
        if value not in _BACKENDS:
            _refuse(at, f"there are {', '.join(sorted(filter(None, _BACKENDS)))}")

    def _read_version_policy(self, at: str, value: Any) -> None:
        if value in ({}, {"latest": {}}, {"latest": {"num_versions": 1}}):
            return
        versions = value.get("specific", {}).get("versions") if _is_specific(value) else None
        if type(versions) is not list or len(versions) != 1:
            _refuse(at, 'a model has one version: write {"latest": {}}, or {"specific": {"versions": [2]}}')
        version = str(_whole(f"{at}.specific.versions[0]", versions[0], 1))
        if self._version not in (None, version):
            raise ProtocolError(f"{at}: is version {version}, but the path says {self._version}")
        self._version = version

    def _read_declared(self, at: str, value: Any) -> None:
        """What the model's own code declares: it may be said again, but not be changed."""
        known = {} if self._model is None else msgspec.json.decode(documents.model_config(self._model))
        if value != known.get(at.rpartition(".")[2]):
            _refuse(at, "the model declares it, and a load cannot change it: leave it out")

    def _read_instance_groups(self, at: str, value: Any) -> None:
        if type(value) is not list:
            raise ProtocolError(f"{at}: must be a list")
        counts: list[int] = []
        for index, group in enumerate(value):
            readers = {
                "name": lambda at, value: None,
                "count": lambda at, value: counts.append(_whole(at, value, 1)),
                "kind": _check_kind,
            }
            before = len(counts)
            self._read_fields(f"{at}[{index}]", group, readers)
            if len(counts) == before:
                counts.append(1)
        if sum(counts) > REPLICAS_MAX:
            raise ProtocolError(f"{at}: has {sum(counts)} instances; {REPLICAS_MAX} are possible")
        self._replicas = sum(counts) or None

    def _read_dynamic_batching(self, at: str, value: Any) -> None:
        readers = {
            "preferred_batch_size": self._read_preferred_sizes,
            "max_queue_delay_microseconds": lambda at, value: self._set(
                "max_queue_delay_ms", _milliseconds(at, value)
            ),
            "preserve_ordering": lambda at, value: self._set("preserve_ordering", _flag(at, value)),
            "priority_levels": lambda at, value: _check_equal(at, value, PRIORITY_LEVELS),
            "default_priority_level": lambda at, value: _check_equal(
                at, value, PRIORITY_LEVELS - PRIORITY_DEFAULT
            ),
            "default_queue_policy": self._read_queue_policy,
        }
        self._read_fields(at, value, readers)

    def _read_preferred_sizes(self, at: str, value: Any) -> None:
        if type(value) is not list:
            raise ProtocolError(f"{at}: must be a list of whole numbers")
        self._set("preferred_batch_sizes", ",".join(str(_whole(at, size, 1)) for size in value))

    def _read_queue_policy(self, at: str, value: Any) -> None:
        readers = {
            "timeout_action": self._read_timeout_action,
            "default_timeout_microseconds": lambda at, value: self._set(
                "default_expiration_ms", _milliseconds(at, value) or "none"
            ),
            "allow_timeout_override": lambda at, value: self._set(
                "allow_expiration_override", _flag(at, value)
            ),
            "max_queue_size": lambda at, value: self._set("max_queue_size", _whole(at, value, 1)),
        }
        self._read_fields(at, value, readers)

    def _read_timeout_action(self, at: str, value: Any) -> None:
        if type(value) is not str or value not in _ACTIONS:
            _refuse(at, f"there are {', '.join(_ACTIONS)}")
        self._set("expiration_action", _ACTIONS[value])

    def _read_sequence_batching(self, at: str, value: Any) -> None:
        readers = {
            "max_sequence_idle_microseconds": lambda at, value: self._set(
                "max_sequence_idle_ms", _milliseconds(at, value)
            )
        }
        self._read_fields(at, value, readers)

    def _read_parameters(self, at: str, value: Any) -> None:
        if type(value) is not dict:
            raise ProtocolError(f"{at}: must be a JSON object")
        for name, given in value.items():
            if (
                type(given) is not dict
                or [*given] != ["string_value"]
                or type(given["string_value"]) is not str
            ):
                raise ProtocolError(f'{at}.{name:.80}: must be {{"string_value": "TEXT"}}')
            self._parameters[name] = given["string_value"]

    def _read_response_cache(self, at: str, value: Any) -> None:
        if value not in ({}, {"enable": False}):
            _refuse(at, "there is no cache")


def _refuse(at: str, why: str) -> NoReturn:
    raise ProtocolError(f"{at}: has no counterpart here: {why}")


def _is_specific(value: Any) -> bool:
    return type(value) is dict and [*value] == ["specific"] and type(value["specific"]) is dict


def _whole(at: str, value: Any, lowest: int) -> int:
    """A whole number; one of 64 bits may be a text, as protobuf writes it."""
    if type(value) is str and value.isascii() and value.isdigit():
        value = int(value[:20])
    if type(value) is not int or value < lowest:
        raise ProtocolError(f"{at}: must be a whole number of at least {lowest}")
    return value


def _milliseconds(at: str, value: Any) -> float | int:
    microseconds = _whole(at, value, 0)
    return microseconds // 1000 if microseconds % 1000 == 0 else microseconds / 1000


def _flag(at: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ProtocolError(f"{at}: must be true or false")
    return value


def _check_equal(at: str, value: Any, expected: int) -> None:
    if _whole(at, value, 0) != expected:
        _refuse(at, f"it is {expected} for all models")


def _check_kind(at: str, value: Any) -> None:
    if value not in _KINDS:
        _refuse(at, "the node decides about devices: leave it out")
