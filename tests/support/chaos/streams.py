"""What became of the texts that readers read through gateways, by front end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from support.chaos.clients import REFUSALS
from support.front_ends import BROKEN, COMPLETE, FAILED, REFUSED, Seen

LATE_S: Final = 60.0  # a text takes less than a second, and no fault lasts longer than this
_REASON_LENGTH_MAX: Final = 160


class Outage(NamedTuple):
    """When a gateway did not run, on the monotonic clock. `is_killed`: else it was terminated, and so had
    time to end what it had begun."""

    url: str
    began_s: float
    is_killed: bool
    ended_s: float = math.inf

    def explains(self, seen: Seen) -> bool:
        """Whether the connection of this text could break because of it."""
        is_then = seen.url == self.url and seen.began_s <= self.ended_s and seen.ended_s >= self.began_s
        return is_then and (self.is_killed or not seen.text)


class StreamReport(NamedTuple):
    """How the texts of a front end ended: counts, and descriptions of those with which something was wrong.

    `failed`: with an error on the stream; `refused`: with an answer in place of it; `broken`: with the
    connection, because its gateway had ended.
    `wrong`: not the beginning of the text, or not all of it although it was complete; `cut_off`: with a
    connection whose gateway had not ended; `unexpected`: refused with a status that does not mean that the
    gateway cannot serve at the moment; `late`: after more than LATE_S. `reasons`: of `failed` and
    `refused`."""

    texts: int
    complete: int
    failed: int
    refused: int
    broken: int
    longest_s: float
    wrong: Sequence[str]
    cut_off: Sequence[str]
    unexpected: Sequence[str]
    late: Sequence[str]
    reasons: Mapping[str, int]

    @property
    def is_faultless(self) -> bool:
        """Whether nothing was wrong with any text, and some were read."""
        return self.complete > 0 and not any((self.wrong, self.cut_off, self.unexpected, self.late))

    def __str__(self) -> str:
        wrong = {name: getattr(self, name) for name in ("wrong", "cut_off", "unexpected", "late")}
        found = "".join(f", {name} {len(found)}: {found[:2]}" for name, found in wrong.items() if found)
        reasons = f" {dict(self.reasons)}" if self.reasons else ""
        return (
            f"{self.texts} texts, {self.complete} complete, {self.failed} failed, {self.refused} refused, "
            f"{self.broken} broken, longest {self.longest_s:.1f} s{found}{reasons}"
        )


def judge_streams(all_seen: Iterable[Seen], outages: Sequence[Outage]) -> dict[str, StreamReport]:
    """The reports on these texts, by front end."""
    by_front_end: dict[str, list[Seen]] = {}
    for seen in all_seen:
        by_front_end.setdefault(seen.front_end, []).append(seen)
    return {name: _report(of_one, outages) for name, of_one in sorted(by_front_end.items())}


def _report(all_seen: Sequence[Seen], outages: Sequence[Outage]) -> StreamReport:
    ends = Counter(seen.end for seen in all_seen)
    return StreamReport(
        len(all_seen),
        ends[COMPLETE],
        ends[FAILED],
        ends[REFUSED],
        ends[BROKEN],
        max(seen.ended_s - seen.began_s for seen in all_seen),
        [str(seen) for seen in all_seen if not seen.is_right],
        [str(seen) for seen in all_seen if seen.end == BROKEN and not any(o.explains(seen) for o in outages)],
        [str(seen) for seen in all_seen if seen.end == REFUSED and seen.code not in REFUSALS],
        [str(seen) for seen in all_seen if seen.ended_s - seen.began_s > LATE_S],
        Counter(seen.why[:_REASON_LENGTH_MAX] for seen in all_seen if seen.end in (FAILED, REFUSED)),
    )
