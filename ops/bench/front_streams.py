"""What streams at the front door cost: CPU time a chunk, time to the first one, and memory of many readers.

    .venv/bin/python ops/bench/front_streams.py chunks      # CPU time of each process for a chunk
    .venv/bin/python ops/bench/front_streams.py first       # time to the first chunk, beside AsyncClient
    .venv/bin/python ops/bench/front_streams.py readers     # 1,000 readers: a tenth slow, fifty gone

`chunks` reads streams as native events, from generate_stream, and on WebSockets, each several times in turn,
of a model that emits a short text for each request every 5 ms. `first` reads one stream after another in
these ways, and with AsyncClient, over connections that are open. `readers` has a thousand native streams: of
them 100, whose texts are long, read nothing more after the first, and 50 close their connections.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final
from urllib.parse import urlsplit

import redis
import service_processes

from carpool import AsyncClient
from carpool_cli.local.embedded import EmbeddedRedis

MIB: Final = 1024 * 1024
SPEC: Final = f"tokens={Path(__file__)}:Tokens"
STREAMS: Final = 32
CHUNKS: Final = 300
ROUNDS: Final = 5
FIRSTS: Final = 500
MEMORY: Final = ("--memory-bytes-max", str(16 * MIB), "--body-bytes-max", str(MIB))  # of `readers`


class Tokens:
    """Emits a text of `size` characters for each request in each step, `count` times. Slots for 1,024."""

    max_batch_size = 1024

    def begin(self, requests: Sequence[Any]) -> None:
        """Nothing is prepared."""

    def step(self, requests: Sequence[Any]) -> None:
        """Emit."""
        time.sleep(float(os.environ.get("STEP_S", "0.005")))
        for request in requests:
            request.emit("x" * request.body["size"])
            if request.emitted >= request.body["count"]:
                request.finish()


# --- clients -----------------------------------------------------------------------------------------------


def _post(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def native_events(body: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """What is sent, what each chunk has, and what the end has."""
    return _post("/carpool/v1/models/tokens/infer", json.dumps(body).encode()), b'data: "x', b"event: result"


def generate_stream(body: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """As there."""
    sent = _post("/v2/models/tokens/generate_stream", json.dumps({"body": body}).encode())
    return sent, b'"text_output":"x', b"\r\n0\r\n\r\n"


def _upgrade(path: str, message: bytes) -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    head = (
        f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    )
    frame = bytes([0x81, 0x80 | 126]) + struct.pack(">H", len(message)) + bytes(4) + message  # masked with 0
    return head.encode() + frame


def websocket_values(body: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """As there. The message is sent with the handshake, for simplicity."""
    message = json.dumps({"id": "1", "body": body, "parameters": {}}).ljust(200).encode()
    return _upgrade("/carpool/v1/models/tokens/stream", message), b'"chunk":"x', b'"end":'


def websocket_tensors(body: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """As there, with a request of the Open Inference Protocol."""
    tensor: dict[str, Any] = {
        "name": "body",
        "datatype": "BYTES",
        "shape": [1, 1],
        "data": [json.dumps(body)],
    }
    tensor["parameters"] = {"content_type": "application/json"}
    message = json.dumps({"id": "1", "inputs": [tensor]}).ljust(300).encode()
    return _upgrade("/v2/models/tokens/stream", message), b'"data":["x', b'"end":'


WAYS: Final[dict[str, Callable[[dict[str, Any]], tuple[bytes, bytes, bytes]]]] = {
    "native events": native_events,
    "generate_stream": generate_stream,
    "WebSocket, values": websocket_values,
    "WebSocket, tensors": websocket_tensors,
}


async def read_stream(port: int, sent: bytes, chunk: bytes, end: bytes) -> int:
    """The number of chunks in one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    seen, rest = 0, b""
    while end not in rest:
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"the stream ended too soon: {rest[-300:]!r}")
        rest += data
        seen += rest.count(chunk)
        last = rest.rfind(chunk)
        rest = rest[last + len(chunk) :] if last >= 0 else rest
    writer.close()
    return seen


# --- the stack ---------------------------------------------------------------------------------------------


