"""The program of HTTP clients: send requests at a steady pace, and record what is known of them in a file.

    python -m support.chaos.client ADDRESSES MODEL NAME FILE

ADDRESSES: `host:port` of gateways, with commas. There are CLIENTS clients, each a thread with a connection. A
request in one of the forms below is recorded before it is sent, and then each of its answers, or that there
was none. Clients send a request with an Idempotency-Key until it has a result: to the next gateway each time.
After SIGTERM they finish what they began, and end.

    plain   a body; not repeated
    keyed   a body with an Idempotency-Key, now and then sent twice although it was answered
    later   the same with `Prefer: respond-async`; then its result is fetched
    lines   several bodies in one call; not repeated
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from typing import Any, Final, NamedTuple, NoReturn, TextIO

from support.models.hashing import RECORDED

CLIENTS: Final = 8
PAUSE_S: Final = 0.04  # between two requests of a client
LINES: Final = 5
REFUSING_STATUSES: Final = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
LARGE_BYTES: Final = 20_000  # a body that is stored under a key of its own
PATIENCE_S: Final = 60.0  # for the answer of a request that is not repeated
RETRY_AFTER_S: Final = 3.0  # without an answer one that may be repeated is sent to another gateway
RETRY_PAUSE_S: Final = 0.05
GIVEN_UP_S: Final = 90.0

SENT, ANSWERED, BROKEN, SILENT, GIVEN_UP = "sent", "answered", "broken", "silent", "given up"
BYTES: Final = {"Content-Type": "application/octet-stream"}


class Reply(NamedTuple):
    """What became of one call: ANSWERED, with a code; BROKEN, the connection; or SILENT, nothing in
    time."""

    what: str
    code: int = 0
    headers: Mapping[str, str] = {}
    body: bytes = b""


class Log:
    """The file of records, lines of JSON."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def write(self, name: str, what: str, **more: Any) -> None:
        """Record this of the request with that name."""
        line = json.dumps({"name": name, "what": what, **more}) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()


class Client:
    """One client. `at`: the number of the gateway to which it is connected."""

    def __init__(self, addresses: list[str], model: str, name: str, log: Log) -> None:
        self._addresses, self._name, self._log = addresses, name, log
        self._path = f"/carpool/v1/models/{model}/infer"
        self._random = random.Random(name)
        self._at = self._random.randrange(len(addresses))
        self._connection: HTTPConnection | None = None

    def run(self, stopping: threading.Event) -> None:
        """Send requests until it is to stop."""
        forms: tuple[Callable[[str], None], ...] = (
            self._plain, self._keyed, self._lines, self._keyed, self._later,
        )  # fmt: skip
        for number, form in enumerate(itertools.cycle(forms)):
            if stopping.wait(PAUSE_S):
                return
            form(f"{RECORDED}{self._name}-{number}")

    # --- forms ---------------------------------------------------------------------------------------------

    def _plain(self, name: str) -> None:
        body = self._body(name)
        self._log.write(name, SENT, form="plain", payloads=[body])
        reply = self._call("POST", self._path, body.encode(), BYTES, PATIENCE_S)
        self._record(name, reply, [reply.body.decode()] if reply.code == 200 else [])

    def _keyed(self, name: str) -> None:
        body = self._body(name)
        self._log.write(name, SENT, form="keyed", payloads=[body])
        headers = {**BYTES, "Idempotency-Key": name}
        times = 2 if self._random.random() < 0.2 else 1
        for _ in range(times):
            self._until_answered(name, lambda: self._call("POST", self._path, body.encode(), headers))

    def _later(self, name: str) -> None:
        body = self._body(name)
        self._log.write(name, SENT, form="later", payloads=[body])
        headers = {**BYTES, "Idempotency-Key": name, "Prefer": "respond-async"}

        def ask() -> Reply:
            accepted = self._call("POST", self._path, body.encode(), headers)
            if accepted.code != 202:
                return accepted
            return self._call("GET", accepted.headers["location"], b"", {"Prefer": "wait=2"})

        self._until_answered(name, ask)

    def _lines(self, name: str) -> None:
        payloads = [f"{name}.{at}" for at in range(LINES)]
        self._log.write(name, SENT, form="lines", payloads=payloads)
        body = "\n".join(map(json.dumps, payloads)).encode()
        reply = self._call("POST", f"{self._path}_many", body, {}, PATIENCE_S)
        lines = [json.loads(line) for line in reply.body.splitlines()] if reply.code == 200 else []
        self._record(name, reply, [_result_of(line) for line in lines])

    def _body(self, name: str) -> str:
        return f"{name} {'x' * LARGE_BYTES}" if self._random.random() < 0.1 else name

    # --- calls ---------------------------------------------------------------------------------------------

    def _until_answered(self, name: str, ask: Callable[[], Reply]) -> None:
        """Repeat a call that may be repeated until there is a result."""
        end_s = time.monotonic() + GIVEN_UP_S
        while time.monotonic() < end_s:
            reply = ask()
            self._record(name, reply, [reply.body.decode()] if reply.code == 200 else [])
            if reply.code == 200:
                return
            if reply.what == ANSWERED:
                self._move()
            time.sleep(RETRY_PAUSE_S)
        self._log.write(name, GIVEN_UP)

    def _record(self, name: str, reply: Reply, results: list[str | None]) -> None:
        correlation_id = reply.headers.get("carpool-correlation-id", "")
        self._log.write(name, reply.what, code=reply.code, correlation_id=correlation_id, results=results)

    def _call(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float = RETRY_AFTER_S,
    ) -> Reply:
        try:
            if self._connection is None:
                host, _, port = self._addresses[self._at].partition(":")
                self._connection = HTTPConnection(host, int(port), timeout=timeout_s)
                self._connection.connect()
            self._connection.sock.settimeout(timeout_s)
            self._connection.request(method, path, body, dict(headers))
            response = self._connection.getresponse()
            content = response.read()
        except TimeoutError:
            self._move()
            return Reply(SILENT)
        except (OSError, HTTPException):
            self._move()
            return Reply(BROKEN)
        if response.will_close:
            self._disconnect()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Reply(ANSWERED, response.status, named, content)

    def _move(self) -> None:
        """From now on use the next gateway."""
        self._disconnect()
        self._at = (self._at + 1) % len(self._addresses)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _result_of(line: Mapping[str, Any]) -> str | None:
    """The result in a line of an answer; None if the gateway or Redis cannot serve at the moment."""
    if "result" in line:
        return str(line["result"])
    return None if line["status"] in REFUSING_STATUSES else f"failed: {line['status']}"


def main(arguments: Sequence[str]) -> NoReturn:
    """Send until SIGTERM."""
    addresses, model, name, file = arguments
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with open(file, "a") as opened:  # noqa: PTH123
        log = Log(opened)
        clients = [Client(addresses.split(","), model, f"{name}{at}", log) for at in range(CLIENTS)]
        threads = [threading.Thread(target=client.run, args=(stopping,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # a signal handler runs between two of these waits
                thread.join(0.2)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
