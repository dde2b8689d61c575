"""What the page of a model shows beside its row. Its batcher tells the detail while it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from carpool.keys import Keys
from carpool.store.connection import Command, CommandError
from carpool.store.detail import WATCHED_MS
from carpool.store.directory import texts
from carpool.wire.detail import ModelDetail
from carpool.wire.traffic import read_shares
from carpool_console.links import Links


class ModelDetails(NamedTuple):
    """A model that somebody looks at. `detail` is None if its batcher does not tell; `problem`: why that may
    be, if Redis refuses to ask."""

    detail: ModelDetail | None
    registration: Mapping[str, str]
    overrides: Mapping[str, str]
    shares: Mapping[str, int]
    problem: str = ""


def read_details(links: Links, prefix: str, models: Sequence[str]) -> dict[str, ModelDetails]:
    """The details of these models, in one round trip. Raises LinkError."""
    commands: list[tuple[str, Command]] = []
    for model in models:
        keys = Keys(model, prefix)
        asked: tuple[Command, ...] = (
            ("SET", keys.watched, 1, "PX", WATCHED_MS),
            ("GET", keys.detail),
            ("HGETALL", keys.registration),
            ("HGETALL", keys.overrides),
            ("HGETALL", keys.shares),
        )
        commands += [(keys.requests, command) for command in asked]
    replies = iter(links.call_all(commands, cuts=False) if commands else ())
    found = {}
    for model in models:
        watching, detail, *hashes = (next(replies) for _ in range(5))
        registration, overrides, shares = (
            {} if isinstance(reply, CommandError) else texts(reply) for reply in hashes
        )
        problems = [str(reply) for reply in (watching, detail) if isinstance(reply, CommandError)]
        is_there = isinstance(detail, bytes)
        found[model] = ModelDetails(
            ModelDetail.decode(detail) if is_there else None,
            registration,
            overrides,
            read_shares(shares),
            "; ".join(problems),
        )
    return found
