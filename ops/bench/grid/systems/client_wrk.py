"""wrk, a client of HTTP servers that is a program in C. Standard library and numpy only: it runs in every
environment."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from grid.load import Sent
from grid.models import MODELS, Array
from grid.setup import HOST, Setup

_START_S_MAX: Final = 60.0
_PAUSE_S: Final = 0.05
_ANSWER_S_MAX: Final = 20.0

# wrk calls `done` at its end. Durations are in us.
_SCRIPT: Final = """
wrk.method = "POST"
local file = io.open({body}, "rb")
wrk.body = file:read("*all")
{headers}
function done(summary, latency, requests)
  local errors = summary.errors
  io.stderr:write(string.format(
    '{{"answers": %d, "us": %d, "p50_us": %f, "p99_us": %f, "refused": %d, "broken": %d}}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
"""


class Call(NamedTuple):
    """What is sent with POST. `rows` is how many requests it has."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    rows: int = 1


class WrkClient:
    """wrk with one thread. It knows only the closed loop, in which each connection has a call in flight."""

    def __init__(self, wrk: Path, url: str, call: Call) -> None:
        """`wrk` is the program; `url` is that of the server, without a path."""
        self._wrk, self._url, self._rows = wrk, url + call.path, call.rows
        self._directory = tempfile.TemporaryDirectory()
        body = Path(self._directory.name) / "body"
        body.write_bytes(call.body)
        headers = "\n".join(
            f"wrk.headers[{json.dumps(name)}] = {json.dumps(value)}" for name, value in call.headers.items()
        )
        self._script = body.with_name("wrk.lua")
        self._script.write_text(_SCRIPT.format(body=json.dumps(str(body)), headers=headers))

    async def call(self, body: Array) -> Any:
        """Not for wrk."""
        raise NotImplementedError

    async def closed_loop(self, body: Array, in_flight: int, seconds: float) -> Sent:
        """Run wrk, which has the body already. Its durations are whole seconds. Latencies are those of calls,
        also of refused ones. Raises RuntimeError if wrk fails."""
        del body
        libraries = self._wrk.parents[1] / "lib" / f"{os.uname().machine}-linux-gnu"
        process = await asyncio.create_subprocess_exec(
            self._wrk,
            *("--threads", "1", "--connections", str(in_flight), "--duration", f"{max(1, round(seconds))}s"),
            *("--timeout", f"{_ANSWER_S_MAX:.0f}s", "--latency", "--script", str(self._script), self._url),
            env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"wrk failed: {(errors or output).decode(errors='replace').strip()}")
        summary = json.loads(errors.splitlines()[-1])
        return Sent(
            (summary["answers"] - summary["refused"]) * self._rows,
            summary["us"] / 1e6,
            [summary["p50_us"] / 1e3] * 98 + [summary["p99_us"] / 1e3] * 2,  # with these percentiles
            summary["refused"],
            summary["broken"],
        )

    async def close(self) -> None:
        """Remove its script."""
        self._directory.cleanup()


async def connect_wrk(setup: Setup, call: Call, decode: Callable[[bytes], Array]) -> WrkClient:
    """wrk, once the server serves. `decode` makes an array of the body of a response.

    wrk does not look at results, so one is checked here: raises ValueError if it is wrong.
    """
    model = MODELS[setup.model]
    expected = model.expected(model.body(0))
    result = decode(await asyncio.to_thread(_first_answer, setup.port, call))
    if result.size != expected.size * call.rows or not (result == expected).all():
        raise ValueError(f"a wrong result: {result!r:.80} instead of {expected!r:.80}")
    return WrkClient(Path(setup.tools) / "usr/bin/wrk", setup.http_url, call)


def _first_answer(port: int, call: Call) -> bytes:
    """The body of the first answer with status 200. Raises the last error after _START_S_MAX."""
    end_s = time.monotonic() + _START_S_MAX
    while True:
        connection = http.client.HTTPConnection(HOST, port, timeout=_ANSWER_S_MAX)
        try:
            connection.request("POST", call.path, call.body, dict(call.headers))
            response = connection.getresponse()
            answer = response.read()
            if response.status == 200:
                return answer
            raise RuntimeError(f"status {response.status}: {answer!r:.200}")
        except (OSError, http.client.HTTPException, RuntimeError):
            if time.monotonic() > end_s:
                raise
            time.sleep(_PAUSE_S)
        finally:
            connection.close()
