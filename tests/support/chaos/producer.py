"""A producer as a process: sends requests at a steady pace, and records what it knows in a file.

    python -m support.chaos.producer URL MODEL NAME FILE [SPEED]

Each entry is recorded before it is sent, and again with its outcome. What Redis did not confirm is sent again
under the same correlation IDs until it does; a producer that is started again with the same file begins with
that. SPEED multiplies the pace.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from redis import Redis, RedisError, ResponseError
from redis.backoff import NoBackoff
from redis.retry import Retry

from carpool.keys import Keys
from support.load import Fields, entries

INTERVAL_S: Final = 0.02
ENTRIES_PER_INTERVAL: Final = 3
RETRY_S: Final = 0.05  # after Redis could not be reached
SENT, ACCEPTED, REFUSED = "sent", "accepted", "refused"

Entry = tuple[int, Fields, Mapping[str, str]]  # its number, its fields, the payloads by correlation ID


def unconfirmed(path: Path) -> tuple[set[int], int]:
    """The numbers of the entries whose last record says that they were sent, and the next new number."""
    last: dict[int, str] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line) if line.endswith("}") else None  # the last one may be cut off
            if record is not None:
                last[record["number"]] = record["what"]
    return {number for number, what in last.items() if what == SENT}, max(last, default=-1) + 1


class Producer:
    """Sends, and records. `log`: a file, in lines of JSON."""

    def __init__(self, url: str, model: str, log: TextIO) -> None:
        self._redis: Any = Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=5)
        self._requests = Keys(model).requests
        self._log = log

    def send(self, batch: Sequence[Entry]) -> list[Entry]:
        """Send entries. Returns those that were not confirmed."""
        pipeline = self._redis.pipeline(transaction=False)
        for entry in batch:
            self._record(entry, SENT)
            pipeline.xadd(self._requests, entry[1])
        self._log.flush()
        try:
            replies = pipeline.execute(raise_on_error=False)
        except RedisError:
            return list(batch)
        left: list[Entry] = []
        for entry, reply in zip(batch, replies, strict=True):
            if isinstance(reply, ResponseError):
                self._record(entry, REFUSED)
            elif isinstance(reply, Exception):
                left.append(entry)
            else:
                self._record(entry, ACCEPTED)
        self._log.flush()
        return left

    def _record(self, entry: Entry, what: str) -> None:
        number, _, payloads = entry
        self._log.write(json.dumps({"number": number, "what": what, "payloads": payloads}) + "\n")


def main(arguments: Sequence[str]) -> NoReturn:
    """Send until this process is killed."""
    url, model, name, file, speed = arguments
    path = Path(file)
    again, first = unconfirmed(path)
    numbered = enumerate(entries(name))
    per_interval = int(ENTRIES_PER_INTERVAL * float(speed))
    with path.open("a") as log:
        producer = Producer(url, model, log)
        before = itertools.islice(numbered, first)
        left: list[Entry] = [
            (number, fields, payloads) for number, (fields, payloads) in before if number in again
        ]
        while True:
            new = itertools.islice(numbered, 0 if left else per_interval)
            due = left + [(number, fields, payloads) for number, (fields, payloads) in new]
            left = producer.send(due)
            time.sleep(RETRY_S if left else INTERVAL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
