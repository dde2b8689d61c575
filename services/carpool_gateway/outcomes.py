"""The outcomes of loads and unloads, for the calls that wait for them.

One task asks Redis for all of them: a load may take minutes, and holds neither a thread nor a connection. It
runs only while somebody waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import structlog

from carpool.errors import CarpoolError, UnavailableError
from carpool.shown import trace_of
from carpool.wire.nodes import Outcome, OutcomeState, Snapshot, Wanted
from carpool_gateway.node_calls import NodeCalls

POLL_S: Final = 0.1
# How long a load waits for room. A node that is started then has claimed it by then, and others have taken
# over what a dead one had.
ROOM_S: Final = 10.0
_STOPS: Final = "the gateway stops: what was asked for goes on, and /v2/repository/index tells how it ends"


class _Watch:
    """Somebody who waits until `end_s`: `ended` has the result then, or before."""

    def __init__(self, model: str, generation: int, end_s: float) -> None:
        self.model = model
        self.generation = generation
        self.end_s = end_s
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def look(self, snapshot: Snapshot, outcome: Outcome, now_s: float) -> None:
        """Look what has become of it."""
        raise NotImplementedError

    def finish(self, result: object) -> None:
        """Tell who waits."""
        if not self.ended.done():
            self.ended.set_result(result)

    def fail(self, error: CarpoolError) -> None:
        """Tell who waits that it is not known."""
        if not self.ended.done():
            self.ended.set_exception(error)


class _Load(_Watch):
    """A load: its outcome when it serves or cannot be, when no node has had room for it for ROOM_S, and in
    any case at the end. If another load of the model comes meanwhile, the outcome of that one."""

    def __init__(self, model: str, generation: int, end_s: float) -> None:
        super().__init__(model, generation, end_s)
        self._waits_since_s: float | None = None

    def look(self, snapshot: Snapshot, outcome: Outcome, now_s: float) -> None:
        if outcome.state is OutcomeState.GONE:
            later = [one for one in snapshot.wanted if one.model == self.model and not one.is_leaving]
            newest = max((one.generation for one in later if one.share is None), default=0)
            if newest > self.generation:
                self.generation = newest
                return
        if outcome.state is not OutcomeState.WAITING:
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = now_s
        has_no_room = self._waits_since_s is not None and now_s - self._waits_since_s >= ROOM_S
        goes_on = outcome.state in (OutcomeState.WAITING, OutcomeState.LOADING)
        if not goes_on or has_no_room or now_s >= self.end_s:
            self.finish(outcome)


class _Unload(_Watch):
    """An unload: whether no process of what was wanted is left, when that is so, and at the end."""

    def __init__(self, unloaded: Sequence[Wanted], end_s: float) -> None:
        super().__init__(unloaded[0].model, unloaded[0].generation, end_s)
        self._seats = [seat for one in unloaded for seat in one.seats]

    def look(self, snapshot: Snapshot, outcome: Outcome, now_s: float) -> None:
        is_gone = all(snapshot.held(seat) is None for seat in self._seats)
        if is_gone or now_s >= self.end_s:
            self.finish(is_gone)


class Outcomes:
    """What becomes of loads and unloads. Used on the event loop's thread.

    While Redis cannot be reached, all wait on; those whose time is over then get the error.
    """

    def __init__(self, nodes: NodeCalls) -> None:
        self._nodes = nodes
        self._watches: list[_Watch] = []
        self._asking: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._log = structlog.get_logger()

    async def of_load(self, model: str, generation: int, end_s: float) -> Outcome:
        """What becomes of a load until then, on the clock of `time.monotonic`."""
        outcome: Outcome = await self._watch(_Load(model, generation, end_s))
        return outcome

    async def of_unload(self, unloaded: Sequence[Wanted], end_s: float) -> bool:
        """Whether the processes of what was wanted have ended by then."""
        if not unloaded:
            return True
        is_gone: bool = await self._watch(_Unload(unloaded, end_s))
        return is_gone

    def stop(self) -> None:
        """Tell all who wait, and all who come later, that the gateway stops."""
        self._is_stopped = True
        for watch in self._watches:
            watch.fail(UnavailableError(_STOPS))

    async def _watch(self, watch: _Watch) -> Any:
        self._watches.append(watch)
        if self._is_stopped:
            watch.fail(UnavailableError(_STOPS))
        elif self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())
        try:
            return await watch.ended
        finally:
            self._watches.remove(watch)

    async def _ask(self) -> None:
        """Ask for all who wait, until there are none."""
        try:
            while self._watches:
                await self._ask_once()
                await asyncio.sleep(POLL_S)
        except Exception as error:  # a mistake of ours: nobody is to wait for ever
            self._log.error("outcomes cannot be read", exception=trace_of(error))
            for watch in self._watches:
                watch.fail(UnavailableError("what becomes of it cannot be read: see the log of the gateway"))
        finally:
            self._asking = None

    async def _ask_once(self) -> None:
        now_s = time.monotonic()
        try:
            models = {watch.generation: watch.model for watch in self._watches}
            snapshot, outcomes = await self._nodes.outcomes(models)
        except CarpoolError as error:
            for watch in self._watches:
                if now_s >= watch.end_s:
                    watch.fail(error)
            return
        for watch in list(self._watches):
            if watch.generation in outcomes:  # else it came meanwhile
                watch.look(snapshot, outcomes[watch.generation], now_s)
