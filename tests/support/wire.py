"""Shared by the tests of `carpool.wire`: entries as Redis returns them, and strategies for their contents."""

from __future__ import annotations

from typing import Any, Final

import msgpack
from hypothesis import strategies as st

from carpool.keys import CORRELATION_ID
from carpool.messages import CONTENT_TYPES, Entry
from carpool.model_settings import ModelSettings
from carpool.wire.requests import Decoded, decode_entry

DEFAULTS: Final = ModelSettings()
ENTRY_ID: Final = "1700000000123-4"
ARRIVAL_US: Final = 1700000000123_000

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # without lone surrogates
names = st.from_regex(CORRELATION_ID, fullmatch=True)
request_maps = st.fixed_dictionaries(
    {"correlation_id": names, "body": st.binary(max_size=20)},
    optional={
        "content_type": st.sampled_from(CONTENT_TYPES),
        "reply_to": names,
        "expiration": st.integers(1, 10**9),
        "priority": st.integers(0, 9),
        "lane": texts,
        "cost": st.integers(0, 1 << 40),
        "tenant": names,
    },
)


def flat_of(fields: dict[str, Any]) -> list[bytes]:
    """Field, value, field, value, as Redis returns an entry."""
    return [part if type(part) is bytes else str(part).encode() for pair in fields.items() for part in pair]


def decode(fields: dict[str, Any], model: ModelSettings = DEFAULTS) -> tuple[Entry, list[Decoded]]:
    """Decode an entry with these fields."""
    return decode_entry(ENTRY_ID.encode(), flat_of(fields), model)


def decode_packed(maps: Any, shared: dict[str, Any] | None = None) -> tuple[Entry, list[Decoded]]:
    """Decode a packed entry with these requests and these shared fields."""
    return decode({"requests": msgpack.packb(maps)} | (shared or {}))
