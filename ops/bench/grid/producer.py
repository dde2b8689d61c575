"""The producer process: connects to a system, then carries out one order for each line on standard input.

    python -m grid.producer MODULE     # such as grid.systems.mosec; the setup is in the environment

An order is a JSON object with `load` (a function below) and its arguments; the answer is a JSON object on one
line of standard output. CPU time is read here, immediately before and after a measurement, without its
warm-up.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from grid import load, processes
from grid.models import MODELS, Array
from grid.setup import Setup

START_S_MAX: Final = 30.0
REPEAT_S_MAX: Final = 2.0
CALL_S_MAX: Final = 3.0  # a request that was sent before the service listened may be lost


class Producer:
    """A client, and the processes whose CPU time is counted."""

    def __init__(self, client: load.Client, setup: Setup) -> None:
        self._client = client
        self._model = MODELS[setup.model]
        self._body = self._model.body(0)

    async def closed(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """requests/s, CPU us a request by role, and latencies where the client measures them.

        Calls that fail are an error, unless `counts_errors` is true: then the answer says how many failed.
        """
        in_flight = order["in_flight"]
        await load.closed_loop(self._client, self._body, in_flight, load.WARM_UP_S)
        cpu = _CpuMeter(order)
        sent = await load.closed_loop(self._client, self._body, in_flight, order["seconds"])
        cpu_us = cpu.per_request(sent.requests) if sent.requests else {}
        answer: dict[str, Any] = {"per_second": sent.requests / sent.seconds, "cpu_us": cpu_us}
        if order.get("counts_errors"):
            answer |= {"refused": sent.refused, "broken": sent.broken}
        elif failed := sent.refused + sent.broken:
            raise RuntimeError(f"{failed} calls failed")
        if sent.latencies_ms:
            answer |= {f"p{percent}_ms": load.percentile(sent.latencies_ms, percent) for percent in (50, 99)}
        return answer

    async def poisson(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Latencies of requests that arrive at random, and how many were answered in time."""
        cpu = _CpuMeter(order)
        sent = await load.poisson(
            self._client, self._body, order["per_second"], order["seconds"], order["seed"]
        )
        in_time = sum(latency_ms <= load.WITHIN_MS for latency_ms in sent.latencies_ms)
        return {
            "p50_ms": load.percentile(sent.latencies_ms, 50),
            "p99_ms": load.percentile(sent.latencies_ms, 99),
            "within": in_time / sent.requests,
            "per_second": sent.requests / sent.seconds,
            "cpu_us": cpu.per_request(sent.requests),
        }

    async def burst(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Seconds until all requests are answered that were sent at once, and the peak of the memory.

        With `repeat` it is done once to warm up, and then as often, for up to REPEAT_S_MAX; the seconds are
        the median.
        """
        distinct = order["distinct"]
        bodies = [self._model.body(number) for number in range(distinct)] * (order["requests"] // distinct)
        expected = {id(body): self._model.expected(body) for body in bodies[:distinct]}

        def check(body: Array, result: Array) -> None:
            if not np.array_equal(result, expected[id(body)]):
                raise ValueError(f"a wrong result: {result!r:.80} for {body!r:.80}")

        repeat = order.get("repeat", 0)
        if repeat:
            await load.burst(self._client, bodies, order["limit_s"], check)
        bursts: list[load.Sent] = []
        cpu = _CpuMeter(order)
        end_s = time.monotonic() + REPEAT_S_MAX
        while not bursts or (len(bursts) < repeat and time.monotonic() < end_s):
            bursts.append(await load.burst(self._client, bodies, order["limit_s"], check))
        return {
            "seconds": statistics.median(sent.seconds for sent in bursts),
            "answered": min(sent.requests for sent in bursts),
            "cpu_us": cpu.per_request(max(1, sum(sent.requests for sent in bursts))),
            "peak_mib": processes.memory_mib_by_role(cpu.roles, "VmHWM"),
        }

    async def until_served(self) -> None:
        """Wait until the service answers, and check one result."""
        expected = self._model.expected(self._body)
        loop = asyncio.get_running_loop()
        end_s, call = loop.time() + START_S_MAX, load.awaitable_call(self._client, 1)
        while True:
            try:
                result = await asyncio.wait_for(call(self._body), CALL_S_MAX)
                break
            except Exception:
                if loop.time() > end_s:
                    raise
                await asyncio.sleep(0.05)
        if not np.array_equal(np.asarray(result).reshape(-1, expected.size)[0], expected.ravel()):
            raise ValueError(f"a wrong result: {result!r:.80} instead of {expected!r:.80}")


class _CpuMeter:
    """CPU time by role from here on."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        roots = {**order["pids"], "producer": os.getpid()}
        self.roles = processes.by_role(roots, order["child_roles"])
        self._before_us = processes.cpu_us_by_role(self.roles)

    def per_request(self, requests: int) -> dict[str, float]:
        after_us = processes.cpu_us_by_role(self.roles)
        return {role: (us - self._before_us[role]) / requests for role, us in after_us.items()}


async def serve(module: str, setup: Setup, answer: Callable[[Mapping[str, Any]], None]) -> None:
    """Connect, and carry out orders until standard input ends."""
    connect: Callable[[Setup], Any] = importlib.import_module(module).connect
    client = await connect(setup)
    producer = Producer(client, setup)
    loads = {"closed": producer.closed, "poisson": producer.poisson, "burst": producer.burst}
    try:
        if not hasattr(client, "closed_loop"):
            await producer.until_served()
        answer({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            answer(await loads[order["load"]](order))
    finally:
        await client.close()


def main() -> None:
    """Run on the event loop that the setup names; an error is an answer too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to the log

    def answer(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    setup = Setup.from_environment()
    factory = importlib.import_module("uvloop").new_event_loop if setup.uvloop else None
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(serve(sys.argv[1], setup, answer))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)  # threads may still wait for a service that has failed


if __name__ == "__main__":
    main()
