"""An operator withdraws requests: as their producer would, and it stands in the audit."""

from __future__ import annotations

from carpool.keys import CORRELATION_ID, Keys
from carpool.store.connection import Link
from carpool.store.directory import no_errors
from carpool.wire.audit import Actor, append_command


def withdraw(link: Link, keys: Keys, correlation_id: str, *, actor: Actor) -> None:
    """Ask that the requests of this correlation ID that wait are answered CANCELLED.

    The batcher does it, usually at once; requests in flight are not affected, unless their model steps.
    Raises ValueError if the ID is not valid, LinkError and CommandError.
    """
    if not CORRELATION_ID.fullmatch(correlation_id):
        raise ValueError("correlation ID: must have 1 to 128 of A-Z a-z 0-9 . _ : -")
    *_, executed = no_errors(
        link.call_many(
            ("MULTI",),
            ("XADD", keys.requests, "*", "withdraw", correlation_id),
            append_command(keys.audit, actor, "withdraw", {"correlation ID": correlation_id}),
            ("EXEC",),
        )
    )
    no_errors(executed)
