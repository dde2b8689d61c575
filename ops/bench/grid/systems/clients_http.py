"""Clients for systems that are HTTP servers: aiohttp, and wrk."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp

from grid.load import Sent
from grid.models import MODELS, Array, Model
from grid.setup import Setup

# wrk calls `done` at its end. Durations are in us.
_WRK_SCRIPT: Final = """
wrk.method = "POST"
local file = io.open("{body}", "rb")
wrk.body = file:read("*all")
wrk.headers["Content-Type"] = "{content_type}"
function done(summary, latency, requests)
  local errors = summary.errors
  io.stderr:write(string.format(
    '{{"requests": %d, "us": %d, "p50_us": %f, "p99_us": %f, "errors": %d}}\\n', summary.requests,
    summary.duration, latency:percentile(50), latency:percentile(99), errors.connect + errors.read +
    errors.write + errors.status + errors.timeout))
end
"""


class AiohttpClient:
    """One session, with as many connections as there are requests in flight, up to `in_flight_max`."""

    in_flight_max = 1024

    def __init__(
        self,
        session: aiohttp.ClientSession,
        path: str,
        encode: Callable[[Array], bytes],
        decode: Callable[[bytes], Array],
        content_type: str,
    ) -> None:
        self._session, self._path = session, path
        self._encode, self._decode = encode, decode
        self._headers = {"Content-Type": content_type}

    async def call(self, body: Array) -> Array:
        """POST a body."""
        data = self._encode(body)
        async with self._session.post(self._path, data=data, headers=self._headers) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            return self._decode(await response.read())

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


class WrkClient:
    """wrk with one thread. It knows only the closed loop; everything else is left to aiohttp."""

    def __init__(self, wrk: Path, url: str, data: bytes, content_type: str) -> None:
        self._wrk, self._url = wrk, url
        self._directory = tempfile.TemporaryDirectory()
        body = Path(self._directory.name) / "body"
        body.write_bytes(data)
        self._script = body.with_name("wrk.lua")
        self._script.write_text(_WRK_SCRIPT.format(body=body, content_type=content_type))

    async def call(self, body: Array) -> Any:
        """Not for wrk."""
        raise NotImplementedError

    async def closed_loop(self, body: Array, in_flight: int, seconds: float) -> Sent:
        """Run wrk, which has the body already. Its durations are whole seconds."""
        del body
        libraries = self._wrk.parents[1] / "lib" / f"{os.uname().machine}-linux-gnu"
        process = await asyncio.create_subprocess_exec(
            self._wrk,
            *("--threads", "1", "--connections", str(in_flight), "--duration", f"{max(1, round(seconds))}s"),
            *("--timeout", "20s", "--script", str(self._script), self._url),
            env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, output = await process.communicate()
        summary = json.loads(output.splitlines()[-1])
        if summary["errors"]:
            raise RuntimeError(f"wrk counted {summary['errors']} errors")
        latencies_ms = [summary["p50_us"] / 1e3] * 98 + [
            summary["p99_us"] / 1e3
        ] * 2  # with these percentiles
        return Sent(summary["requests"], summary["us"] / 1e6, latencies_ms if in_flight == 1 else ())

    async def close(self) -> None:
        """Remove its script."""
        self._directory.cleanup()


async def connect_http(setup: Setup) -> AiohttpClient | WrkClient:
    """The client that the setup names, for raw bytes at /inference."""
    model = MODELS[setup.model]
    return await http_client(
        setup, "/inference", "application/octet-stream", lambda body: body.tobytes(), model.decode_result
    )


async def http_client(
    setup: Setup,
    path: str,
    content_type: str,
    encode: Callable[[Array], bytes],
    decode: Callable[[bytes], Array],
) -> AiohttpClient | WrkClient:
    """The client that the setup names, once the server serves."""
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=AiohttpClient.in_flight_max)
    session = aiohttp.ClientSession(setup.http_url, connector=connector, timeout=timeout)
    client = AiohttpClient(session, path, encode, decode, content_type)
    if setup.client != "wrk":
        return client
    model = MODELS[setup.model]
    await _until_served(client, model)
    await client.close()
    return WrkClient(
        Path(setup.tools) / "usr/bin/wrk", setup.http_url + path, encode(model.body(0)), content_type
    )


async def _until_served(client: AiohttpClient, model: Model) -> None:
    """Before wrk starts: it does not look at results, so one is checked here."""
    for attempt in range(600):
        try:
            result = await client.call(model.body(0))
        except (aiohttp.ClientError, RuntimeError):
            if attempt == 599:
                raise
            await asyncio.sleep(0.05)
        else:
            if not (result == model.expected(model.body(0))).all():
                raise ValueError(f"a wrong result: {result!r:.80}")
            return
