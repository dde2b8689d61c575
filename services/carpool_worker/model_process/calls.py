"""What a model asks of other models while it executes a frame: a client for each request, which sends on its
behalf.

A model process signs in to Redis by itself, as a producer, with what its worker gives it for that purpose:
never with the worker's own credentials.

Why: docs/decisions/0100.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from carpool_worker.model_process.frames import CallerFields, FrameHeader

if TYPE_CHECKING:
    from carpool.client.on_behalf import AsyncRequestClient, RequestClient, Sender

    AnyClient = AsyncRequestClient | RequestClient


class Calls:
    """For one process. Connects when the model first calls another one."""

    def __init__(self, model: str, *, is_async: bool, sender: Sender | None = None) -> None:
        """`model`: the name under which this one is served. `sender`: what sends, if no client of its own
        does. Raises CarpoolErrors if the process has no address of Redis that a model may use."""
        # Imported here: other model processes do not pay for a Redis client that they never need.
        from carpool.client.on_behalf import Origin, Origins  # noqa: PLC0415

        self._origins = Origins(model, is_async=is_async, sender=sender)
        self._new_origin = Origin

    def of_frame(self, frame: FrameHeader) -> FrameCalls:
        """The requests of a frame as origins of others."""
        return FrameCalls(self, frame)

    def client_for(
        self, caller: CallerFields, place: int, deadline_s: float | None
    ) -> AsyncRequestClient | RequestClient:
        """A client for the request at this place in the batch."""
        correlation_id, priority, fields = caller
        return self._origins.client_for(self._new_origin(correlation_id, place, deadline_s, priority, fields))

    async def close(self) -> None:
        """Disconnect, for an async model."""
        await self._origins.close()

    def close_now(self) -> None:
        """The same for another model."""
        self._origins.close_now()


class FrameCalls:
    """What the requests of one frame ask of other models."""

    def __init__(self, calls: Calls, frame: FrameHeader) -> None:
        self._calls = calls
        self._frame = frame
        self._open: dict[int, AnyClient] = {}  # of the requests that the model executes now, by index

    def open(self, indexes: Sequence[int]) -> list[AnyClient]:
        """A client for each of these requests, for one call of the model."""
        deadlines_us = [us for size, us in self._frame.deadlines for _ in range(size)]
        clients: list[AnyClient] = []
        for place, index in enumerate(indexes):
            deadline_us = deadlines_us[index] if deadlines_us else None
            deadline_s = None if deadline_us is None else (deadline_us - self._frame.redis_ahead_us) / 1e6
            client = self._calls.client_for(self._frame.callers[index], place, deadline_s)
            self._open[index] = client
            clients.append(client)
        return clients

    async def close(self, clients: Iterable[AnyClient]) -> None:
        """The call of the model has ended: withdraw what has no result. Waits only for an async model."""
        for client in clients:
            await client.end()
        self._open.clear()

    def cancel(self, indexes: Iterable[int]) -> None:
        """Nobody waits for the results of these requests: withdraw what they asked."""
        for index in indexes:
            client = self._open.get(index)
            if client is not None:
                client.cancel()
