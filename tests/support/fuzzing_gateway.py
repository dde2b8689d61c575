"""Fuzzing a gateway: malformed HTTP, malformed tensors in JSON, and binary data of wrong sizes.

Each request must be answered, with 2xx or with an error in JSON which is not the gateway's own fault, or its
connection be closed. Between them a good request must succeed, and the gateway's memory must not grow.

    python -m support.fuzzing_gateway --requests 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from support.http import Connection, request
from support.oip import with_binary
from support.stack import Service, Stack

NOOP: Final = "/v2/models/Noop/infer"
GOOD_EVERY: Final = 200
GROWTH_BYTES_MAX: Final = 256 * 1024 * 1024
_FAULTS: Final = (500, 502)  # of the gateway or the model; no request here may cause them
_PATHS: Final = (NOOP, "/v2/models/Echo/infer", "/v2/models/NONE/infer", "/carpool/v1/models/Echo/infer")
_VALUES: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        1.5,
        -0.0,
        257,
        1e39,
        1e308,
        2**53 + 1,
        2**63,
        2**64,
        -(2**63) - 1,
        10**400,
    ),
    *("", "a", "\x00", "\ud800", "FP32", "INT8", "BYTES", "BF16", "numbers", "body", "x" * 5000),
    *([], [[]], [[[]], 1], {}, {"a": 1}, float("nan"), float("inf"), [1, [2, "3"]], [None] * 200),
)
_KEYS: Final = (
    *("inputs", "outputs", "parameters", "id", "name", "shape", "datatype", "data", "binary_data_size"),
    *("binary_data", "classification", "priority", "timeout", "sequence_id", "sequence_start", "headers"),
)
_HEADERS: Final = (
    *(
        b"Content-Length: 5",
        b"Content-Length: -1",
        b"Content-Length: 99999999999999999999",
        b"Content-Length:",
    ),
    *(
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip",
        b"Expect: 100-continue",
        b"Host: b",
        b"\x00: a",
    ),
    *(b"Content-Encoding: gzip", b"Content-Encoding: br", b"Upgrade: websocket", b" folded: x", b"no colon"),
    *(
        b"Inference-Header-Content-Length: 0",
        b"Inference-Header-Content-Length: +5",
        b"Accept-Encoding: *;q=x",
    ),
    *(b"Connection: close", b"Content-Type: \xff\xfe", b"X: " + b"y" * 40_000, b"Carpool-Timeout-Ms: -1"),
)


class Requests:
    """Requests at random: bytes, and whether they are framed so that the connection can be used again."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice

    def next(self) -> tuple[bytes, bool]:
        """The next request."""
        kind = self._choice.random()
        if kind < 0.35:
            return self._post(json.dumps(self._document()).encode()), True
        if kind < 0.6:
            return self._post(self._damaged(json.dumps(self._document(0.05)).encode())), True
        if kind < 0.8:
            return self._binary(), True
        return self._malformed(), False

    def _post(self, body: bytes, **headers: str) -> bytes:
        return request("POST", self._choice.choice(_PATHS), body, **headers)

    def _document(self, rate: float = 0.15) -> Any:
        """A request for Noop or Echo, parts of which are replaced."""
        choice = self._choice
        rows = choice.choice((0, 1, 1, 2, 3))
        numbers = {"name": "numbers", "datatype": "FP32", "shape": [rows, 128], "data": [0.5] * 128 * rows}
        bodies = {"name": "body", "datatype": "BYTES", "shape": [rows], "data": ["a"] * rows}
        document: dict[str, Any] = {"inputs": [choice.choice((numbers, bodies))]}
        if choice.random() < 0.3:
            document["outputs"] = [{"name": "numbers", "parameters": {"classification": 2}}]
        if choice.random() < 0.3:
            document["parameters"] = {choice.choice(_KEYS): choice.choice(_VALUES)}
        return self._replaced(document, rate)

    def _replaced(self, value: Any, rate: float) -> Any:
        choice = self._choice
        if choice.random() < rate / 3:
            return choice.choice(_VALUES)
        if isinstance(value, dict):
            replaced = {name: self._replaced(of, rate) for name, of in value.items()}
            if choice.random() < rate:
                replaced[choice.choice(_KEYS)] = choice.choice(_VALUES)
            if replaced and choice.random() < rate / 2:
                del replaced[choice.choice(list(replaced))]
            return replaced
        if isinstance(value, list) and value and choice.random() < rate:
            at = choice.randrange(len(value))
            return [*value[:at], choice.choice(_VALUES), *value[at + choice.randint(0, 1) :]]
        return (
            [self._replaced(of, rate) for of in value]
            if isinstance(value, list) and len(value) < 4
            else value
        )

    def _damaged(self, data: bytes) -> bytes:
        """Some bytes are changed, left out, or doubled."""
        choice, damaged = self._choice, bytearray(data)
        for _ in range(choice.randint(1, 4)):
            at = choice.randrange(len(damaged) + 1)
            end = at + choice.choice((0, 1, 1, 5, 100))
            damaged[at:end] = choice.choice(
                (b"", choice.randbytes(1), b'"', b"]", b"[" * 90, damaged[at:end] * 2)
            )
        return bytes(damaged)

    def _binary(self) -> bytes:
        """Binary data, of which lengths or sizes may be wrong."""
        choice = self._choice
        rows = choice.choice((0, 1, 2, 9))
        data = bytes(512 * rows)
        shape = choice.choice(([rows, 128], [rows, 128], [rows], [2**33, 2**33], [-1, 128], [rows, 128] * 20))
        datatype = choice.choice(("FP32", "FP32", "FP32", "BYTES", "BOOL", "FP16", "x"))
        body, length = with_binary(("numbers", datatype, shape, data), id="a" * choice.randint(0, 3))
        if choice.random() < 0.5:
            body = choice.choice(
                (body[: choice.randrange(len(body))], body + choice.randbytes(9), self._damaged(body))
            )
        wrong = choice.choice(
            (b"0", b"-1", b"abc", b"+5", b"99999999999", b"", str(len(body)).encode(), b"7")
        )
        return self._post(
            body, Inference_Header_Content_Length=(wrong if choice.random() < 0.3 else length).decode()
        )

    def _malformed(self) -> bytes:
        """A request whose head is damaged."""
        choice = self._choice
        head, end, body = self._post(json.dumps(self._document(0)).encode()).partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        for _ in range(choice.randint(0, 3)):
            lines.insert(choice.randrange(len(lines) + 1), choice.choice(_HEADERS))
        data = choice.choice((b"\r\n", b"\r\n", b"\n", b"\r")).join(lines) + end + body
        if choice.random() < 0.4:
            data = self._damaged(data)
        return data[: choice.randrange(len(data) + 1)] if choice.random() < 0.2 else data


