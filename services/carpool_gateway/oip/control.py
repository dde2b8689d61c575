"""Requests to load and unload models, as clients of Triton and AMD's inference server write them.

Triton's have `parameters`, of which `config` is a model's configuration as a text of JSON. AMD's are a flat
map of the model's own parameters. Pure.

Why: docs/decisions/0113.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from carpool.wire.nodes import Wanted
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.json_text import parse
from carpool_gateway.oip.load_config import CONFIG, LoadRequest, read_config
from carpool_gateway.oip.models import OfferedModel

PARAMETERS_BYTES_MAX: Final = 64 * 1024  # of one load; every node reads those of all models again and again
UNLOAD_DEPENDENTS: Final = "unload_dependents"
_FILE_PREFIX: Final = "file:"
_SHARE: Final = "share"


def decode_load(body: bytes, name: str, version: str | None, model: OfferedModel | None) -> LoadRequest:
    """The request in a body of HTTP, which may be empty, for a model and a version of it (None: any).

    `model`: as it is offered now, if it is. Raises ProtocolError, which names what is wrong.
    """
    with _named(name):
        given = _object(body)
        if type(given.get("parameters")) is dict:
            return _bounded(_read_load(given["parameters"], name, version, model))
        return _bounded(_read_flat(given, version))


def read_load(
    parameters: Mapping[str, Any], name: str, version: str | None, model: OfferedModel | None
) -> LoadRequest:
    """The request with Triton's parameters. Raises ProtocolError."""
    with _named(name):
        return _bounded(_read_load(parameters, name, version, model))


def decode_flat(body: bytes, name: str) -> LoadRequest:
    """The request in a body of HTTP with AMD's map of parameters. Raises ProtocolError."""
    with _named(name):
        return _bounded(_read_flat(_object(body)))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors name the model, in words for which clients look."""
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(f"failed to load '{name}': {error.detail}") from None


def _bounded(request: LoadRequest) -> LoadRequest:
    texts = [*request.parameters, *request.parameters.values()]
    size = sum(len(text.encode()) for text in texts)
    if size > PARAMETERS_BYTES_MAX:
        raise ProtocolError(
            f"the parameters of the model have {size} bytes, and may have {PARAMETERS_BYTES_MAX}: put what "
            "is large into a file of the repository"
        )
    return request


def _read_load(
    parameters: Mapping[str, Any], name: str, version: str | None, model: OfferedModel | None
) -> LoadRequest:
    for key in parameters:
        if key.startswith(_FILE_PREFIX):
            raise ProtocolError(
                f"{key:.80}: the gateway takes no files: put them into the repositories of the nodes"
            )
        if key != CONFIG:
            raise ProtocolError(
                f"{key:.80}: there is no such parameter of a load, but {CONFIG}; those of the model are in "
                'its `parameters`, as in {"parameters": {"NAME": {"string_value": "TEXT"}}}'
            )
    if CONFIG not in parameters:
        return LoadRequest(version)
    text = parameters[CONFIG]
    if type(text) is not str:
        raise ProtocolError(f"{CONFIG}: must be a text, which is a JSON object")
    try:
        config = parse(text.encode())
    except ProtocolError as error:
        raise ProtocolError(f"{CONFIG}: {error.detail}") from None
    return read_config(config, name, version, model)


def _read_flat(given: Mapping[str, Any], version: str | None = None) -> LoadRequest:
    parameters = dict(given)
    shares = parameters.pop(_SHARE, True)
    if type(shares) is not bool:
        raise ProtocolError(f"{_SHARE}: must be true or false")
    texts = {key: _parameter_text(key, value) for key, value in parameters.items()}
    return LoadRequest(version, adds_replica=not shares, parameters=texts)


def check_unload(body: bytes) -> None:
    """Raise ProtocolError for a body that is no request to unload. What it may ask, to unload also the models
    that were loaded along with this one, means nothing here: there are none."""
    given = _object(body).get("parameters", {})
    if type(given) is not dict:
        raise ProtocolError("parameters: must be a JSON object")
    check_unload_parameters(given)


def check_unload_parameters(parameters: Mapping[str, Any]) -> None:
    """The same for these parameters."""
    for key, value in parameters.items():
        if key != UNLOAD_DEPENDENTS:
            raise ProtocolError(
                f"{key:.80}: there is no such parameter of an unload, but {UNLOAD_DEPENDENTS}"
            )
        if type(value) is not bool:
            raise ProtocolError(f"{UNLOAD_DEPENDENTS}: must be true or false")


def endpoint_for(entry: str, parameters: Mapping[str, str], wanted: Sequence[Wanted]) -> str:
    """The name under which AMD's clients find an entry with these parameters.

    That is the entry's own name for the parameters with which it was loaded first, and NAME-0, NAME-1, ...
    for others. A name that is wanted no more is free.
    """
    by_name = {one.model: one for one in sorted(wanted, key=lambda one: one.generation)}
    for name, one in by_name.items():
        if one.entry == entry and one.parameters == parameters:
            return name
    names = itertools.chain((entry,), (f"{entry}-{index}" for index in itertools.count()))
    return next(name for name in names if name not in by_name)


def _object(body: bytes) -> dict[str, Any]:
    value = parse(body) if body.strip() else {}
    if value is None:  # what AMD's client sends where it has nothing to say
        return {}
    if type(value) is not dict:
        raise ProtocolError("the request: must be a JSON object")
    return value


def _parameter_text(name: str, value: Any) -> str:
    """A parameter of a model as `--param` has it."""
    if type(value) is bool:
        return str(value).lower()
    if type(value) in (str, int, float):
        return str(value)
    raise ProtocolError(f"{name:.80}: must be a text, a number, true or false")
