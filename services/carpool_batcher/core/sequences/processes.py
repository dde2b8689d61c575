"""Where sequences have space: those of a stateful model anywhere, up to a number; bound ones in processes.

1. A process of a bound model has `max_batch_size` slots. A sequence takes one when it is begun, and has it
   until it ends or is broken: only this process knows its state.
2. A sequence is begun in the process with the most free slots. One that drains begins no more: it leaves when
   those that it has have ended.
3. A process executes one batch at a time, with at most one request of each of its sequences.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from carpool.messages.sequences import SlotFreed
from carpool_batcher.core.sequences.sequence import OneSequence, part_of, place_of


class Space:
    """The space of a stateful model: at most `begun_max` sequences are begun at a time."""

    def __init__(self) -> None:
        self.begun_max = 1

    def is_free(self, begun: int) -> bool:
        """Whether another sequence can be begun, while `begun` are."""
        return begun < self.begun_max

    def awaited(self) -> str:
        """What a start waits for that has no space, to tell its producer."""
        return f"one of {self.begun_max} sequences to end (max_candidate_sequences)"

    def is_occupied_by(self, sequence: OneSequence) -> bool:
        """Whether a sequence has space already, in which it can begin anew."""
        return sequence.occupies_space

    def must_leave(self, sequence: OneSequence) -> bool:
        """Whether a sequence cannot stay in its process: that is gone, or drains before it has the start."""
        return False

    def restore(self, sequence: OneSequence, process: str) -> None:
        """A previous batcher gave space to a sequence."""

    def occupy(self, sequence: OneSequence) -> None:
        """A sequence is begun. There is free space, or it has some."""

    def leave(self, sequence: OneSequence) -> SlotFreed | None:
        """A sequence needs no space any more, if it had any. Returns what its process is to be told."""
        return None


class Processes(Space):
    """The model processes of a bound model: the slots of each, and which of them execute a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.slots_each = 1
        self._live: dict[str, None] = {}  # in the order of Redis
        self._draining: Collection[str] = ()
        self._slots_taken: Counter[str] = Counter()  # slots
        self._in_flight: Counter[str] = Counter()  # batches

    def set_live(self, live: Iterable[str], draining: Iterable[str]) -> None:
        """These processes are alive, and these of them drain."""
        self._live, self._draining = dict.fromkeys(live), frozenset(draining)

    @property
    def live(self) -> Iterable[str]:
        """The names of those that live."""
        return self._live

    def slots_taken(self, process: str) -> int:
        """How many sequences a process has."""
        return self._slots_taken[process]

    @property
    def slots(self) -> int:
        """Of all live processes."""
        return self.slots_each * len(self._live)

    # --- slots ---------------------------------------------------------------------------------------------

    def _roomiest(self) -> str:
        """The process with the most free slots, of those that begin sequences; '' if none has any."""
        beginning = [process for process in self._live if process not in self._draining]
        roomiest = min(beginning, key=self._slots_taken.__getitem__, default="")
        return roomiest if self._slots_taken[roomiest] < self.slots_each else ""

    def is_free(self, begun: int) -> bool:
        return bool(self._roomiest())

    def awaited(self) -> str:
        if not self._live:
            return "a model process"
        return f"one of {self.slots} slots of its model's processes (max_batch_size of each)"

    def is_occupied_by(self, sequence: OneSequence) -> bool:
        return sequence.process in self._live and sequence.process not in self._draining

    def must_leave(self, sequence: OneSequence) -> bool:
        process, head = sequence.process, sequence.head
        if process in self._draining and head is not None and part_of(head).starts:
            return True
        return (sequence.is_in_process or bool(process)) and process not in self._live

    def restore(self, sequence: OneSequence, process: str) -> None:
        self.leave(sequence)
        sequence.process, sequence.is_in_process = process, True
        if process:
            self._slots_taken[process] += 1

    def occupy(self, sequence: OneSequence) -> None:
        if not sequence.process:
            sequence.process = self._roomiest()
            self._slots_taken[sequence.process] += 1

    def leave(self, sequence: OneSequence) -> SlotFreed | None:
        process, is_in_process = sequence.process, sequence.is_in_process
        sequence.process, sequence.is_in_process = "", False
        if not process:
            return None
        _subtract_one(self._slots_taken, process)
        return SlotFreed(process, sequence.sequence_id) if is_in_process else None

    # --- batches -------------------------------------------------------------------------------------------

    def is_busy(self, process: str) -> bool:
        """Whether a batch of a process is in flight."""
        return process in self._in_flight

    def begin_batch(self, process: str) -> None:
        """A batch of this process is in flight, or will be at once."""
        self._in_flight[process] += 1

    def end_batch(self, process: str) -> None:
        """A batch of this process is not in flight any more."""
        _subtract_one(self._in_flight, process)


def _subtract_one(counter: Counter[str], name: str) -> None:
    """Names of processes are not used twice, so none is kept."""
    counter[name] -= 1
    if not counter[name]:
        del counter[name]


def lane_of_process(process: str, lane: str) -> str:
    """The name, in the queue, of a lane whose requests one process is to execute."""
    return f"{process}\n{lane}" if process else lane


OUTDATED_MIN: Final = 100  # starts that wait no more, and are still in the order


class WaitingStarts:
    """The sequences whose starts wait for space, in the order of the request stream.
    `OneSequence.waits_for_space` is set here only."""

    def __init__(self) -> None:
        self._heap: list[tuple[str, str]] = []  # of (place of a start, sequence ID); some wait no more
        self._waiting: dict[str, OneSequence] = {}  # by ID

    def __len__(self) -> int:
        return len(self._waiting)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def is_first(self, place: str) -> bool:
        """Whether no other start stands before this place."""
        return not self._heap or place <= self._heap[0][0]

    def add(self, sequence: OneSequence, place: str) -> None:
        """The start at this place waits, unless it does already."""
        if not sequence.waits_for_space:
            sequence.waits_for_space = True
            self._waiting[sequence.sequence_id] = sequence
            heapq.heappush(self._heap, (place, sequence.sequence_id))
            if len(self._heap) > 2 * len(self._waiting) + OUTDATED_MIN:
                self._heap = [item for item in self._heap if self._sequence_at(*item) is not None]
                heapq.heapify(self._heap)

    def discard(self, sequence: OneSequence) -> None:
        """The start of a sequence does not wait for space any more, if it did."""
        if sequence.waits_for_space:
            sequence.waits_for_space = False
            del self._waiting[sequence.sequence_id]

    def pop(self) -> OneSequence | None:
        """Take the first one out of the order, although its start still waits. None if it does not wait."""
        return self._sequence_at(*heapq.heappop(self._heap))

    def _sequence_at(self, place: str, sequence_id: str) -> OneSequence | None:
        """The sequence whose start at this place waits; None if it does not any more."""
        sequence = self._waiting.get(sequence_id)
        start = None if sequence is None else sequence.current.start
        return sequence if start is not None and place_of(start) == place else None
