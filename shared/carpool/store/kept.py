"""Requests that are added once, and whose results are read by ID, by any process, until they expire.

The ID is the correlation ID, and names a reply stream of its own, which exists from when the request is added
until its result expires. While it exists, a request of this ID is not added again; while only the record (the
key `kept`) is left, one is added again if its sender allows that (`again_after_result`). So a program that
does not know whether its request was accepted sends it again, and gets the one result; and so does any other
that knows the ID.

Why: docs/decisions/0092, docs/decisions/0101.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Literal

from carpool.errors import OK, InternalError, InvalidArgumentError
from carpool.keys import Keys
from carpool.messages.results import Result, state_of
from carpool.rows import BODY_TTL_MS, LARGE_BODY_BYTES
from carpool.store.connection import Argument, Command, Script
from carpool.tracing import TRACEPARENT, TRACESTATE
from carpool.wire.results import check_envelope, decode_results

Presence = Literal["there", "expired", "unknown"]
RequestStatus = Literal["waiting", "in flight", "done", "failed", "dead", "unknown"]

KEEP: Final = Script("keep", for_producers=True)  # batchers load it: see `Producer.run`
TIMEOUT_S: Final = 3600.0  # of a request for whose result nobody waits, if it has no timeout
_OWNER_CHARS: Final = 16
_FINGERPRINT_CHARS: Final = 32
# Fields that differ when a request is sent again: what is left of a delay, and the span of the call.
_FIELDS_OF_A_CALL: Final = frozenset({"not_before", TRACEPARENT, TRACESTATE})
_STATUSES: Final[Mapping[bytes, RequestStatus]] = {
    b"waiting": "waiting",
    b"in-flight": "in flight",
    b"done": "done",
    b"failed": "failed",
    b"dead": "dead",
}


def keep_arguments(
    keys: Keys,
    correlation_id: str,
    fingerprint: bytes,
    known_ms: int,
    fields: Mapping[str, Argument],
    body: bytes,
    *,
    result_ttl_ms: int | None = None,
    again_after_result: bool = False,
) -> tuple[list[str], list[Argument]]:
    """The KEYS and ARGV of KEEP, which adds a request, unless it was added before. Redis replies with None if
    it is added now, else with the fingerprint of the earlier one.

    `result_ttl_ms`: how long its result is kept; None: as long as its model's. `again_after_result`: one
    whose result has expired is added again, although it is known.
    """
    script_keys = [keys.requests, keys.kept(correlation_id), keys.replies(correlation_id)]
    entry: dict[str, Argument] = {**fields, "correlation_id": correlation_id, "reply_to": correlation_id}
    stored = b""
    if len(body) < LARGE_BODY_BYTES:
        entry["body"] = body
    else:
        stored = body
        script_keys.append(keys.body(correlation_id))
        entry |= {"body_key": correlation_id, "body_bytes": len(body)}
    ttl = "-" if result_ttl_ms is None else result_ttl_ms
    again = "1" if again_after_result else ""
    flat = [part for pair in entry.items() for part in pair]
    return script_keys, [fingerprint, known_ms, ttl, again, BODY_TTL_MS, stored, *flat]


def keep_command(script_keys: Sequence[str], args: Sequence[Argument]) -> Command:
    """The command that runs KEEP with what `keep_arguments` returns. It is for a gateway: with the source, no
    batcher has to have loaded the script. Other producers run it by its hash (`Producer.run`), and have no
    permission for EVAL: with that, they could run a script that does not end, and stop Redis."""
    return ("EVAL", KEEP.source, len(script_keys), *script_keys, *args)


def fingerprint_of(content_type: str, fields: Mapping[str, Any], body: bytes) -> bytes:
    """What tells a request from another one of the same ID: its body, and what is asked for it."""
    asked = repr(sorted([one for one in fields.items() if one[0] not in _FIELDS_OF_A_CALL]))
    digest = sha256(f"{content_type}\n{asked}\n".encode())
    digest.update(body)
    return digest.hexdigest()[:_FINGERPRINT_CHARS].encode()


def owner_prefix(owner: str) -> str:
    """What the IDs of all requests of an owner begin with: a gateway shows results to their owner only."""
    return f"{sha256(owner.encode()).hexdigest()[:_OWNER_CHARS]}-"


def owner_of_tenant(tenant: str) -> str:
    """The owner of the requests of a tenant."""
    return f"tenant {tenant}"


async def presence(call: Callable[[Command], Awaitable[Any]], keys: Keys, correlation_id: str) -> Presence:
    """Whether a request has a result, or will have one ("there"); had one, which is kept no longer; or is not
    known (any more). `call` sends a command. One at a time, because permissions are for each."""
    if await call(("EXISTS", keys.replies(correlation_id))):
        return "there"
    return "expired" if await call(("EXISTS", keys.kept(correlation_id))) else "unknown"


# --- results ---------------------------------------------------------------------------------------------


def read_command(keys: Keys, correlation_ids: Sequence[str], block_ms: int = 0) -> Command:
    """The command that reads the results of these IDs, as far as they are there. With a `block_ms` of 1 or
    more it waits so long for the first."""
    block = ("BLOCK", block_ms) if block_ms else ()
    streams = [keys.replies(one) for one in correlation_ids]
    return ("XREAD", "COUNT", 1, *block, "STREAMS", *streams, *["0"] * len(streams))


def kept_result(reply: Any, correlation_id: str) -> dict[str, Any] | None:
    """The envelope in the reply to a `read_command` of this ID only; None if there was none. Raises
    InternalError if it is malformed."""
    return envelope_of(reply[0][1], correlation_id) if reply else None


def envelope_of(entries: Sequence[Any], correlation_id: str) -> dict[str, Any]:
    """The envelope in the entries of a reply stream that is for one result. Raises InternalError if it is
    malformed, which is not the caller's fault."""
    try:
        return _only_envelope(entries)
    except InvalidArgumentError as error:
        raise InternalError(
            f"its result is malformed: {error.detail}", correlation_id=correlation_id
        ) from None


def _only_envelope(entries: Sequence[Any]) -> dict[str, Any]:
    flat = entries[0][1]
    found = dict(zip(flat[::2], flat[1::2], strict=True))
    if b"results" not in found:
        raise InvalidArgumentError("results: missing")
    envelopes = decode_results(found[b"results"])
    if len(envelopes) != 1:
        raise InvalidArgumentError(f"results: {len(envelopes)} envelopes, where the one of this request is")
    check_envelope(envelopes[0])
    return envelopes[0]  # type: ignore[no-any-return]


def status_in_record(record: bytes) -> RequestStatus:
    """The status of a request by its record: see `record.lua`."""
    words = record.split(b" ")
    return _STATUSES.get(words[1], "unknown") if len(words) == 3 else "unknown"


def status_in_envelope(envelope: Mapping[str, Any]) -> RequestStatus:
    """The status of a request by its result."""
    status = envelope["status"]
    result = Result("", status, detail=None if status == OK else envelope["detail"])
    return _STATUSES[state_of(result).encode()]
