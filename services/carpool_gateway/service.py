"""The gateway service: a producer, the servers, and how they start and stop. One event loop, one thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import structlog

from carpool.backoff import Backoff
from carpool.client.producer import Producer
from carpool.errors import CarpoolError
from carpool.settings import GatewaySettings
from carpool_gateway.access_log import AccessLog
from carpool_gateway.app import Gateway, routes_of
from carpool_gateway.catalog import Catalog
from carpool_gateway.credentials import KeyRing, is_loopback
from carpool_gateway.limits import Limits
from carpool_gateway.meter import GatewayMetrics
from carpool_gateway.model_control import ModelControl
from carpool_gateway.native.handlers import NativeHandlers
from carpool_gateway.native.infer import Inference
from carpool_gateway.native.kept import KeptRequests
from carpool_gateway.native.scale import Scaling
from carpool_gateway.native.streaming import Streaming
from carpool_gateway.node_calls import NodeCalls
from carpool_gateway.probes import Probes
from carpool_gateway.redis_calls import RedisCalls
from carpool_gateway.routes import Router
from carpool_gateway.server import Server
from carpool_gateway.spans import GatewaySpans
from carpool_gateway.tensor_requests import TensorRequests
from carpool_gateway.v1.handlers import OpenAIHandlers
from carpool_gateway.v1.infer import OpenAIInference
from carpool_gateway.v2.control import ControlHandlers
from carpool_gateway.v2.generate import Generating
from carpool_gateway.v2.handlers import OpenInferenceHandlers
from carpool_gateway.v2.infer import TensorInference
from carpool_gateway.v2.streams import TensorStreams

if TYPE_CHECKING:
    from carpool_gateway.rpc.server import GrpcServer

SILENCE_MAX_S: Final = 30.0  # of the event loop, which looks after itself twice a second
_UPKEEP_S: Final = 0.5
_CONNECT_S: Final = 2.0  # after which clients are told that there is no Redis


class GatewayService:
    """Serves all registered models over HTTP, and over gRPC if that has a port. Raises ValueError and OSError
    if the settings do not allow it.

    `grpc_port`: once it has started; None without gRPC. `unhealthy`, `unready` and `warnings` may be called
    on any thread.
    """

    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics, name: str) -> None:
        self._settings = settings
        if settings.keys is None and not (settings.anonymous or is_loopback(settings.host)):
            raise ValueError(
                f"without --keys everybody who reaches {settings.host} could use all models: give a file of "
                "keys, listen on 127.0.0.1, or say that this is wanted with --anonymous"
            )
        try:
            self._keys = KeyRing(settings.keys, settings.origins)
        except ValueError as error:
            raise ValueError(f"{settings.keys}: {error}") from None
        limits = Limits(
            body_bytes=settings.body_bytes_max,
            memory_bytes=max(settings.memory_bytes_max, settings.body_bytes_max),
            connections=settings.connections_max,
            timeout_s=settings.request_timeout_s_max,
            grpc_connection_s=settings.grpc_connection_s_max,
        )
        default_timeout_s = min(settings.request_timeout_s, settings.request_timeout_s_max)
        self._producer = Producer(settings.redis_url, settings.prefix, default_timeout_s, "none")
        self._calls = RedisCalls(settings.redis_url)
        catalog = Catalog(self._calls, settings.prefix)
        kept = KeptRequests(self._producer, catalog, self._calls, limits)
        native = NativeHandlers(
            producer=self._producer,
            inference=Inference(self._producer, limits, default_timeout_s),
            streaming=Streaming(self._producer, limits),
            kept=kept,
            scaling=Scaling(self._calls, catalog, settings.prefix),
        )
        v1 = OpenAIHandlers(
            producer=self._producer,
            catalog=catalog,
            inference=OpenAIInference(
                producer=self._producer,
                catalog=catalog,
                kept=kept,
                limits=limits,
                default_timeout_s=default_timeout_s,
            ),
        )
        tensors = TensorRequests(
            producer=self._producer, catalog=catalog, limits=limits, default_timeout_s=default_timeout_s
        )
        streams = TensorStreams(tensors)
        self._control = ModelControl(
            NodeCalls(self._calls, settings.prefix),
            catalog,
            self._producer,
            is_enabled=settings.model_control,
            timeout_s=settings.load_timeout_s,
        )
        v2 = OpenInferenceHandlers(
            producer=self._producer,
            catalog=catalog,
            inference=TensorInference(tensors, limits),
            generating=Generating(streams, limits),
            streams=streams,
            control=ControlHandlers(self._control, limits),
            limits=limits,
            server_name=settings.server_name,
            origins=settings.origins,
        )
        access_log = AccessLog(
            metrics,
            logs_all=settings.access_log,
            logs_debug=settings.log_level == "debug",
            spans=metrics.record_spans and GatewaySpans(metrics.record_spans, settings.trace_ratio),
        )
        gateway = Gateway(Router(routes_of(native, v1, v2, Probes(self, metrics))), self._keys, access_log)
        self._server = metrics.server = Server(gateway, limits, name)
        self.grpc_port: int | None = None
        self._grpc = None
        if settings.grpc_port is not None:
            self._grpc = self._grpc_server(catalog, tensors, streams, access_log, limits, v2.metadata)
        self._tasks: list[asyncio.Task[None]] = []
        self._awake_s = time.monotonic()
        self._is_connected = False
        self._keys_problem = ""
        self._log = structlog.get_logger()

    def _grpc_server(
        self,
        catalog: Catalog,
        tensors: TensorRequests,
        streams: TensorStreams,
        access_log: AccessLog,
        limits: Limits,
        metadata: bytes,
    ) -> GrpcServer:
        """The server of gRPC, whose packages need not be installed. Raises ValueError if they are not."""
        try:
            from carpool_gateway.rpc.calls import Calls  # noqa: PLC0415
            from carpool_gateway.rpc.control import ControlCalls  # noqa: PLC0415
            from carpool_gateway.rpc.documents import Documents  # noqa: PLC0415
            from carpool_gateway.rpc.server import GrpcServer  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--grpc-port: the package {error.name} is missing; install Carpool with gRPC: pip install "
                "'PATH[gateway,grpc]'"
            ) from None
        calls = Calls(
            keys=self._keys,
            access_log=access_log,
            memory=self._server.memory,
            limits=limits,
            new_request_id=self._server.next_request_id,
            of_mistake=self._server.failure,
        )
        documents = Documents(producer=self._producer, catalog=catalog, health=self, server_metadata=metadata)
        return GrpcServer(calls, documents, ControlCalls(self._control), self, tensors, streams)

    async def start(self) -> int:
        """Connect to Redis, and listen; after a moment also without Redis. Returns the port of HTTP. Raises
        OSError."""
        connecting = asyncio.ensure_future(self._connect())
        await asyncio.wait([connecting], timeout=_CONNECT_S)
        self._tasks = [connecting, asyncio.ensure_future(self._keep_up())]
        port = await self._server.listen(self._settings.host, self._settings.port)
        if self._grpc is not None:
            self.grpc_port = await self._grpc.listen(self._settings.host, self._settings.grpc_port or 0)
        return port

    async def stop(self) -> bool:
        """Drain: see `Server.drain`. Returns whether every request was answered."""
        drain_s = self._settings.drain_s
        self._control.stop()
        draining = [self._server.drain(drain_s)]
        if self._grpc is not None:
            draining.append(self._grpc.drain(drain_s))
        all_answered = all(await asyncio.gather(*draining))
        await asyncio.sleep(0)  # connections that were ended withdraw their requests
        for task in self._tasks:
            task.cancel()
        self._calls.close()
        await self._producer.close()
        return all_answered

    async def _connect(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._producer.connect()
            except CarpoolError as error:
                self._log.warning("Redis cannot be reached", reason=error.detail)
                await asyncio.sleep(backoff.next_s())
            else:
                self._is_connected = True
                return

    async def _keep_up(self) -> None:
        """Show that the event loop runs, and read the file of keys again when it has changed."""
        while True:
            self._awake_s = time.monotonic()
            try:
                if self._keys.reload():
                    self._keys_problem = ""
                    self._log.info("keys read again", file=str(self._settings.keys))
            except (OSError, ValueError) as error:
                if not self._keys_problem:
                    self._log.error("keys cannot be read; those before hold", reason=str(error))
                self._keys_problem = f"{self._settings.keys}: {error}; the keys before hold"
            await asyncio.sleep(_UPKEEP_S)

    # --- health --------------------------------------------------------------------------------------------

    def unhealthy(self) -> Sequence[str]:
        """Whether the event loop stands still."""
        silent_s = time.monotonic() - self._awake_s
        return [f"the event loop has stood still for {silent_s:.0f} s"] if silent_s > SILENCE_MAX_S else []

    def unready(self) -> Sequence[str]:
        """Draining, or no Redis."""
        if self._server.is_draining:
            return ["draining"]
        error = self._producer.packer.transport.connection_error
        if error is not None:
            return [error.detail]
        return [] if self._is_connected else ["not connected to Redis yet"]

    def warnings(self) -> Sequence[str]:
        """A file of keys that cannot be read."""
        return [self._keys_problem] if self._keys_problem else []
