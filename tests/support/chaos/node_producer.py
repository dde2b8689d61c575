"""A producer as a process that asks for answers of the model `echo`, and records each request in a file.

    python -m support.chaos.node_producer URL NAME FILE RATE

It sends RATE requests/s, each of which has a minute, and repeats none. After SIGTERM it waits for what is
outstanding, and writes FILE: a JSON list of records. Times are those of the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from carpool.client.aio import AsyncClient
from carpool.errors import CarpoolError

INTERVAL_S: Final = 0.02
TIMEOUT_S: Final = 60.0
IN_FLIGHT_MAX: Final = 2000  # on a machine that does not sustain the rate


class Record(NamedTuple):
    """A request: when it was sent and answered, what the answer begins with, and what was wrong with it."""

    sent_s: float
    answered_s: float
    label: str
    error: str


async def produce(url: str, name: str, rate: int, stop: asyncio.Event) -> list[Record]:
    """Send until `stop`; returns a record of each request."""
    records: list[Record] = []
    tasks: set[asyncio.Task[None]] = set()
    async with AsyncClient(url) as client:

        async def ask(body: str) -> None:
            sent_s, label, error = time.monotonic(), "", ""
            try:
                label, _, echoed = (await client.infer("echo", body, timeout=TIMEOUT_S)).partition(":")
                error = "" if echoed == body else f"answered with {echoed}"
            except CarpoolError as raised:
                error = f"{type(raised).__name__}: {raised}"
            records.append(Record(sent_s, time.monotonic(), label, error))

        number, due_s = 0, time.monotonic()
        due = 0.0  # how many are to be sent by now
        while not stop.is_set():
            due += rate * INTERVAL_S if len(tasks) < IN_FLIGHT_MAX else 0.0
            while number < int(due):
                number += 1
                tasks.add(task := asyncio.create_task(ask(f"{name}-{number}")))
                task.add_done_callback(tasks.discard)
            due_s = max(due_s + INTERVAL_S, time.monotonic() - INTERVAL_S)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await asyncio.gather(*tasks)
    assert len(records) == number, "each request has a record"
    return records


def main(arguments: Sequence[str]) -> int:
    """Send until SIGTERM."""
    url, name, file, rate = arguments

    async def run() -> list[Record]:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        return await produce(url, name, int(rate), stop)

    Path(file).write_text(json.dumps(asyncio.run(run())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
