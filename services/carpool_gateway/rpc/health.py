"""The standard service for health, `grpc.health.v1.Health`, which load balancers and orchestrators ask."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from google.protobuf.message import DecodeError

from carpool.errors import InvalidArgumentError, NotFoundError
from carpool_gateway.probes import Health
from carpool_gateway.rpc.calls import Call
from carpool_gateway.rpc.messages import HEALTH, INFERENCE

_LOOK_S: Final = 0.5  # how often a client that watches is told of changes
_SERVICES: Final = ("", INFERENCE.service, HEALTH.service)
_Status: Final = HEALTH["HealthCheckResponse"]


class HealthService:
    """Answers calls about the health of the gateway."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._stopping = asyncio.Event()

    async def check(self, call: Call, message: bytes) -> bytes:
        """Whether a service can serve. Raises NotFoundError if there is no such service."""
        name = _service_in(message)
        if name not in _SERVICES:
            raise NotFoundError(f"there is no service {name!r:.80}: ask for {INFERENCE.service!r}, or for ''")
        return self._answer(name)

    async def watch(self, call: Call) -> None:
        """Tell whether a service can serve: now, and whenever that changes. Ends when the gateway stops."""
        name, told = _service_in(await call.context.read()), b""
        while True:
            answer = self._answer(name)
            if answer != told:
                await call.context.write(answer)
                told = answer
            if self._stopping.is_set():
                return
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def stop(self) -> None:
        """The gateway stops: it is not ready any more."""
        self._stopping.set()

    def _answer(self, name: str) -> bytes:
        if name not in _SERVICES:
            status = _Status.SERVICE_UNKNOWN
        else:
            status = _Status.NOT_SERVING if self._health.unready() else _Status.SERVING
        return bytes(_Status(status=status).SerializeToString())


def _service_in(message: Any) -> str:
    try:
        return str(HEALTH["HealthCheckRequest"].FromString(message).service)
    except (DecodeError, TypeError):  # the client has ended the call without a message
        raise InvalidArgumentError("the message is no HealthCheckRequest") from None