class Stack:
    """Redis, a batcher, a worker and a gateway."""

    def __init__(self, step_s: float, *flags: str) -> None:
        self._log = TemporaryFile()  # noqa: SIM115 (closed with the process)
        self.server = EmbeddedRedis(append_only=False)
        self._services = [
            service_processes.start(self.server.url, self._log, "carpool_batcher"),
            service_processes.start(self.server.url, self._log, "carpool_worker", SPEC, STEP_S=str(step_s)),
            service_processes.start(self.server.url, self._log, "carpool_gateway", "--port", "0", *flags),
        ]
        self.redis: Any = redis.Redis.from_url(self.server.url)
        self.port = self._wait_for_port()
        batcher, worker, gateway = [service.pid for service in self._services]
        self.pids = {
            "gateway": gateway,
            "worker": worker,
            "model": service_processes.child_of(worker),
            "batcher": batcher,
            "Redis": int(self.redis.info("server")["process_id"]),
        }

    def _wait_for_port(self) -> int:
        for _ in range(600):
            time.sleep(0.1)
            self._log.seek(0)
            lines = [json.loads(line) for line in self._log.read().splitlines() if line[:1] == b"{"]
            urls = [line["url"] for line in lines if line["event"] == "gateway started"]
            if urls and any(line["event"] == "worker ready" for line in lines):
                return urlsplit(urls[0]).port or 0
        raise SystemExit("the services did not start")

    def resident_mib(self, name: str) -> float:
        """Memory of a process."""
        pages = int(Path(f"/proc/{self.pids[name]}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / MIB

    def stop(self) -> None:
        """Stop all."""
        service_processes.stop(self._services)
        self.redis.close()
        self.server.stop()


async def measure_chunks(stack: Stack) -> None:
    """Print the CPU time of each process for a chunk, by how it is read: medians of the rounds."""
    costs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, make in WAYS.items():
            meter = service_processes.CpuMeter(stack.pids)
            body = {"size": 6, "count": CHUNKS}
            seen = await asyncio.gather(*[read_stream(stack.port, *make(body)) for _ in range(STREAMS)])
            used, chunks = meter.stop(), sum(seen)
            costs[way].append({name: us / chunks for name, us in used.items()} | {"chunks": chunks})
    print("us of CPU a chunk; chunks: those that were seen, of", STREAMS * CHUNKS, "texts")
    for way, rounds in costs.items():
        medians = {name: statistics.median([one[name] for one in rounds]) for name in rounds[0]}
        print(f"{way:20}", "  ".join(f"{name} {value:7.1f}" for name, value in medians.items()))


async def _first_s(port: int, sent: bytes, chunk: bytes) -> float:
    """How long the first chunk takes, over a connection that is open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started_s = time.perf_counter()
    writer.write(sent)
    await reader.readuntil(chunk)
    took_s = time.perf_counter() - started_s
    writer.close()
    return took_s


async def _first_of_client_s(client: AsyncClient, body: dict[str, Any]) -> float:
    started_s = time.perf_counter()
    took_s = 0.0
    async for _ in client.stream("tokens", body):
        took_s = took_s or time.perf_counter() - started_s
    return took_s


async def measure_first(stack: Stack) -> None:
    """Print how long the first chunk of a lone stream takes, by how it is read."""
    body = {"size": 6, "count": 1}
    took_s: dict[str, list[float]] = {"AsyncClient": [], **{way: [] for way in WAYS}}
    async with AsyncClient(stack.server.url) as client:
        for _ in range(FIRSTS):
            took_s["AsyncClient"].append(await _first_of_client_s(client, body))
            for way, make in WAYS.items():
                sent, chunk, _ = make(body)
                took_s[way].append(await _first_s(stack.port, sent, chunk))
    print(f"ms to the first chunk, of {FIRSTS} streams: p50, p95, p99, and p50 beside that of AsyncClient")
    base_s = statistics.median(took_s["AsyncClient"])
    for way, times_s in took_s.items():
        cuts = statistics.quantiles(times_s, n=100)
        figures = "  ".join(f"{1000 * cuts[at]:6.2f}" for at in (49, 94, 98))
        print(f"{way:20} {figures}  {1000 * (cuts[49] - base_s):+6.2f}")


async def measure_readers(stack: Stack) -> None:
    """Print the memory of each process while a thousand streams are read."""
    readers, slow, gone, count = 1000, 100, 50, 45

    def print_memory(when: str) -> None:
        memory = "  ".join(f"{name} {stack.resident_mib(name):6.1f}" for name in stack.pids)
        used = stack.redis.info("memory")["used_memory"] / MIB
        waiting = sum(stack.redis.xlen(key) for key in stack.redis.scan_iter("carpool:{tokens}:replies:*"))
        print(f"{when:32} {memory}  used by Redis {used:6.1f}, entries of replies {waiting}", flush=True)

    print_memory("before")
    whole, stopped, ended_slow = 0, asyncio.Event(), 0

    async def read(number: int) -> None:
        nonlocal whole, ended_slow
        size = 65536 if number < slow else 100
        sent, chunk, end = native_events({"size": size, "count": count})
        if number >= slow + gone:
            seen = await read_stream(stack.port, sent, chunk, end)
            whole += seen == count
            return
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port, limit=1 << 12)
        writer.write(sent)
        await reader.readuntil(chunk)
        if number < slow:
            await stopped.wait()
            rest = await reader.read(-1)
            ended_slow += b"read too slowly" in rest
        writer.transport.abort()

    tasks = [asyncio.ensure_future(read(number)) for number in range(readers)]
    for at in range(10):
        await asyncio.sleep(5)
        print_memory(f"after {5 * (at + 1)} s, {whole} whole")
    stopped.set()
    await asyncio.gather(*tasks)
    await asyncio.sleep(2)
    print_memory(f"at the end, {whole} whole, {ended_slow} too slow")


# By name: how long a step takes, the flags of the gateway, and what is measured.
MEASURES: Final[dict[str, tuple[float, tuple[str, ...], Callable[[Stack], Coroutine[Any, Any, None]]]]] = {
    "chunks": (0.005, (), measure_chunks),
    "first": (0.001, (), measure_first),
    "readers": (1.0, ("--request-timeout-s", "300", *MEMORY), measure_readers),
}


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=MEASURES)
    step_s, flags, measure = MEASURES[parser.parse_args().what]
    stack = Stack(step_s, *flags)
    try:
        asyncio.run(measure(stack))
    finally:
        stack.stop()


if __name__ == "__main__":
    main()