class Fuzzer:
    """Sends requests to a gateway that serves Noop and Echo. Raises AssertionError with the request."""

    def __init__(self, gateway: Service, seed: int) -> None:
        self._gateway = gateway
        self._requests = Requests(random.Random(seed))
        self._connection = Connection(gateway.url)
        self._good = request("POST", NOOP, json.dumps(_good_document()).encode())
        self.codes: Counter[int] = Counter()  # 0: the connection was closed

    def run(self, count: int) -> None:
        """Send so many requests."""
        for at in range(count):
            data, is_framed = self._requests.next()
            try:
                self._send(data) if is_framed else self._send_alone(data)
                if at % GOOD_EVERY == 0:
                    self._connection.send(self._good)
                    assert self._connection.answer().code == 200, "a good request"
            except AssertionError as error:
                raise AssertionError(f"request {at}, {data[:2000]!r}: {error}") from error

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _send(self, data: bytes) -> None:
        self._connection.send(data)
        answer = self._connection.answer()
        self._check(answer.code, answer.body)
        if answer.headers.get("connection") == "close":
            self._connection.close()
            self._connection = Connection(self._gateway.url)

    def _send_alone(self, data: bytes) -> None:
        """Send what may have no end: the client closes its half, and then the gateway all."""
        with Connection(self._gateway.url) as connection:
            try:
                connection.send(data)
                connection.socket.shutdown(socket.SHUT_WR)
            except OSError:  # it was refused before all was sent
                pass
            received = connection.rest()
        if not received:
            self.codes[0] += 1
            return
        while received.startswith(b"HTTP/1.1 100 "):
            received = received.partition(b"\r\n\r\n")[2]
            if not received:  # it waited for the rest of a body
                self.codes[0] += 1
                return
        assert received.startswith(b"HTTP/1.1 "), received[:100]
        head, _, body = received.partition(b"\r\n\r\n")
        self._check(int(head[9:12]), body.partition(b"HTTP/1.1 ")[0])

    def _check(self, code: int, body: bytes) -> None:
        self.codes[code] += 1
        assert code not in _FAULTS, f"{code} {body[:500]!r}"
        if code >= 400 and body:
            assert json.loads(body)["error"], "an error in JSON"


def _good_document() -> dict[str, Any]:
    return {"inputs": [{"name": "numbers", "datatype": "FP32", "shape": [1, 128], "data": [1] * 128}]}


def resident_bytes(pid: int) -> int:
    """The memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def fuzz(stack: Stack, gateway: Service, count: int, seed: int) -> Counter[int]:
    """Send `count` requests; return how many had which status. Raises AssertionError."""
    with closing(Fuzzer(gateway, seed)) as fuzzer:
        fuzzer.run(min(count, 2000))
        before_bytes = resident_bytes(gateway.pid)
        started_s = time.monotonic()
        for start in range(2000, count, 20_000):
            fuzzer.run(min(20_000, count - start))
            grown_bytes = resident_bytes(gateway.pid) - before_bytes
            assert grown_bytes < GROWTH_BYTES_MAX, f"the gateway grew by {grown_bytes} bytes"
            done = min(start + 20_000, count)
            rate = (done - 2000) / (time.monotonic() - started_s)
            print(f"{done} requests, {rate:.0f}/s, memory {grown_bytes / 1e6:+.1f} MB", flush=True)
    assert gateway.alive
    assert not gateway.events("request failed"), gateway.end_of_log()
    return fuzzer.codes


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        stack.serve("plain.py:Noop", "plain.py:Echo")
        codes = fuzz(stack, stack.gateway("--log-level", "info"), options.requests, options.seed)
    print(f"seed {options.seed}: {sum(codes.values())} requests, by status: {dict(sorted(codes.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
