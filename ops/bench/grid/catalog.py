"""The systems: what is installed for each, how it is started, and what is left out for a known reason.

How each is used, and what its documents say, is at the top of its file in `systems/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from grid.setup import HOST, Setup
from grid.workloads import Workload

# The commands of the services, by role. The first word is a program of the system's environment.
Commands = Mapping[str, list[str]]

WAIT_MS: Final = 2.0  # how long a batch that is not full waits
ARTICLE_WAIT_MS: Final = 100.0  # the articles' timeout

_NO_QUEUE: Final = "it is one process tree, without a queue"
_NO_RATES: Final = "wrk knows no arrivals at random; see the same server with aiohttp"
_NO_BURST: Final = "wrk keeps a number of requests in flight; see the same server with aiohttp"


@dataclass(frozen=True)
class System:
    """A system, with one client and one set of options."""

    key: str  # for the command line and file names
    name: str
    module: str  # in grid.systems
    environment: str  # a name in `environments.ENVIRONMENTS`
    services: Callable[[Setup], Commands]
    child_roles: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # see `processes.by_role`
    uses_redis: bool = False
    unix_socket: bool = False
    uvloop: bool = False
    client: str = ""
    batch_size: int | None = None  # instead of the workload's
    wait_ms: float = WAIT_MS
    only: tuple[str, ...] = ()  # workloads, if not all
    left_out: Mapping[str, str] = field(default_factory=dict)  # a reason for each workload that is not run
    cells_left_out: Mapping[str, str] = field(default_factory=dict)  # and for each single cell
    ahead_because: str = ""  # why Carpool cannot reach it where it is ahead
    is_peer: bool = True  # not Carpool, and not the floor

    def runs(self, workload: Workload) -> bool:
        """Whether it is measured under this workload."""
        return workload.name not in self.left_out and (not self.only or workload.name in self.only)


def _nothing(_: Setup) -> Commands:
    """The system runs in the producer process."""
    return {}


def carpool_services(model: str) -> Commands:
    """Carpool's services for a model of `models.py`."""
    location = f"{model}=grid.systems.carpool:{model.capitalize()}"
    return {
        "batcher": ["python", "-m", "carpool_batcher"],
        "worker": ["python", "-m", "carpool_worker", location],
    }


def _carpool(setup: Setup) -> Commands:
    return carpool_services(setup.model)


def _gateway(setup: Setup) -> Commands:
    gateway = ["python", "-m", "carpool_gateway", "--port", str(setup.port)]
    return {**carpool_services(setup.model), "gateway": gateway}


def _pytriton(_: Setup) -> Commands:
    return {"model": ["python", "-m", "grid.systems.pytriton"]}


def _mosec(setup: Setup) -> Commands:
    command = ["python", "-m", "grid.systems.mosec", "--address", HOST, "--port", str(setup.port)]
    return {"server": [*command, "--capacity", "200000", "--timeout", "60000", "--log-level", "warning"]}


def _litserve(_: Setup) -> Commands:
    return {"server": ["python", "-m", "grid.systems.litserve"]}


def _faststream(_: Setup) -> Commands:
    return {"worker": ["python", "-m", "grid.systems.faststream"]}


