"""Models that answer with what they are told of a request, and `Killed`, which ends its process at first."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool_worker.model_process.model import RequestInfo


def told(request: Any) -> dict[str, Any]:
    """What a RequestInfo, or a request of a stepping model, tells, as JSON can have it."""
    before_s, left_s, after_s = time.time(), request.time_left_s, time.time()
    return {
        "content_type": request.content_type,
        "accept": request.accept,
        "priority": request.priority,
        "cost": request.cost,
        "tenant": request.tenant,
        "lane": request.lane,
        "user": request.fields["user"].decode(),
        "deliveries": request.delivery_count,
        "age_s": time.time() - request.arrival_s,
        "left_s": left_s,
        "agrees": request.deadline_s is None
        or request.deadline_s - after_s - 1 < left_s < request.deadline_s - before_s + 1,
    }


def plain(_batch: list[Any], requests: Sequence[RequestInfo]) -> list[Any]:
    return [told(request) for request in requests]


class Stepping:
    max_batch_size = 4

    def begin(self, requests: Sequence[Any]) -> None:
        pass

    def step(self, requests: Sequence[Any]) -> None:
        for request in requests:
            request.finish(told(request))


def generating(_body: Any, request: RequestInfo) -> Iterator[Any]:
    yield told(request)


class Killed:
    """Its process dies on the body "die", as long as that may be the first time."""

    def predict(self, batch: list[Any], requests: Sequence[RequestInfo]) -> list[Any]:
        for body, request in zip(batch, requests, strict=True):
            if body == "die" and request.delivery_count == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return [request.delivery_count for request in requests]
