"""The fields of requests -> runs and refusals: what an ordinary request and columns have in common.

What a run needs is decoded once, and its correlation IDs and bodies are checked all at once, so that a
request costs almost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from carpool.errors import CarpoolError, InvalidArgumentError
from carpool.keys import CORRELATION_ID_CHARS_MAX, CORRELATION_ID_LETTERS
from carpool.messages.requests import PRIORITY_DEFAULT, PRIORITY_LEVELS, Entry, Run
from carpool.messages.results import Refusal
from carpool.model_settings import ModelSettings
from carpool.rows import Body, Rows, StoredBody
from carpool.tracing import TRACEPARENT, TRACESTATE
from carpool.wire.field_hints import field_warnings, meant_body, meant_field
from carpool.wire.request_fields import (
    CARPOOL_FIELDS,
    MAX_COST,
    PASSED_ON_FIELDS,
    STORED_BODY_FIELDS,
    Fields,
    count_ids,
    read_content_type,
    read_extra_fields,
    read_integer,
    read_lane,
    read_name,
    read_valid_content_type,
    read_valid_name,
    read_version,
)
from carpool.wire.sequence_fields import Decoded, read_sequence, read_valid_sequence

__all__ = [
    "Decoded",
    "body_field",
    "check_requests",
    "decode_attributes",
    "decode_request",
    "decode_without_bodies",
    "delay_from",
    "refuse",
    "refuse_all",
]

MAX_EXPIRATION_MS: Final = 1 << 53

_ID_LETTERS: Final = CORRELATION_ID_LETTERS.encode()


def decode_request(entry: Entry, raw: Fields, settings: ModelSettings, default_id: str) -> Run | Refusal:
    """One request: a run of one, or why it is refused."""
    try:
        body = _read_body(raw, settings)
        if type(body) is StoredBody:
            others = {name: value for name, value in raw.items() if name not in STORED_BODY_FIELDS}
        else:
            others = raw
        correlation_id = read_name(raw, "correlation_id", default_id)
        run = Run(entry, [correlation_id or default_id], [body])
        decode_attributes(run, others, settings)
        return run
    except CarpoolError as error:
        return refuse(entry, raw, default_id, error)


def decode_attributes(run: Run, raw: Fields, settings: ModelSettings) -> None:
    """Set all attributes of a run: everything besides its bodies and correlation IDs."""
    run.arrival_us = run.entry.arrival_us
    asked_ms = None
    if raw:
        run.content_type = read_content_type(raw)
        run.reply_to = read_name(raw, "reply_to", None)
        if "reply_columns" in raw:
            run.reply_columns = read_integer(raw, "reply_columns", 0, 0, 1) == 1
        if "stream" in raw:
            run.stream = read_integer(raw, "stream", 0, 0, 1) == 1
        run.priority = read_integer(raw, "priority", PRIORITY_DEFAULT, 0, PRIORITY_LEVELS - 1)
        run.cost = read_integer(raw, "cost", 1, 0, MAX_COST)
        run.lane = read_lane(raw)
        if "version" in raw:
            run.version = read_version(raw)
        if "expiration" in raw:
            asked_ms = read_integer(raw, "expiration", 0, 1, MAX_EXPIRATION_MS)
        if not raw.keys() <= CARPOOL_FIELDS:
            run.tenant = read_name(raw, "tenant", "") or ""
            run.extra = read_extra_fields(raw)
            if settings.unknown_fields == "refuse":
                _refuse_unknown(run.extra)
        run.sequence = read_sequence(raw)
    expiration_ms = settings.expiration_ms(run.priority, asked_ms)
    if expiration_ms is not None:
        run.deadline_us = run.arrival_us + expiration_ms * 1000
    if "not_before" in raw:
        _delay(run, read_integer(raw, "not_before", 0, 0, MAX_EXPIRATION_MS), settings)


def _delay(run: Run, not_before_ms: int, settings: ModelSettings) -> None:
    """A run is to be dispatched at this time after the arrival of its entry, and not before. For all that is
    measured and ordered by arrivals, it arrives then."""
    if not not_before_ms:
        return
    if not_before_ms > settings.max_expiration_ms:
        raise InvalidArgumentError(
            f"not_before: {not_before_ms} is over this model's max_expiration_ms {settings.max_expiration_ms}"
        )
    if run.sequence is not None:
        raise InvalidArgumentError("not_before: a request of a sequence is processed after the one before it")
    if settings.preserve_ordering:
        raise InvalidArgumentError(
            "not_before: this model's results come in the order of arrival (preserve_ordering), so all later "
            "ones would be delayed, too"
        )
    run.not_before_ms = not_before_ms
    run.arrival_us += not_before_ms * 1000
    if run.deadline_us is not None and run.deadline_us <= run.arrival_us:
        raise InvalidArgumentError(
            f"not_before: {not_before_ms}, but the request expires "
            f"{(run.deadline_us - run.entry.arrival_us) // 1000} ms after its arrival, before that"
        )


def delay_from(run: Run, arrival_us: int) -> None:
    """The arrival of a run's entry is this one, and not the one with which the run was decoded."""
    run.arrival_us = arrival_us + run.not_before_ms * 1000


