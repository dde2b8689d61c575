"""What operators did to a model, or to nodes: it is written with each change, and read here."""

from __future__ import annotations

from carpool.keys import Keys, NodesKeys
from carpool.store.connection import Link
from carpool.wire.audit import Action, decode_action


def recent_actions(link: Link, keys: Keys | NodesKeys, count: int, before: str | None = None) -> list[Action]:
    """The last actions, the newest first, at most `count`. `before`: the ID of one, for those before it.

    Raises LinkError and CommandError. O(count).
    """
    end = "+" if before is None else f"({before}"
    entries = link.call("XREVRANGE", keys.audit, end, "-", "COUNT", count)
    return [decode_action(entry_id, flat) for entry_id, flat in entries]
