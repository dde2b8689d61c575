"""The systems that are measured side by side, each for one network: how to start one, and have it serve."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from grid.load import no_garbage_collection
from grid.redis_server import RedisServer
from grid.runner import process
from service_processes import CpuMeter, child_of

from carpool.client.aio import AsyncClient
from carpool.errors import NotFoundError
from stepping import in_process, models, producer
from stepping.heard import Sent
from stepping.workloads import Ask, Window

NETWORKS: Final = {"sleeper": "Sleeper", "gpt2": "Gpt2"}
START_S_MAX: Final = 60.0
_MODEL: Final = "generator"
_PROGRAMS: Final = Path(sys.executable).parent
_BENCHES: Final = Path(__file__).parents[1]

Serve = Callable[[Sequence[Ask], Window | None], Sent]


class System(NamedTuple):
    """A way to serve a network. `kind`: the end of the name of a class in `models`."""

    name: str
    is_carpool: bool
    kind: str

    def started(self, network: str) -> Any:
        """For a `with` block: the function that serves requests."""
        name = NETWORKS[network] + self.kind
        return _on_stack(name) if self.is_carpool else _in_process(name)


CARPOOL: Final = System("Carpool", True, "Steps")
ONE_PROCESS: Final = System("one process", False, "Steps")
STATIC: Final = System("static, Carpool", True, "Batches")
SYSTEMS: Final = (CARPOOL, ONE_PROCESS, STATIC, System("static, one process", False, "Batches"))

_engines: Final[dict[str, Callable[[], in_process.Engine]]] = {}  # by class: each has the weights of its own


@contextmanager
def _in_process(name: str) -> Iterator[Serve]:
    if name not in _engines:
        _engines[name] = in_process.engines(getattr(models, name))
    make = _engines[name]

    def serve(asks: Sequence[Ask], window: Window | None) -> Sent:
        with no_garbage_collection():
            return in_process.run(make(), asks, window)

    yield serve


@contextmanager
def _on_stack(name: str) -> Iterator[Serve]:
    """Redis, a batcher, and a worker with one model process, over a Unix socket, as in `carpool up`."""
    with RedisServer() as redis, tempfile.TemporaryFile("w") as log:
        environment = {
            **os.environ, "PYTHONPATH": str(_BENCHES), "CARPOOL_REDIS_URL": redis.unix_url,
            "CARPOOL_LOG_LEVEL": "warning",
        }  # fmt: skip
        batcher_command = ["python", "-m", "carpool_batcher"]
        worker_command = ["python", "-m", "carpool_worker", f"{_MODEL}=stepping.models:{name}"]
        with (
            process(batcher_command, _PROGRAMS, environment, log, stdin=-3) as batcher,
            process(worker_command, _PROGRAMS, environment, log, stdin=-3) as worker,
            asyncio.Runner() as runner,
        ):
            client = AsyncClient(redis.url)
            runner.run(_until_served(client))
            pids = {
                "producer": os.getpid(), "Redis": redis.pid, "batcher": batcher.pid, "worker": worker.pid,
                "model process": child_of(worker.pid),
            }  # fmt: skip

            def serve(asks: Sequence[Ask], window: Window | None) -> Sent:
                with no_garbage_collection():
                    return runner.run(producer.send(client, _MODEL, asks, window, CpuMeter(pids)))

            try:
                yield serve
            finally:
                runner.run(client.close())


async def _until_served(client: AsyncClient) -> None:
    """Wait until a worker serves the model, and has served a request."""
    end_s = time.monotonic() + START_S_MAX
    while True:
        try:
            await client.infer(_MODEL, Ask(0.0, 2).body)
            return
        except NotFoundError:
            if time.monotonic() > end_s:
                raise
            await asyncio.sleep(0.05)
