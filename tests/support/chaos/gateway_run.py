"""A run with gateways: HTTP clients take part beside the producers, and perhaps readers of streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple
from urllib.parse import urlsplit

from support.chaos.clients import EXECUTIONS, ClientProcess, HttpReport, judge, read_executions
from support.chaos.resending import ResendingProxy
from support.chaos.run import MODEL, SETTLE_S_MAX, Outcome, Run, peak_mib
from support.chaos.servers import Servers, ServersOf, alone
from support.chaos.streams import Outage, StreamReport, judge_streams
from support.front_ends import FRONT_ENDS, Readers
from support.front_ends import MODEL as TOLD
from support.front_ends import SPEC as TOLD_SPEC
from support.http import Connection, call, request
from support.stack import Service
from support.waiting import Stopwatch, wait_until

GATEWAYS: Final = 2
SPEC: Final = "Busy=hashing.py:Recorded"
_INFER: Final = f"/carpool/v1/models/{MODEL}/infer"
_PROBE_S: Final = 1.0  # a probe without an answer for so long is sent to the next gateway
_FORGOTTEN: Final = {"carpool_gateway_body_bytes": 0, "carpool_gateway_connections": 1}  # the one that asks


class GatewayOutcome(NamedTuple):
    """What became of a run with gateways. `of_producers`: what became of the producers' requests;
    `of_readers`: of the texts of readers, by front end."""

    of_producers: Outcome
    of_clients: HttpReport
    of_readers: Mapping[str, StreamReport] = MappingProxyType({})

    def is_faultless(self, *, executes_once: bool) -> bool:
        """Whether nothing was wrong with any request. See HttpReport."""
        return (
            self.of_producers.is_faultless
            and self.of_clients.is_faultless(executes_once=executes_once)
            and all(report.is_faultless for report in self.of_readers.values())
        )


class GatewayRun(Run):
    """The stack, gateways before it, and HTTP clients. The first gateway connects to Redis through
    `servers.proxy`, if there is one. `has_readers`: two more workers serve a model that writes texts, and
    readers read these."""

    replies: ClassVar[str] = "p[0-9]-*"  # those of gateways are of their own

    def __init__(self, servers: Servers, home: Path, seed: int, *, has_readers: bool) -> None:
        servers.environment["worker"][EXECUTIONS] = str(home / "executions")
        self._opened = ExitStack()
        self.clients: ClientProcess | None = None
        self.readers: Readers | None = None
        self._outages: list[Outage] = []
        self._has_readers = has_readers
        super().__init__(servers, home, seed, SPEC, {TOLD: TOLD_SPEC} if has_readers else {})
        self.gateways = [self._new_gateway(at, ["--port", "0"], "0") for at in range(GATEWAYS)]

    def begin(self, *, resends: bool) -> None:
        """Start the clients. `resends`: they use a proxy that sends requests again."""
        addresses = [address_of(gateway) for gateway in self.gateways]
        if resends:
            proxy = self._opened.enter_context(ResendingProxy(addresses, self.random.randrange(1000)))
            addresses = [proxy.address]
        self.clients = ClientProcess(addresses, MODEL, "c", self.home)
        self._opened.callback(self.clients.kill)
        self.clients.wait_for_more(20)
        if self._has_readers:
            rpc = {gateway.url: _rpc_of(gateway) for gateway in self.gateways}
            self.readers = Readers([*rpc], rpc, FRONT_ENDS)
            self._opened.enter_context(self.readers)
            self.readers.wait_for_more(1)

    def close(self) -> None:
        """End the clients, the readers, and the proxy."""
        self._opened.close()

    # --- what faults use -----------------------------------------------------------------------------------

    def wait_for_load(self) -> None:
        super().wait_for_load()
        if self.clients is not None:  # else the clients have not begun
            self.clients.wait_for_more(self.random.randint(10, 60))
        if self.readers is not None:
            self.readers.wait_until_open()

    def any_gateway(self) -> Service:
        """One of the gateways."""
        return self.random.choice(self.gateways)

    def kill(self, gateway: Service) -> None:
        """SIGKILL."""
        self._outages.append(Outage(gateway.url, time.monotonic(), is_killed=True))
        gateway.kill()

    def terminate(self, gateway: Service) -> int:
        """SIGTERM; return its exit status."""
        self._outages.append(Outage(gateway.url, time.monotonic(), is_killed=False))
        return gateway.terminate(30)

    def restart(self, gateway: Service) -> None:
        """Start another gateway in place of one that ended, at the same addresses."""
        at = self.gateways.index(gateway)
        rpc_port = _port_of(_rpc_of(gateway)) if self._has_readers else ""
        self.gateways[at] = self._new_gateway(at, ["--port", _port_of(address_of(gateway))], rpc_port)
        self._outages[-1] = self._outages[-1]._replace(ended_s=time.monotonic())

    def recovers_elsewhere(self, gateway: Service, begin: Callable[[], None]) -> None:
        """Begin a fault of this gateway, and measure how long it takes until a request that it had before is
        answered by another one."""
        key = f"probe-{len(self.recoveries_s)}"
        data = request("POST", _INFER, b'"probe"', Idempotency_Key=key)
        with Connection(gateway.url) as before:
            before.send(data)
            watch = Stopwatch()
            begin()
            self._until_answered(data, [one for one in self.gateways if one is not gateway])
            self.recoveries_s.append(watch.passed_s)

    def recovers_here(self, gateway: Service) -> None:
        """Measure how long it takes from now until this gateway answers a new request."""
        watch = Stopwatch()
        self._until_answered(request("POST", _INFER, b'"probe"'), [gateway])
        self.recoveries_s.append(watch.passed_s)

    def _until_answered(self, data: bytes, gateways: list[Service]) -> None:
        end_s, patience_s = time.monotonic() + SETTLE_S_MAX, _PROBE_S
        while time.monotonic() < end_s:
            for gateway in gateways:
                with suppress(OSError, AssertionError), Connection(gateway.url) as connection:
                    connection.socket.settimeout(patience_s)
                    connection.send(data)
                    if connection.answer().code == 200:
                        return
            time.sleep(0.02)
            patience_s *= 1.5  # on a busy machine none may be answered as soon
        raise AssertionError("no request is answered by a gateway any more")

    def _new_gateway(self, at: int, flags: list[str], rpc_port: str) -> Service:
        proxy = self.servers.proxy
        url = ["--redis-url", proxy.url] if at == 0 and proxy is not None else []
        rpc = ["--grpc-port", rpc_port] if self._has_readers else []
        return self.stack.gateway(*flags, *url, *rpc)

    # --- the end -------------------------------------------------------------------------------------------

    def finish_all(self) -> GatewayOutcome:
        """Stop the load, wait until everything is answered, and look at what became of each request."""
        assert self.clients is not None
        self.clients.stop()
        texts = self._texts()
        outcome = self.finish()
        left_over = [*outcome.left_over, *(line for one in self.gateways for line in _held_by(one))]
        memory = {**outcome.memory_mib, "gateway": max(peak_mib(one.pid) for one in self.gateways)}
        report = judge(self.clients.records(), read_executions(self.home / "executions"))
        return GatewayOutcome(outcome._replace(left_over=left_over, memory_mib=memory), report, texts)

    def _texts(self) -> dict[str, StreamReport]:
        """Let the readers finish what they began. Returns what became of it."""
        if self.readers is None:
            return {}
        self.readers.end()
        return judge_streams(self.readers.seen, self._outages)


def address_of(gateway: Service) -> str:
    """`host:port`."""
    return urlsplit(gateway.url).netloc


def _rpc_of(gateway: Service) -> str:
    address: str = gateway.wait_for("gateway started")["grpc"]
    return address


def _port_of(address: str) -> str:
    return address.rpartition(":")[2]


def _held_by(gateway: Service) -> Iterator[str]:
    """What a gateway holds although no request of a client is left."""
    held: dict[str, int] = {}

    def is_empty() -> bool:
        lines = call(gateway.url, "GET", "/metrics").body.decode().splitlines()
        values = dict(line.split() for line in lines if line.partition(" ")[0] in _FORGOTTEN)
        held.update({name: int(float(value)) for name, value in values.items()})
        return held == _FORGOTTEN

    try:
        wait_until(is_empty, description="the gateway holds nothing")
    except (AssertionError, OSError):
        yield f"{gateway.name}: {held}"


@contextmanager
def started(
    home: Path,
    seed: int,
    *,
    servers: ServersOf = alone,
    resends: bool = False,
    has_readers: bool = False,
) -> Iterator[GatewayRun]:
    """A stack under load of producers and HTTP clients. `resends`, `has_readers`: see GatewayRun."""
    home.mkdir(parents=True, exist_ok=True)
    with servers(home) as connected:
        run = GatewayRun(connected, home, seed, has_readers=has_readers)
        try:
            run.begin(resends=resends)
            yield run
        finally:
            run.close()
            run.hostile.stop()
            for producer in run.producers:
                producer.kill()
