"""When does which batch leave? The rules, and nothing but the rules: time is an argument, Redis is elsewhere.

1. A batch leaves only when a worker has room: when a model process is idle, or just before a busy one will be
   (`core.capacity`); and at once, one ahead of each busy process, if it is full, since waiting cannot make it
   better. What is held back makes later batches fuller, priorities effective and deadlines keepable.
2. A batch is ready, in this order of reasons:
     full      it reached `max_batch_size` or `max_batch_cost`
     preferred it reached one of `preferred_batch_sizes`, and takes the largest that it can fill
     deadline  a request in its lane would miss its deadline if it waited longer
     efficient (`deferred` only) it is large enough for the model to be nearly as fast as it gets
     delay     its oldest request waited `max_queue_delay_ms`
     idle      a worker is free, or about to be, and the model does not want to wait (`max_queue_delay_ms` 0);
               batches of several requests are dispatched at even intervals (`core.capacity`)
   Under the policy `deferred` the last of these does not hold: a batch leaves as late as deadlines allow
   (`core.deferred`), and who cannot be met is refused before anything is computed.
3. Among ready lanes the one with the highest priority goes first, then the one whose request waited longest.
   Within a batch: higher priority first, tenants in fair turns, then arrival. Lanes never mix, and never
   close each other's batches.
4. A request whose deadline passes is answered at that moment, wherever it is: waiting, or in flight. If its
   `expiration_action` is delay it is never answered so: it goes behind all others if it still waits, and
   from then on nothing hurries for it; once in flight it has no deadline.
5. What would wait beyond `max_queue_size` (the model's, or its priority's) or `max_queue_bytes` is refused on
   arrival: the newest, never the oldest. A result that is held, to come in order, counts as waiting.

A request is in exactly one place:

    offered --> waiting --> in flight --> settled
       |           |            '-------> expired (answered; its batch goes on without it)
       '-> refused '-> refused: expired, withdrawn, or gone from Redis
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carpool.messages import Dispatch, DispatchReason, Refusal, Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core.capacity import Capacity, InFlightBatch
from carpool_batcher.core.custom import CustomPolicy
from carpool_batcher.core.deadlines import Deadlines
from carpool_batcher.core.decisions import Decision, Expire
from carpool_batcher.core.dispatching import Dispatcher
from carpool_batcher.core.queue import Queue

__all__ = ["Decision", "Dispatch", "DispatchReason", "Expire", "Scheduler"]


class Scheduler:
    """The batching of one model. Tell it what happens; `poll` says what to do; `wake_at` says when to ask."""

    def __init__(self, settings: ModelSettings, model_processes: int = 0) -> None:
        self._settings = settings
        self.capacity = Capacity(model_processes)
        self._queue = Queue()
        self._deadlines = Deadlines(self._queue, self.capacity)
        self._dispatcher = Dispatcher(self._queue, self.capacity, settings)

    # --- what happens --------------------------------------------------------------------------------------

    @property
    def settings(self) -> ModelSettings:
        """The model's settings. They may change at any time, and hold for whoever waits."""
        return self._settings

    @settings.setter
    def settings(self, settings: ModelSettings) -> None:
        waited = self._settings.max_queue_delay_ms
        self._settings = settings
        self._dispatcher.follow(settings)
        if settings.max_queue_delay_ms and not waited:
            self._deadlines.watch_anew(settings)

    @property
    def custom_policy(self) -> CustomPolicy | None:
        """A user's own policy, which says who may join a batch."""
        return self._dispatcher.custom

    @custom_policy.setter
    def custom_policy(self, custom: CustomPolicy | None) -> None:
        self._dispatcher.custom = custom

    @property
    def model_processes(self) -> int:
        """How many model processes live."""
        return self.capacity.processes

    @model_processes.setter
    def model_processes(self, processes: int) -> None:
        self.capacity.resize(processes)

    def set_withheld(self, results: int) -> None:
        """So many results are withheld until those before them are done (`preserve_ordering`): they count."""
        self._queue.withheld = results

    def offer(self, request: Request, now_us: int) -> Refusal | None:
        """A request arrived. Returns a Refusal if it may not wait."""
        refused = self._queue.add(request, self._settings)
        if refused is None and request.deadline_us is not None:
            self._deadlines.watch(request, request.deadline_us, self._settings, now_us)
        return refused

    def withdraw(self, correlation_ids: frozenset[str]) -> list[Refusal]:
        """A producer takes back what waits. What is in flight rides on."""
        return self._queue.withdraw(correlation_ids)

    def forget(self, requests: Iterable[Request]) -> None:
        """Queue requests are gone from Redis: withdrawn by XDEL, or taken by another batcher."""
        self._queue.forget(requests)

    def launch(self, batch_id: str, dispatch: Dispatch, now_us: int) -> None:
        """A Dispatch of the last `poll` was carried out: these requests of it are in flight."""
        self.capacity.cancel()
        self.adopt(batch_id, dispatch, now_us)

    def cancel(self) -> None:
        """A Dispatch of the last `poll` came to nothing: none of its requests waited any more."""
        self.capacity.cancel()

    def adopt(self, batch_id: str, dispatch: Dispatch, dispatched_us: int) -> None:
        """A batch is in flight that this scheduler did not dispatch: another batcher did, before."""
        requests = dispatch.requests
        due = {at: one for at, one in enumerate(requests) if dispatch.deadline_us(one) is not None}
        arrivals_us = [request.arrival_us for request in requests]
        batch = InFlightBatch(dispatched_us, len(requests), dispatch.lane, due, arrivals_us)
        self.capacity.launch(batch_id, batch)
        self._deadlines.watch_batch(batch_id, due)

    def settle(self, batch_id: str, compute_us: int, now_us: int) -> None:
        """A batch was committed; computing it took `compute_us`, 0 if nothing of it was computed."""
        self.capacity.settle(batch_id, compute_us, now_us)

    def forget_batch(self, batch_id: str, now_us: int) -> None:
        """A batch in flight is gone from Redis, and nothing is known of how long it took."""
        self.capacity.settle(batch_id, 0, now_us)

    # --- what there is to see ------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._queue.count

    @property
    def withheld(self) -> int:
        """Results that are withheld until those before them are done."""
        return self._queue.withheld

    @property
    def waiting_bytes(self) -> int:
        """What they bring along."""
        return self._queue.bytes

    def in_flight(self) -> dict[str, InFlightBatch]:
        """Batches in flight by ID, in the order in which they were dispatched."""
        return self.capacity.in_flight

    def oldest_arrival_us(self) -> int | None:
        """When the oldest waiting request arrived; None if none waits. O(lanes)."""
        return self._queue.oldest_arrival_us()

    def fill_percent(self, requests: Sequence[Request]) -> int:
        """How full a batch of these is, by number or by cost, whichever is nearer to its limit."""
        settings = self._settings
        percent = 100 * len(requests) // settings.max_batch_size
        if settings.max_batch_cost is not None:
            percent = max(percent, 100 * sum(one.cost for one in requests) // settings.max_batch_cost)
        return min(percent, 100)

    # --- what to do ----------------------------------------------------------------------------------------

    def poll(self, now_us: int) -> list[Decision]:
        """Everything that is due by now. A Dispatch must be answered by `launch` or `cancel`."""
        self.capacity.now_us = now_us
        decisions = self._deadlines.ring(now_us, self._settings)
        decisions += self._dispatcher.due(now_us)
        return decisions

    def wake_at_us(self) -> int | None:
        """The next moment (us) at which `poll` could decide something by time alone, or None."""
        moments = (self._deadlines.next_us(), self._dispatcher.next_us())
        return min((one for one in moments if one is not None), default=None)
