"""A producer as a process that enqueues: the results of its requests are read by their IDs, by another one.

    python -m support.chaos.enqueuer URL MODEL NAME FILE SPEED

It records what it does as `support.chaos.producer` does. It enqueues a request under the same ID until Redis
has confirmed it; started again with the same file, it begins with those that were not. SPEED multiplies the
pace.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn, TextIO

from carpool import Client
from carpool.errors import CarpoolError, UnavailableError
from support.chaos.producer import ACCEPTED, INTERVAL_S, REFUSED, RETRY_S, SENT, unconfirmed

LARGE_BYTES: Final = 20_000  # a body that is stored under a key of its own
LARGE_EVERY: Final = 10
RESULTS_KEPT_S: Final = 3600.0


class Enqueuer:
    """Enqueues, and records. `log`: a file, in lines of JSON."""

    def __init__(self, client: Client, model: str, name: str, log: TextIO) -> None:
        self._client, self._model, self._name, self._log = client, model, name, log

    def enqueue(self, number: int) -> None:
        """Enqueue the request of this number, until it is confirmed or refused."""
        name = f"{self._name}-{number}"
        payload = f"payload {number}" + " x" * (LARGE_BYTES // 2 if number % LARGE_EVERY == 0 else 0)
        while True:
            self._record(number, SENT, {name: payload})
            try:
                self._client.enqueue(self._model, payload, correlation_id=name, result_ttl=RESULTS_KEPT_S)
            except UnavailableError:
                time.sleep(RETRY_S)
            except CarpoolError:
                return self._record(number, REFUSED, {name: payload})
            else:
                return self._record(number, ACCEPTED, {name: payload})

    def _record(self, number: int, what: str, payloads: dict[str, str]) -> None:
        self._log.write(json.dumps({"number": number, "what": what, "payloads": payloads}) + "\n")
        self._log.flush()


def main(arguments: Sequence[str]) -> NoReturn:
    """Enqueue until this process is killed."""
    url, model, name, file, speed = arguments
    path = Path(file)
    again, first = unconfirmed(path)
    with path.open("a") as log, Client(url, timeout=5) as client:
        enqueuer = Enqueuer(client, model, name, log)
        for number in itertools.chain(sorted(again), itertools.count(first)):
            enqueuer.enqueue(number)
            time.sleep(INTERVAL_S / float(speed))
    raise AssertionError("numbers ended")


if __name__ == "__main__":
    main(sys.argv[1:])
