"""What operators have ordered of a model: that it is paused, and which of its workers drain.

`carpool:{MODEL}:paused` is a hash: `mode` (wait or refuse), `reason`, `who`, `since` and `refuses_from` (ms
of Redis's clock). `carpool:{MODEL}:drained` is a hash, by the name of a worker, of JSON maps of `who` and
`since`.

Why: docs/decisions/0114.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

WAIT: Final = "wait"
REFUSE: Final = "refuse"
REASON_CHARS_MAX: Final = 300


class Paused(NamedTuple):
    """A model is paused. `refuses`: what arrives from `refuses_from_ms` on is refused, and does not wait."""

    refuses: bool
    reason: str
    who: str
    since_ms: int
    refuses_from_ms: int = 0

    def as_json(self) -> dict[str, object]:
        """As a plain dict."""
        return self._asdict()

    def describe(self) -> str:
        """For people, such as `paused since 2026-11-27 14:00:05 UTC by ann@host: new weights`."""
        how = "paused, and refuses requests," if self.refuses else "paused"
        reason = f": {self.reason}" if self.reason else ""
        return f"{how} since {time_of(self.since_ms)} by {self.who or 'somebody'}{reason}"


class About(NamedTuple):
    """What a worker tells about itself beside what its processes take: since when it serves, how long its
    leases are, the device of each of its processes, and how many died in the last minute (`deaths`).

    Why: docs/decisions/0123.
    """

    since_ms: int
    lease_ms: int
    devices: Sequence[str]
    deaths: int = 0

    def device(self, number: int) -> str:
        """That of the process of this number; empty if it is not told."""
        return self.devices[number] if 0 <= number < len(self.devices) else ""


class DrainOrder(NamedTuple):
    """A worker drains because an operator says so."""

    who: str
    since_ms: int

    def describe(self) -> str:
        """For people, such as `drained since 2026-11-27 14:00:05 UTC by ann@host`."""
        return f"drained since {time_of(self.since_ms)} by {self.who or 'somebody'}"


def read_paused(texts: Mapping[str, str]) -> Paused | None:
    """From the hash; None if it is empty. What a user wrote by hand counts as far as it can be read."""
    if not texts:
        return None
    refuses, since_ms = texts.get("mode") == REFUSE, _milliseconds(texts.get("since", ""))
    refuses_from_ms = (_milliseconds(texts.get("refuses_from", "")) or since_ms) if refuses else 0
    return Paused(refuses, texts.get("reason", ""), texts.get("who", ""), since_ms, refuses_from_ms)


def read_drain_order(text: str) -> DrainOrder:
    """From the value of a worker."""
    try:
        found = json.loads(text)
        return DrainOrder(str(found["who"]), int(found["since"]))
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return DrainOrder("", 0)  # a user wrote it by hand


def encode_about(about: About) -> str:
    """As the field `about` of what a worker tells of its memory."""
    return json.dumps(
        {
            "since": about.since_ms,
            "lease": about.lease_ms,
            "devices": list(about.devices),
            "deaths": about.deaths,
        }
    )


def read_about(text: str) -> About | None:
    """From that; None if it is not there, or of another version."""
    try:
        found = json.loads(text)
        return About(
            int(found["since"]),
            int(found["lease"]),
            [str(one) for one in found["devices"]],
            int(found.get("deaths", 0)),
        )
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return None


def check_reason(reason: str) -> str:
    """A reason on one line. Raises ValueError if it is too long."""
    reason = " ".join(reason.split())
    if len(reason) > REASON_CHARS_MAX:
        raise ValueError(f"reason: {len(reason)} characters; at most {REASON_CHARS_MAX}")
    return reason


def time_of(at_ms: int) -> str:
    """A time of Redis's clock for people."""
    return f"{datetime.fromtimestamp(at_ms // 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _milliseconds(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0
