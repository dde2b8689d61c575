"""Requests that are added once, and whose results can be read by name until they expire.

The name is the correlation ID, and that of a reply stream of its own. As long as the key `kept` lives, a
request of this name is not added again. The stream is there from when the request is added until its result
expires. So a program that does not know whether its request was accepted, because a process died, sends it
again and gets the one result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from carpool.errors import InvalidArgumentError
from carpool.keys import Keys
from carpool.rows import BODY_TTL_MS
from carpool.store.connection import Argument, Command, Script
from carpool.wire.results import check_envelope, decode_results

STORED_BYTES_MIN: Final = 16 * 1024  # of a body that is stored under a key of its own
_KEEP: Final = Script("keep")


def keep_command(
    keys: Keys,
    name: str,
    fingerprint: bytes,
    known_ms: int,
    fields: Mapping[str, Argument],
    body: bytes,
) -> Command:
    """The command that adds a request, unless it was added before. Redis replies with None if it is added
    now, else with the fingerprint of the earlier one."""
    names = [keys.requests, keys.kept(name), keys.replies(name)]
    entry: dict[str, Argument] = {**fields, "correlation_id": name, "reply_to": name}
    stored = b""
    if len(body) < STORED_BYTES_MIN:
        entry["body"] = body
    else:
        stored = body
        names.append(keys.body(name))
        entry |= {"body_key": name, "body_bytes": len(body)}
    flat = [part for pair in entry.items() for part in pair]
    return ("EVAL", _KEEP.source, len(names), *names, fingerprint, known_ms, BODY_TTL_MS, stored, *flat)


def read_command(keys: Keys, name: str, block_ms: int) -> Command:
    """The command that reads the result, and waits for it so long; 0: not at all."""
    block = ("BLOCK", block_ms) if block_ms else ()
    return ("XREAD", "COUNT", 1, *block, "STREAMS", keys.replies(name), "0")


def kept_result(reply: Any) -> dict[str, Any] | None:
    """The envelope in the reply to `read_command`; None if there was none. Raises InvalidArgumentError if it
    is malformed."""
    if not reply:
        return None
    fields = reply[0][1][0][1]
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    if b"results" not in found:
        raise InvalidArgumentError("results: missing")
    (envelope,) = decode_results(found[b"results"])
    check_envelope(envelope)
    return envelope  # type: ignore[no-any-return]