def _celery(_: Setup) -> Commands:
    options = ["--concurrency", "1", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    command = ["celery", "--app", "grid.systems.celery_batches", "worker", *options, "--loglevel", "warning"]
    return {"worker": command}


_CARPOOL: Final = System(
    "carpool",
    "Carpool",
    "carpool",
    "carpool",
    _carpool,
    child_roles={"worker": {"": "model"}},
    uses_redis=True,
    is_peer=False,
)
_PACKED: Final = replace(
    _CARPOOL,
    key="carpool-packed",
    name="Carpool, packed",
    client="packed",
    only=("overhead",),
    cells_left_out={"1": "a packed entry has several requests"},
)
_FAST: Final = replace(_CARPOOL, unix_socket=True, uvloop=True, only=("overhead",))
_MOSEC: Final = System(
    "mosec",
    "mosec, aiohttp",
    "mosec",
    "mosec",
    _mosec,
    child_roles={"server": {"mosec": "server", "": "model"}},
)
_LITSERVE: Final = System(
    "litserve",
    "LitServe, aiohttp",
    "litserve",
    "litserve",
    _litserve,
    child_roles={"server": {"": "API and model"}},
)
_WRK_IS_FAST: Final = "the client is a program in C, and bodies go to the server without a queue"
_WRK_LEFT_OUT: Final = {"accelerator": _NO_RATES, "squares": _NO_BURST, "burst": _NO_BURST}
_ARTICLES: Final = System(
    "articles",
    "articles, 100 ms",
    "articles",
    "carpool",
    _nothing,
    child_roles={"producer": {"": "worker"}},
    wait_ms=ARTICLE_WAIT_MS,
    only=("squares",),
    ahead_because=_NO_QUEUE,
)

SYSTEMS: Final = (
    _CARPOOL,
    replace(_CARPOOL, key="carpool-256", name="Carpool, batches of 256", batch_size=256, only=("overhead",)),
    _PACKED,
    replace(
        _CARPOOL,
        key="carpool-unix",
        name="Carpool, Unix socket",
        unix_socket=True,
        only=("overhead", "images"),
    ),
    replace(_CARPOOL, key="carpool-uvloop", name="Carpool, uvloop", uvloop=True, only=("overhead",)),
    replace(_FAST, key="carpool-fast", name="Carpool, Unix + uvloop"),
    replace(_FAST, key="carpool-fast-256", name="Carpool, Unix + uvloop, 256", batch_size=256),
    replace(
        _PACKED,
        key="carpool-fast-packed",
        name="Carpool, Unix + uvloop, packed",
        unix_socket=True,
        uvloop=True,
    ),
    System(
        "floor",
        "Redis floor, a driver in C",
        "floor",
        "carpool",
        _nothing,
        uses_redis=True,
        only=("overhead", "images"),
        is_peer=False,
    ),
    replace(
        _MOSEC,
        key="mosec-wrk",
        name="mosec, wrk",
        client="wrk",
        left_out=_WRK_LEFT_OUT,
        ahead_because=_WRK_IS_FAST,
    ),
    _MOSEC,
    _LITSERVE,
    System(
        "service-streamer",
        "service-streamer",
        "service_streamer",
        "service-streamer",
        _nothing,
        child_roles={"producer": {"": "worker"}},
        ahead_because=_NO_QUEUE,
    ),
    System(
        "faststream",
        "FastStream",
        "faststream",
        "faststream",
        _faststream,
        uses_redis=True,
        ahead_because="one process is woken up, between two visits to Redis; with Carpool it is the batcher, "
        "the worker and the model process, and Redis is visited a third time",
    ),
    System(
        "celery-batches",
        "celery-batches",
        "celery_batches",
        "celery-batches",
        _celery,
        child_roles={"worker": {"": "model"}},
        uses_redis=True,
        left_out={"burst": "it would take minutes: see its requests/s"},
    ),
    _ARTICLES,
    replace(_ARTICLES, key="articles-fast", name=f"articles, {WAIT_MS:g} ms", wait_ms=WAIT_MS),
)

_GATEWAY: Final = replace(
    _CARPOOL,
    key="gateway",
    name="Carpool",
    module="gateway",
    services=_gateway,
    unix_socket=True,
    client="wrk",
)
_PYTRITON: Final = System(
    "pytriton",
    "PyTriton",
    "pytriton",
    "pytriton",
    _pytriton,
    child_roles={"model": {"triton": "server"}},
    client="wrk-v2",
)
# In rows only small bodies are sent, and by no more connections than have answers within some seconds.
_IN_ROWS: Final[Mapping[str, Any]] = {
    "client": "wrk-v2-rows",
    "only": ("http",),
    "cells_left_out": {"1024": "65,536 rows would be in flight, which take longer than a round"},
}

# HTTP servers, of which all are driven by wrk; see `http_servers`.
HTTP_SYSTEMS: Final = (
    _GATEWAY,
    replace(_GATEWAY, key="gateway-v2", name="Carpool, /v2", client="wrk-v2"),
    replace(_GATEWAY, key="gateway-rows", name="Carpool, /v2, 64 rows a call", **_IN_ROWS),
    replace(_MOSEC, name="mosec", client="wrk"),
    replace(_LITSERVE, name="LitServe", client="wrk"),
    _PYTRITON,
    replace(_PYTRITON, key="pytriton-rows", name="PyTriton, 64 rows a call", **_IN_ROWS),
)
