"""What a worker of a stepping model does in Redis beside `WorkerStore`: write chunks, hand requests over.

Each request is alone in its batch. Its progress has the chunks that were written, in the form in which
another model process needs them to go on (`carpool_worker.model_process.stepping.frames`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgpack

from carpool.clock import RedisClock
from carpool.errors import OK
from carpool.keys import Keys, batch_streams
from carpool.messages.batches import Batch
from carpool.messages.results import Chunk, DeadLetter, Result, state_of
from carpool.messages.settled import Failures, Streamed
from carpool.model_settings import DEAD_LETTERS_MAX
from carpool.store.arguments import ScriptKeys
from carpool.store.connection import Argument, Link, Script
from carpool.store.directory import SETTLED_ENTRIES_MAX, no_errors
from carpool.store.results import PROGRESS_TTL_MS, Owner, Start, answer_ahead
from carpool.store.worker import Progress
from carpool.wire.batches import encode_dead_letter, encode_streamed, failures_fields
from carpool.wire.results import encode_chunk, encode_chunk_envelope, encode_envelope, encode_result

_STEP: Final = Script("step", after=("ownership", "record", "deliver", "statistics"))
_HAND_OVER: Final = Script("hand_over", after=("ownership",))
_ARGS_BEFORE_FINALS: Final = 5  # of `step.lua`
_HANDED_OVER_IDLE_MS: Final = 7 * 24 * 3600 * 1000  # longer than any lease

State = Literal["WRITTEN", "FENCED", "ANSWERED", "MISMATCH"]
_STATES: Final[dict[bytes, State]] = {
    b"WRITTEN": "WRITTEN",
    b"FENCED": "FENCED",
    b"ANSWERED": "ANSWERED",
    b"MISMATCH": "MISMATCH",
}


class KeptChunk(NamedTuple):
    """A chunk to be written: for its reader, and for another process that goes on with the request."""

    chunk: Chunk
    kept: bytes


class StepWrite(NamedTuple):
    """What is to be written for one request; nothing, if only its state is asked for.

    `written`: how many chunks it has in Redis. `first_us`: the time from its arrival to the first chunk, if
    that is among `chunks`. `result`: its final result, if it ended. `compute_us`, `waited_us`: see
    `BatchSettled`. `has_passed`: it survived the start that was recorded last, which then does not count.
    `streamed`: if it ended, see `BatchSettled`. `error`: the name of what the model raised, if it failed.
    `is_renewed`: with these chunks, what is kept of it in Redis
    is to expire later; as with the first ones.
    """

    batch: Batch
    written: int
    chunks: Sequence[KeptChunk] = ()
    first_us: int | None = None
    result: Result | None = None
    compute_us: int = 0
    waited_us: int = 0
    dead_letter: DeadLetter | None = None
    has_passed: bool = False
    streamed: Streamed | None = None
    is_renewed: bool = True
    error: str = ""


class StepReply(NamedTuple):
    """The state of a request (see `step.lua`), and how much is in its list or reply stream."""

    state: State
    unread: int


class StepStore:
    """A worker's connection to one stepping model, for one of its loops."""

    def __init__(self, link: Link, keys: Keys, clock: RedisClock, version: str = "") -> None:
        """`version`: that of the worker's model, if it names one."""
        self._link = link
        self._keys = keys
        self._streams = batch_streams(keys, version)
        self.clock = clock

    def write(self, consumer: str, writes: Sequence[StepWrite]) -> list[StepReply]:
        """Write what a step did for several requests, in one script.

        Raises CommandError with the code OOM if Redis is full, and one of the requests that go on has chunks.
        """
        keys = self._keys
        script_keys = ScriptKeys(keys.batches, keys.settled, keys.dead, keys.progress(""), keys.statistics)
        finals: list[Argument] = []
        requests = [self._element(script_keys, finals, write) for write in writes]
        packed = msgpack.packb(requests, use_bin_type=False)  # Lua's cmsgpack does not know the type bin
        has_version = any(write.batch.version for write in writes)
        of_version = script_keys.index(self._streams[-1]) if has_version else ""
        args = [consumer, SETTLED_ENTRIES_MAX, DEAD_LETTERS_MAX, packed, of_version, *finals]
        replies = self._link.run(_STEP, script_keys.keys, args)
        pairs = zip(replies[::2], replies[1::2], strict=True)
        return [StepReply(_STATES[state], unread) for state, unread in pairs]

    def _element(self, script_keys: ScriptKeys, finals: list[Argument], write: StepWrite) -> list[Any]:
        """A request as `step.lua` reads it. Its final envelope, if it has one, is appended to `finals`."""
        batch, written, chunks, result = write.batch, write.written, write.chunks, write.result
        (run,) = batch.runs
        correlation_id, reply_to = run.correlation_ids[0], run.reply_to
        if reply_to is None:
            target, kind, encode = self._keys.result(correlation_id), "list", encode_chunk
        else:
            target, kind, encode = self._keys.replies(reply_to), "stream", encode_chunk_envelope
            if result is not None and reply_to == correlation_id and not batch.stream:
                kind = state_of(result)
        element: list[Any] = [
            batch.id,
            batch.epoch,
            script_keys.index(target),
            kind,
            batch.result_ttl_ms,
            written,
            [encode(chunk) for chunk, _ in chunks],
            _progress_fields(written, chunks, write.first_us) if chunks else (),
            PROGRESS_TTL_MS if write.is_renewed else 0,
            write.compute_us,
            write.waited_us,
            [script_keys.index(self._keys.body(name)) for name in batch.body_names],
            write.has_passed,
        ]
        if result is not None:
            finals.append(encode_result(result) if reply_to is None else encode_envelope(result))
            dead = () if write.dead_letter is None else encode_dead_letter(write.dead_letter)
            failed = [] if result.status == OK else failures_fields(Failures({result.status: 1}, write.error))
            element += _ARGS_BEFORE_FINALS + len(finals), encode_streamed(write.streamed), dead, failed
            element += max(0, self.clock.now_us() - run.arrival_us), result.queue_us
        return element

    def record_start(self, consumer: str, batch: Batch, number: int) -> None:
        """Record that a request takes a step alone; see `Start`. Raises FencedError."""
        owner = Owner(consumer, batch.epoch)
        start = Start(0, number)
        answer_ahead(self._link, self._keys, owner, batch.id, (), start, batch.result_ttl_ms)

    def chunks(self, batch_ids: Sequence[str]) -> list[Sequence[bytes]]:
        """The chunks that were written of each of these requests, oldest first, as they were kept."""
        replies = self._link.call_many(*[("HGETALL", self._keys.progress(name)) for name in batch_ids])
        return [Progress.read(reply).chunks for reply in no_errors(replies)]

    def hand_over(self, consumer: str, batches: Iterable[tuple[str, int]]) -> int:
        """Give up batches (ID, epoch), so that other workers reclaim them at once. Returns how many."""
        args: list[Argument] = [consumer, _HANDED_OVER_IDLE_MS]
        for batch_id, epoch in batches:
            args += [batch_id, epoch]
        count: int = self._link.run(_HAND_OVER, self._streams, args)
        return count


def _progress_fields(written: int, chunks: Sequence[KeptChunk], first_us: int | None) -> list[str | bytes]:
    """Fields and values of a request's progress, once these chunks follow the `written` ones."""
    fields: list[str | bytes] = ["chunks", str(written + len(chunks))]
    if first_us is not None:
        fields += "first_us", str(first_us)
    for index, (_, kept) in enumerate(chunks, written):
        fields += f"chunk:{index}", kept
    return fields