def _refuse_unknown(extra: Iterable[str]) -> None:
    for name in extra:
        if name not in PASSED_ON_FIELDS:
            meant = meant_field(name)
            is_other = meant not in ("", name)
            hint = f"did you mean {meant!r}?" if is_other else "this model takes no others (unknown_fields)"
            raise InvalidArgumentError(f"{name!r:.60}: is not a field that Carpool knows; {hint}")


def _read_body(raw: Fields, settings: ModelSettings) -> Body:
    body = raw.get("body")
    if body is None:
        if "body_key" not in raw:
            meant = meant_body(_other_names(raw))
            hint = f"; is it what you sent as {meant!r:.60}?" if meant else ""
            raise InvalidArgumentError(f"body: missing{hint}")
        name = read_name(raw, "body_key", None)
        if "body_bytes" not in raw:
            raise InvalidArgumentError("body_bytes: missing; a body under a key of its own needs its length")
        size_bytes = read_integer(raw, "body_bytes", 0, 0, 1 << 53)
        check_body_size(size_bytes, settings)
        return StoredBody(name or "", size_bytes)
    if type(body) is str:
        body = body.encode()
    if type(body) is not bytes:
        raise InvalidArgumentError("body: must be bytes")
    check_body_size(len(body), settings)
    return body


def check_body_size(size_bytes: int, settings: ModelSettings) -> None:
    """Raises InvalidArgumentError if a body is larger than the model takes."""
    if size_bytes > settings.max_body_bytes:
        raise InvalidArgumentError(
            f"body: {size_bytes} bytes; this model takes at most {settings.max_body_bytes}"
        )


def body_field(body: Any) -> Fields:
    """The fields of a request that has this body."""
    return {"body": body}


def check_requests(
    run: Run, attributes: Fields, settings: ModelSettings, fields_of: Callable[[Any], Fields]
) -> list[Decoded]:
    """A run whose IDs and bodies are still unchecked: the run, if all are valid.

    Otherwise, in their order, runs of the valid requests, and a refusal of each other one. `fields_of` maps a
    body, as it was sent, to the fields of its request.
    """
    ids, bodies = run.correlation_ids, run.bodies
    if _are_ids(ids) and (isinstance(bodies, Rows) or _are_bodies(bodies, settings)):
        return [run]
    decoded: list[Decoded] = []
    part_ids: list[str] = []
    part_bodies: list[Body] = []
    for at, name in enumerate(ids):
        raw = {"correlation_id": name, **fields_of(bodies[at])}
        try:
            body = _read_body(raw, settings)
            correlation_id = read_name(raw, "correlation_id", "") or ""
        except CarpoolError as error:
            decoded.append(refuse(run.entry, {**attributes, **raw}, run.entry.id, error))
            continue
        if not decoded or type(decoded[-1]) is not Run:
            part_ids, part_bodies = [], []
            decoded.append(replace(run, correlation_ids=part_ids, bodies=part_bodies))
        part_ids.append(correlation_id)
        part_bodies.append(body)
    return decoded


