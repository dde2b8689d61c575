"""What a worker of a stepping model does in Redis beside `WorkerStore`: write chunks, hand requests over.

Each request is alone in its batch. Its progress has the chunks that were written, in the form in which
another model process needs them to go on (`carpool_worker.model_process.step_frames`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from carpool.clock import RedisClock
from carpool.keys import Keys
from carpool.messages import Batch, Chunk, DeadLetter, Result, Streamed
from carpool.store.arguments import Group, ScriptKeys, group_list_args, list_args
from carpool.store.connection import Argument, Link, Script
from carpool.store.directory import SETTLED_ENTRIES_MAX, no_errors
from carpool.store.results import PROGRESS_TTL_MS, Owner, answer_ahead
from carpool.store.worker import DEAD_ENTRIES_MAX, Progress
from carpool.wire.batches import encode_dead_letter, encode_streamed
from carpool.wire.results import encode_chunk, encode_chunk_envelope, encode_envelope, encode_result

_STEP: Final = Script("step", after=("ownership", "arguments", "deliver"))
_HAND_OVER: Final = Script("hand_over", after=("ownership",))
_HANDED_OVER_IDLE_MS: Final = 7 * 24 * 3600 * 1000  # longer than any lease

State = Literal["WRITTEN", "FENCED", "ANSWERED", "MISMATCH"]


class KeptChunk(NamedTuple):
    """A chunk to be written: for its reader, and for another process that goes on with the request."""

    chunk: Chunk
    kept: bytes


class StepWrite(NamedTuple):
    """What is to be written for one request; nothing, if only its state is asked for.

    `written`: how many chunks it has in Redis. `first_us`: the time from its arrival to the first chunk, if
    that is among `chunks`. `result`: its final result, if it ended. `compute_us`, `waited_us`: see
    `BatchSettled`. `has_passed`: it survived the start that was recorded last, which then does not count.
    `streamed`: if it ended, see `BatchSettled`.
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


class StepReply(NamedTuple):
    """The state of a request (see `step.lua`), and how much is in its list or reply stream."""

    state: State
    unread: int


class StepStore:
    """A worker's connection to one stepping model, for one of its loops."""

    def __init__(self, link: Link, keys: Keys, clock: RedisClock) -> None:
        self._link = link
        self._keys = keys
        self.clock = clock

    def write(self, consumer: str, writes: Sequence[StepWrite]) -> list[StepReply]:
        """Write what a step did for several requests, in one script.

        Raises CommandError with the code OOM if Redis is full, and one of the requests that go on has chunks.
        """
        keys = self._keys
        script_keys = ScriptKeys(keys.batches, keys.settled, keys.dead)
        args: list[Argument] = [
            consumer, PROGRESS_TTL_MS, SETTLED_ENTRIES_MAX, DEAD_ENTRIES_MAX,
            *group_list_args(self._write_args(script_keys, write) for write in writes),
        ]  # fmt: skip
        replies = self._link.run(_STEP, script_keys.keys, args)
        return [StepReply(state.decode(), unread) for state, unread in replies]

    def _write_args(self, script_keys: ScriptKeys, write: StepWrite) -> Group:
        batch, keys = write.batch, self._keys
        (run,) = batch.runs
        is_list = run.reply_to is None
        target = keys.result(run.correlation_ids[0]) if run.reply_to is None else keys.replies(run.reply_to)
        args: list[Argument] = [
            batch.id, batch.epoch, script_keys.index(keys.progress(batch.id)), script_keys.index(target),
            "list" if is_list else "stream", batch.result_ttl_ms, write.written,
            "" if write.first_us is None else write.first_us,
        ]  # fmt: skip
        encode = encode_chunk if is_list else encode_chunk_envelope
        args += group_list_args([(kept, encode(chunk)) for chunk, kept in write.chunks])
        final: Argument = ""
        if write.result is not None:
            final = (encode_result if is_list else encode_envelope)(write.result)
        args += [final, write.compute_us, write.waited_us, int(write.has_passed)]
        args.append(encode_streamed(write.streamed))
        args += list_args([script_keys.index(keys.body(name)) for name in batch.body_names])
        args += list_args([] if write.dead_letter is None else encode_dead_letter(write.dead_letter))
        return args

    def record_start(self, consumer: str, batch: Batch) -> None:
        """Record that a request takes a step alone. Raises FencedError."""
        owner = Owner(consumer, batch.epoch)
        answer_ahead(self._link, self._keys, owner, batch.id, (), 0, batch.result_ttl_ms)

    def chunks(self, batch_ids: Sequence[str]) -> list[Sequence[bytes]]:
        """The chunks that were written of each of these requests, oldest first, as they were kept."""
        replies = self._link.call_many(*[("HGETALL", self._keys.progress(name)) for name in batch_ids])
        return [Progress.read(reply).chunks for reply in no_errors(replies)]

    def hand_over(self, consumer: str, batches: Iterable[tuple[str, int]]) -> int:
        """Give up batches (ID, epoch), so that other workers reclaim them at once. Returns how many."""
        args: list[Argument] = [consumer, _HANDED_OVER_IDLE_MS]
        for batch_id, epoch in batches:
            args += [batch_id, epoch]
        count: int = self._link.run(_HAND_OVER, [self._keys.batches], args)
        return count
