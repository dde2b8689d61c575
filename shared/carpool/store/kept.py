"""Requests that are added once, and whose results can be read by name until they expire.

The name is the correlation ID, and that of a reply stream of its own. As long as the key `kept` lives, which
has the record of the request, a request of this name is not added again. The stream is there from when the
request is added until its result expires. So a program that does not know whether its request was accepted,
because a process died, sends it again and gets the one result; and so does any other that knows the name.

Why: docs/decisions/0092, docs/decisions/0101.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Literal

from carpool.errors import OK, InternalError, InvalidArgumentError
from carpool.keys import Keys
from carpool.messages.results import Result, state_of
from carpool.rows import BODY_TTL_MS
from carpool.store.connection import Argument, Command, Script
from carpool.wire.results import check_envelope, decode_results

State = Literal["waiting", "in flight", "done", "failed", "dead", "unknown"]

KEEP: Final = Script("keep", for_producers=True)  # batchers load it: see `Producer.run`
STORED_BYTES_MIN: Final = 16 * 1024  # of a body that is stored under a key of its own
TIMEOUT_S: Final = 3600.0  # of a request for whose result nobody waits, if it has no timeout
_OWNER_CHARS: Final = 16
_FINGERPRINT_CHARS: Final = 32
_STATES: Final[Mapping[bytes, State]] = {
    b"waiting": "waiting",
    b"in-flight": "in flight",
    b"done": "done",
    b"failed": "failed",
    b"dead": "dead",
}


def keep_arguments(
    keys: Keys,
    name: str,
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
    names = [keys.requests, keys.kept(name), keys.replies(name)]
    entry: dict[str, Argument] = {**fields, "correlation_id": name, "reply_to": name}
    stored = b""
    if len(body) < STORED_BYTES_MIN:
        entry["body"] = body
    else:
        stored = body
        names.append(keys.body(name))
        entry |= {"body_key": name, "body_bytes": len(body)}
    ttl = "-" if result_ttl_ms is None else result_ttl_ms
    again = "1" if again_after_result else ""
    flat = [part for pair in entry.items() for part in pair]
    return names, [fingerprint, known_ms, ttl, again, BODY_TTL_MS, stored, *flat]


def keep_command(
    keys: Keys,
    name: str,
    fingerprint: bytes,
    known_ms: int,
    fields: Mapping[str, Argument],
    body: bytes,
    result_ttl_ms: int | None = None,
) -> Command:
    """The command that runs KEEP: see `keep_arguments`."""
    names, args = keep_arguments(keys, name, fingerprint, known_ms, fields, body, result_ttl_ms=result_ttl_ms)
    return ("EVAL", KEEP.source, len(names), *names, *args)


def fingerprint_of(content_type: str, fields: Mapping[str, Any], body: bytes) -> bytes:
    """What tells a request from another one of the same name: its body, and what is asked for it."""
    asked = repr(sorted(fields.items()))
    digest = sha256(f"{content_type}\n{asked}\n".encode())
    digest.update(body)
    return digest.hexdigest()[:_FINGERPRINT_CHARS].encode()


def owner_prefix(owner: str) -> str:
    """What the names of all requests of an owner begin with: a gateway shows results to their owner only."""
    return f"{sha256(owner.encode()).hexdigest()[:_OWNER_CHARS]}-"


def owner_of_tenant(tenant: str) -> str:
    """The owner of the requests of a tenant."""
    return f"tenant {tenant}"


# --- results ---------------------------------------------------------------------------------------------


def read_command(keys: Keys, names: Sequence[str], block_ms: int = 0) -> Command:
    """The command that reads the results of these names, as far as they are there. With a `block_ms` of 1 or
    more it waits so long for the first."""
    block = ("BLOCK", block_ms) if block_ms else ()
    return ("XREAD", "COUNT", 1, *block, "STREAMS", *map(keys.replies, names), *["0"] * len(names))


def kept_result(reply: Any, name: str) -> dict[str, Any] | None:
    """The envelope in the reply to a `read_command` of this name only; None if there was none. Raises
    InternalError if it is malformed."""
    return envelope_of(reply[0][1], name) if reply else None


def envelope_of(entries: Sequence[Any], name: str) -> dict[str, Any]:
    """The envelope in the entries of a reply stream that is for one result. Raises InternalError if it is
    malformed, which is no fault of who asks."""
    try:
        return _only_envelope(entries)
    except InvalidArgumentError as error:
        raise InternalError(f"its result is malformed: {error.detail}", correlation_id=name) from None


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


def state_in_record(record: bytes) -> State:
    """The state of a request by its record: see `record.lua`."""
    words = record.split(b" ")
    return _STATES.get(words[1], "unknown") if len(words) == 3 else "unknown"


def state_in_envelope(envelope: Mapping[str, Any]) -> State:
    """The state of a request by its result."""
    status = envelope["status"]
    result = Result("", status, detail=None if status == OK else envelope["detail"])
    return _STATES[state_of(result).encode()]
