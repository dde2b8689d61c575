"""The server of gRPC: grpcio's for asyncio, on the event loop of the gateway.

Why: docs/decisions/0108.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from carpool.errors import UnimplementedError
from carpool_gateway.limits import Limits
from carpool_gateway.probes import Health
from carpool_gateway.rpc.calls import Call, Calls
from carpool_gateway.rpc.control import ControlCalls
from carpool_gateway.rpc.documents import Documents
from carpool_gateway.rpc.health import HealthService
from carpool_gateway.rpc.infer import MessageInference
from carpool_gateway.rpc.messages import HEALTH, INFERENCE, REFLECTIONS
from carpool_gateway.rpc.reflection import ReflectionService
from carpool_gateway.rpc.streams import MessageStreams
from carpool_gateway.server import DRAIN_IDLE_S
from carpool_gateway.tensor_requests import TensorRequests
from carpool_gateway.v2.streams import TensorStreams

_NO_MEMORY: Final = "offers no shared memory: send raw_input_contents"
_ABSENT: Final = {
    **dict.fromkeys(
        [
            f"{kind}SharedMemory{method}"
            for kind in ("System", "Cuda")
            for method in ("Status", "Register", "Unregister")
        ],
        _NO_MEMORY,
    ),
    "TraceSetting": "has no trace settings: the field traceparent of a request is passed on to its model",
    "LogSettings": "has no log settings: start it with --log-level",
}
_PING_MS: Final = 60_000  # a client that has vanished is found by then
_CLIENT_PING_MS_MIN: Final = 5_000  # of pings that a client sends by itself; more are an attack to grpcio


class GrpcServer:
    """Serves calls. Used on the event loop's thread."""

    def __init__(
        self,
        calls: Calls,
        documents: Documents,
        control: ControlCalls,
        health: Health,
        tensors: TensorRequests,
        streams: TensorStreams,
    ) -> None:
        inference = MessageInference(tensors)
        self._calls = calls
        self._health = HealthService(health)
        self._streams = MessageStreams(inference, streams)
        self._handlers = {
            **_named(INFERENCE.service, self._inference_handlers(documents, control, inference)),
            **_named(HEALTH.service, self._health_handlers()),
        }
        for own in REFLECTIONS:
            info = ReflectionService(own, (INFERENCE, HEALTH, *REFLECTIONS)).info
            path = f"/{own.service}/ServerReflectionInfo"
            self._handlers[path] = calls.stream(path, "grpc_server", info)
        self._server: Any = None

    def _inference_handlers(
        self, documents: Documents, control: ControlCalls, inference: MessageInference
    ) -> dict[str, Any]:
        service, calls = INFERENCE.service, self._calls
        unary = {
            "ServerLive": ("grpc_server", documents.server_live),
            "ServerReady": ("grpc_server", documents.server_ready),
            "ModelReady": ("grpc_model", documents.model_ready),
            "ServerMetadata": ("grpc_server", documents.server_metadata),
            "ModelMetadata": ("grpc_model", documents.model_metadata),
            "ModelConfig": ("grpc_model", documents.model_config),
            "ModelStatistics": ("grpc_model", documents.model_statistics),
            "RepositoryIndex": ("grpc_model", control.index),
            "RepositoryModelLoad": ("grpc_load", control.load),
            "RepositoryModelUnload": ("grpc_unload", control.unload),
            "ModelInfer": ("grpc_infer", inference.infer),
        }
        handlers = {
            method: calls.unary(f"/{service}/{method}", route, work)
            for method, (route, work) in unary.items()
        }
        path = f"/{service}/ModelStreamInfer"
        handlers["ModelStreamInfer"] = calls.stream(path, "grpc_stream", self._streams.infer)
        for method, why in _ABSENT.items():
            handlers[method] = calls.unary(f"/{service}/{method}", "grpc_none", _refusing(why))
        return handlers

    def _health_handlers(self) -> dict[str, Any]:
        service, health = HEALTH.service, self._health
        return {
            "Check": self._calls.unary(f"/{service}/Check", "grpc_server", health.check),
            "Watch": self._calls.stream(f"/{service}/Watch", "grpc_server", health.watch),
        }

    async def listen(self, host: str, port: int) -> int:
        """Begin to accept calls. Returns the port. Raises OSError."""
        self._server = grpc.aio.server(options=options_of(self._calls.limits))
        self._server.add_generic_rpc_handlers((_Table(self._handlers),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {address}: {error}") from None
        await self._server.start()
        return int(bound)

    async def drain(self, timeout_s: float) -> bool:
        """Answer what has begun, and accept no more. Returns whether all was answered."""
        end_s = time.monotonic() + timeout_s
        self._health.stop()
        await asyncio.sleep(min(DRAIN_IDLE_S, timeout_s))
        self._streams.drain()
        await self._server.stop(max(0.0, end_s - time.monotonic()))
        return self._calls.in_flight == 0


def options_of(limits: Limits) -> Sequence[tuple[str, int]]:
    """The options of grpcio's server.

    A connection that has reached its age takes no more calls. What is under way on it may take as long as any
    request, and its answer as long to be read as one of HTTP; then grpcio ends it. It has no other way to end
    an answer that its client does not read.
    """
    options = [
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # else a second gateway could have the same port
        ("grpc.keepalive_time_ms", _PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _CLIENT_PING_MS_MIN),
    ]
    if limits.grpc_connection_s:
        options += [
            ("grpc.max_connection_age_ms", int(limits.grpc_connection_s * 1000)),
            ("grpc.max_connection_age_grace_ms", int((limits.timeout_s + limits.write_s) * 1000)),
        ]
    return options


class _Table(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """Finds the handler of a method."""

    def __init__(self, handlers: Mapping[str, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)


def _named(service: str, handlers: Mapping[str, Any]) -> dict[str, Any]:
    return {f"/{service}/{method}": handler for method, handler in handlers.items()}


def _refusing(why: str) -> Any:
    async def refuse(call: Call, message: bytes) -> bytes:
        raise UnimplementedError(f"the gateway {why}")

    return refuse