def refuse_all(
    entry: Entry, requests: Sequence[Fields], attributes: Fields, settings: ModelSettings, error: CarpoolError
) -> list[Decoded]:
    """The refusals of requests whose attributes are invalid, which is the `error`. Those whose body or ID is,
    too, are told that."""
    ids, bodies = [raw["correlation_id"] for raw in requests], [raw["body"] for raw in requests]
    if _are_ids(ids) and _are_bodies(bodies, settings):
        return _refuse_alike(entry, ids, {**attributes, "body": bodies[0]}, error)
    return [decode_request(entry, {**attributes, **raw}, settings, entry.id) for raw in requests]


def decode_without_bodies(
    entry: Entry, ids: list[Any], attributes: Fields, settings: ModelSettings
) -> list[Decoded]:
    """Requests with these IDs and attributes, which are all invalid or have a body under a key of its own."""
    if _are_ids(ids) and "body_key" not in attributes:
        try:
            _read_body(attributes, settings)
        except CarpoolError as error:
            return _refuse_alike(entry, ids, attributes, error)
    return [decode_request(entry, {**attributes, "correlation_id": name}, settings, entry.id) for name in ids]


def _refuse_alike(entry: Entry, ids: list[str], attributes: Fields, error: CarpoolError) -> list[Decoded]:
    """The refusal of requests that differ only in their IDs and bodies; one for each if they break sequences,
    because each has a place of its own there."""
    refused = refuse(entry, attributes, entry.id, error)
    if refused.breaks is None:
        return [refused._replace(correlation_ids=ids)]
    return [refused._replace(correlation_ids=[name]) for name in ids]


def _are_ids(ids: Sequence[Any]) -> bool:
    """Whether these are all valid correlation IDs."""
    try:
        joined = "".join(ids).encode("ascii")
    except (TypeError, UnicodeEncodeError):
        return False
    lengths = set(map(len, ids))
    return (
        not joined.translate(None, _ID_LETTERS)
        and 0 not in lengths
        and max(lengths) <= CORRELATION_ID_CHARS_MAX
    )


def _are_bodies(bodies: Sequence[Any], settings: ModelSettings) -> bool:
    """Whether these are all bytes of an allowed length."""
    return set(map(type, bodies)) == {bytes} and max(map(len, bodies)) <= settings.max_body_bytes


def refuse(entry: Entry, raw: Fields, default_id: str, error: CarpoolError) -> Refusal:
    """A Refusal, addressed by the request's own correlation ID and `reply_to` as far as these are valid."""
    return Refusal(
        entry,
        [read_valid_name(raw, "correlation_id", default_id) or default_id],
        read_valid_name(raw, "reply_to", None),
        read_valid_content_type(raw),
        error.status,
        "input",
        error.detail,
        body_names=_stored_names_in(raw),
        breaks=read_valid_sequence(raw),
        warnings=field_warnings(_other_names(raw)),
        fields={name: raw.get(name) for name in (TRACEPARENT, TRACESTATE)} if TRACEPARENT in raw else None,
    )


def _other_names(raw: Fields) -> Iterator[str]:
    """The names of fields that are not in CARPOOL_FIELDS, in the order in which they were sent."""
    return (str(name) for name in raw if name not in CARPOOL_FIELDS)


def _stored_names_in(raw: Fields) -> list[str]:
    """The names of stored bodies in the fields of a request or of columns, as far as these are valid.

    At most one for each correlation ID: what an entry refers to is as limited as its requests. Others expire.
    """
    if raw.get("body") is not None:
        return []
    bodies = raw.get("bodies")
    elements = bodies[: count_ids(raw)] if type(bodies) is list and "correlation_ids" in raw else [raw]
    names = [read_valid_name(element, "body_key", None) for element in elements if type(element) is dict]
    return [name for name in names if name is not None]
