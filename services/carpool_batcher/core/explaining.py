"""Why a waiting request is not dispatched yet: one sentence for a person, by the rules of `core.scheduler`.

Why: docs/decisions/0115.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from carpool.messages.requests import Run
from carpool.model_settings import ModelKind
from carpool_batcher.core.dispatching import Outlook
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.core.versions import VERSION_AWAITED_US
from carpool_batcher.core.waiting.lane import NEVER_US, Lane
from carpool_batcher.core.waiting.lane_index import Gate

NAME_CHARS_MAX: Final = 60  # of a lane in a sentence


class Why(NamedTuple):
    """Why a request waits, and until when, as far as that is known (us)."""

    sentence: str
    until_us: int | None = None


def explain(scheduler: Scheduler, run: Run, now_us: int) -> Why:
    """Why a waiting run is not dispatched yet."""
    if scheduler.pause is not None:
        return Why(scheduler.pause.detail)
    if scheduler.sequences.is_reading:
        return Why("its batcher took over, and has not read all that waits yet")
    if run.waits_in is scheduler.queue.delayed:
        return Why("its producer delayed it (not_before)", run.arrival_us)
    lane = run.waits_in
    if type(lane) is not Lane:
        return _of_follower(scheduler, run)
    missing = _missing_processes(scheduler, lane)
    if missing:
        return Why(missing)
    outlook = scheduler.outlook(lane, now_us)
    if outlook is None:
        return Why(f"no model process has version {lane.version}")
    why = _of_lane(scheduler, lane, outlook, now_us)
    if run.is_late:
        late = "its deadline has passed, so it is served behind all others (expiration_action); "
        return why._replace(sentence=f"{late}{why.sentence}")
    return why


def _of_follower(scheduler: Scheduler, run: Run) -> Why:
    awaited = scheduler.sequences.awaited(run) or "an earlier request of its sequence"
    blocker = scheduler.sequences.blocker(run)
    return Why(f"it waits for {awaited}{f', {blocker}' if blocker else ''}")


def _missing_processes(scheduler: Scheduler, lane: Lane) -> str:
    """What processes lack for a lane; empty if some can execute it."""
    if not scheduler.model_processes:
        return "no model process takes batches: none lives, or all drain"
    if lane.version and lane.version not in scheduler.versions.processes:
        if lane.is_asked:
            seconds = VERSION_AWAITED_US // 1_000_000
            return (
                f"no worker has version {lane.version}, for which it asks; if none comes within {seconds} s, "
                "it is answered NOT_FOUND"
            )
        return f"no worker has version {lane.version}, whose share of the traffic it belongs to"
    return ""


def _of_lane(scheduler: Scheduler, lane: Lane, outlook: Outlook, now_us: int) -> Why:
    """What the next batch of its lane waits for. A request that is behind many waits for others as well."""
    gate, claim, first, free_at_us, spaced_us = outlook
    if gate is Gate.BUSY:
        return Why(f"model process {lane.process}, which has its sequence, executes another batch")
    if claim.ready_at_us > now_us:
        until_us = None if claim.ready_at_us >= NEVER_US else claim.ready_at_us
        why = "max_queue_delay_ms" if claim.reason == "delay" else "the policy deferred"
        return Why(f"its lane waits for more requests ({why})", until_us)
    others = "" if first is None or first is lane else _comes_first(first, lane)
    if free_at_us is None or free_at_us > now_us:
        occupied = "slots of the" if scheduler.kind is ModelKind.STEPPING else ""
        busy = f"all {occupied} {scheduler.model_processes} model processes are busy".replace("  ", " ")
        return Why(f"{busy}, and {others}" if others else busy, free_at_us)
    if others:
        return Why(others)
    if spaced_us > now_us:
        return Why("batches are dispatched at even intervals", spaced_us)
    return Why("nothing: it goes with the next batch for which its turn comes")


def _comes_first(first: Lane, lane: Lane) -> str:
    """Why a batch of another lane is dispatched first."""
    name = f"lane {first.label[:NAME_CHARS_MAX]!r}" if first.label else "the default lane"
    rank, _ = first.front()
    if rank > lane.front()[0]:
        return f"{name} comes first: it has requests of priority {rank - 1}"
    return f"{name} comes first: its tenant's turn is earlier, or its requests are older"
