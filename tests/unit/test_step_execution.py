"""One request of a stepping model in a worker's hands: what is written of it, and when."""

from __future__ import annotations

import json
from typing import Any, Final

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given

from carpool.errors import ABORTED, CANCELLED, INTERNAL, OK, RESOURCE_EXHAUSTED
from carpool.messages.batches import Batch, BatchedRun
from carpool.messages.requests import JSON, MSGPACK
from carpool.messages.results import Result
from carpool.store.steps import StepReply, StepWrite
from carpool_worker.execution import Execution
from carpool_worker.model_process.frames import pack_values, too_large, unpack_values
from carpool_worker.model_process.stepping.frames import Advance
from carpool_worker.stepping import execution as step_execution
from carpool_worker.stepping.execution import UNSEEN_S_MAX, WRITTEN_TOGETHER_MAX, Reader, StepExecution

NOW_US: Final = 10_000_000
BUFFER: Final = 4  # stream_buffer


def request_of(
    *,
    stream: bool = True,
    reply_to: str | None = None,
    content_type: str = JSON,
    epoch: int = 1,
    **more: Any,
) -> StepExecution:
    """A request that arrived 7 ms ago and was dispatched 2 ms ago."""
    run = BatchedRun("1-0", ["r"], [b"1"], content_type, reply_to, NOW_US - 7000, None, None)
    batch = Batch("7-0", epoch, [run], "full", NOW_US - 2000, "", stream=stream)
    request = StepExecution(Execution(batch, **more), 1, 0.0)
    request.sent(NOW_US)
    return request


def emit(request: StepExecution, *values: Any, emitted: int = 0, **ended: Any) -> None:
    """A step emitted these values, and ended the request with `output` or `failure`."""
    chunk = pack_values(list(values)) if values else b""
    if "output" in ended:
        ended["output"] = pack_values([ended["output"]])
    request.apply(Advance(request.key, chunk, emitted or len(values), **ended), 3, NOW_US + 500)


def carry_out(request: StepExecution, write: StepWrite, unread: int = 0, now_s: float = 0.0) -> None:
    request.wrote(write, StepReply("WRITTEN", unread), BUFFER, now_s, NOW_US)


def bodies(write: StepWrite) -> list[Any]:
    return [json.loads(chunk.body) for chunk, _ in write.chunks]


# --- chunks ------------------------------------------------------------------------------------------------


class Redis:
    """What a reader finds: chunks are appended to its list, and it removes some."""

    def __init__(self) -> None:
        self.unread: list[tuple[int, Any, int]] = []
        self.read: list[tuple[int, Any, int]] = []
        self.kept: list[bytes] = []
        self.result: Result | None = None

    def write(self, request: StepExecution, write: StepWrite) -> None:
        assert write.written == len(self.kept)
        for chunk, kept in write.chunks:
            self.unread.append((chunk.index, json.loads(chunk.body), chunk.merged))
            self.kept.append(kept)
        self.result = write.result
        request.wrote(write, StepReply("WRITTEN", len(self.unread)), BUFFER, 0.0, NOW_US)

    def take(self, count: int) -> None:
        self.read += self.unread[:count]
        del self.unread[:count]


events = st.lists(
    st.one_of(
        st.tuples(st.just("emit"), st.integers(1, 3)),
        st.tuples(st.just("write"), st.booleans()),
        st.tuples(st.just("lose"), st.just(0)),
        st.tuples(st.just("read"), st.integers(1, 6)),
        st.tuples(st.just("die"), st.just(0)),
    ),
    max_size=60,
)


@given(events)
def test_every_value_reaches_the_reader_once_and_in_order(events: list[tuple[str, int]]) -> None:
    """Given scripts whose reply is lost, so that they are repeated, and processes that die, so that another
    goes on from what was written, expect indexes without gaps, and chunks that are the output."""
    request, redis = request_of(), Redis()
    emitted = 0
    repeated: StepWrite | None = None

    def write(only_final: bool = False) -> None:
        nonlocal repeated
        written = request.next_write(BUFFER, NOW_US, only_final=only_final)
        if repeated is not None:
            assert written == repeated, "a repeated script writes something else"
        repeated = None
        redis.write(request, written)

    for event, number in events:
        if event == "emit" and repeated is None:
            emit(request, *(f"{emitted + at} " for at in range(number)), emitted=emitted + number)
            emitted += number
        elif event == "write":
            write(only_final=bool(number) and repeated is None)
        elif event == "lose" and repeated is None:
            repeated = request.next_write(BUFFER, NOW_US)
        elif event == "read":
            redis.take(number)
        elif event == "die" and repeated is None:
            request.begin_again(request.key + 1, list(redis.kept))
            assert request.is_waiting
            emitted = sum(len(unpack_values(kept)) for kept in redis.kept)
            request.sent(NOW_US)
    if repeated is not None:
        write()
    emit(request, output="".join(f"{at} " for at in range(emitted)))
    write()
    redis.take(1000)
    assert [index for index, _, _ in redis.read] == list(range(len(redis.read)))
    assert "".join(body for _, body, _ in redis.read) == "".join(f"{at} " for at in range(emitted))
    assert sum(merged for _, _, merged in redis.read) == emitted
    assert redis.result is not None
    assert (redis.result.status, redis.result.index) == (OK, len(redis.read))
    assert (redis.result.first_us is None) == (emitted == 0)


def test_each_step_is_a_chunk_while_the_reader_keeps_up() -> None:
    request = request_of()
    emit(request, "a")
    emit(request, "b", "c")
    write = request.next_write(BUFFER, NOW_US)
    assert bodies(write) == ["a", "bc"]
    assert [(chunk.index, chunk.merged) for chunk, _ in write.chunks] == [(0, 1), (1, 2)]
    assert [unpack_values(kept) for _, kept in write.chunks] == [["a"], ["b", "c"]]


def test_chunks_for_a_full_list_wait_and_become_one() -> None:
    request = request_of()
    emit(request, "a")
    carry_out(request, request.next_write(BUFFER, NOW_US), unread=BUFFER)
    for value in "bcd":
        emit(request, value)
        assert not request.has_news(BUFFER)
        assert request.next_write(BUFFER, NOW_US).chunks == []
    assert request.emitted_bytes == 9
    carry_out(request, request.next_write(BUFFER, NOW_US), unread=BUFFER - 1)
    assert request.has_news(BUFFER)
    assert bodies(request.next_write(BUFFER, NOW_US)) == ["b", "c", "d"]


def test_many_chunks_become_one() -> None:
    request = request_of()
    for _ in range(WRITTEN_TOGETHER_MAX + 1):
        emit(request, "a")
    ((chunk, kept),) = request.next_write(BUFFER, NOW_US).chunks
    assert (json.loads(chunk.body), chunk.merged) == ("a" * 65, 65)
    assert unpack_values(kept) == ["a"] * 65


def test_last_chunks_are_written_with_the_result_however_much_is_unread() -> None:
    request = request_of()
    emit(request, "a")
    carry_out(request, request.next_write(BUFFER, NOW_US), unread=9)
    emit(request, "b")
    emit(request, "c", output="abc")
    write = request.next_write(BUFFER, NOW_US, only_final=True)
    assert bodies(write) == ["bc"]
    assert write.result is not None and (write.result.body, write.result.index) == (b'"abc"', 2)


def test_while_redis_is_full_only_results_are_written() -> None:
    request = request_of()
    emit(request, "a")
    write = request.next_write(BUFFER, NOW_US, only_final=True)
    assert (write.chunks, write.result) == ([], None)
    carry_out(request, write)
    assert bodies(request.next_write(BUFFER, NOW_US)) == ["a"]


def test_request_that_is_not_streamed_has_only_its_result() -> None:
    request = request_of(stream=False)
    emit(request, "a")
    assert not request.has_news(BUFFER)
    emit(request, "b", output="ab")
    write = request.next_write(BUFFER, NOW_US)
    assert (write.chunks, write.first_us) == ([], None)
    assert write.result == Result("r", OK, JSON, b'"ab"', None, 3, 5000, 500)


def test_time_to_the_first_chunk_is_told_once_and_kept() -> None:
    request = request_of()
    emit(request, "a")
    first = request.next_write(BUFFER, NOW_US + 1000)
    assert first.first_us == 8000
    carry_out(request, first)
    emit(request, "b", output="ab")
    write = request.next_write(BUFFER, NOW_US + 9000)
    assert write.first_us is None
    assert write.result is not None and write.result.first_us == 8000


def test_another_worker_goes_on_with_index_and_time() -> None:
    request = request_of(chunks=[pack_values(["a"]), pack_values(["b"])], first_us=4120, epoch=2)
    emit(request, "c", output="abc")
    write = request.next_write(BUFFER, NOW_US)
    assert (write.written, write.first_us, [chunk.index for chunk, _ in write.chunks]) == (2, None, [2])
    assert write.result is not None and (write.result.index, write.result.first_us) == (3, 4120)


def test_chunk_that_its_content_type_cannot_have_fails_the_request() -> None:
    request = request_of()
    emit(request, b"\xff")
    write = request.next_write(BUFFER, NOW_US)
    assert write.chunks == []
    assert write.result is not None and write.result.status == INTERNAL
    assert request.is_sent, "the model process still generates it"


def test_output_that_its_content_type_cannot_have_fails_the_request() -> None:
    request = request_of()
    emit(request, "a", output=b"\xff")
    write = request.next_write(BUFFER, NOW_US)
    assert bodies(write) == ["a"]
    assert write.result is not None and (write.result.status, write.result.index) == (INTERNAL, None)
    assert not request.is_sent


def test_content_type_of_chunks_is_that_of_the_request() -> None:
    request = request_of(content_type=MSGPACK, reply_to="me")
    emit(request, {"a": 1})
    ((chunk, _),) = request.next_write(BUFFER, NOW_US).chunks
    assert (chunk.content_type, msgpack.unpackb(chunk.body)) == (MSGPACK, {"a": 1})


def test_chunks_for_an_image_are_values_unless_they_are_bytes() -> None:
    request = request_of(content_type="image/png")
    emit(request, "a ")
    emit(request, b"png", output="a cat")
    write = request.next_write(BUFFER, NOW_US)
    assert [(chunk.content_type, chunk.body) for chunk, _ in write.chunks] == [
        (JSON, b'"a "'),
        ("image/png", b"png"),
    ]
    assert write.result is not None
    assert (write.result.content_type, write.result.body) == (JSON, b'"a cat"')


def test_chunks_together_have_a_limit_in_their_content_type() -> None:
    """Those that were written stay, and what is over the limit is not written."""
    request = request_of()
    request.result_bytes_max = 2 * len(b'"\\u0000"')
    for written in range(2):
        emit(request, "\0")
        write = request.next_write(BUFFER, NOW_US)
        assert (write.written, bodies(write), write.result) == (written, ["\0"], None)
        carry_out(request, write)
    emit(request, "\0")
    write = request.next_write(BUFFER, NOW_US)
    assert write.result is not None and (write.chunks, request.emitted_bytes) == ([], 0)
    assert (write.result.status, write.result.detail) == too_large(request.result_bytes_max)
    assert write.error == write.result.detail
    assert request.next_write(BUFFER, NOW_US) == write, "a repeated script writes something else"


def test_chunks_that_another_worker_wrote_count() -> None:
    request = request_of(chunks=[pack_values(["abc"])])
    request.result_bytes_max = 5
    emit(request, "d")
    write = request.next_write(BUFFER, NOW_US)
    assert write.result is not None and write.result.status == RESOURCE_EXHAUSTED
    request.begin_again(2, [])  # of which Redis has none any more
    assert request.result is not None
    request = request_of(chunks=[pack_values(["abc"])])
    request.result_bytes_max = 5
    request.begin_again(2, [])
    emit(request, "d")
    assert bodies(request.next_write(BUFFER, NOW_US)) == ["d"]


@pytest.mark.parametrize("is_too_large", [False, True])
def test_output_has_the_same_limit(is_too_large: bool) -> None:
    request = request_of(stream=False)
    request.result_bytes_max = len(b'"whole"') - is_too_large
    emit(request, output="whole")
    write = request.next_write(BUFFER, NOW_US)
    assert write.result is not None
    if is_too_large:
        assert (write.result.status, write.result.detail) == too_large(request.result_bytes_max)
    else:
        assert (write.result.status, write.result.body) == (OK, b'"whole"')


# --- how a request ends ------------------------------------------------------------------------------------


def test_failure_of_the_model_is_the_result() -> None:
    request = request_of()
    emit(request, "a", failure=(ABORTED, "begin it again"))
    write = request.next_write(BUFFER, NOW_US)
    assert bodies(write) == ["a"]
    assert write.result is not None
    assert (write.result.status, write.result.detail, write.result.index) == (ABORTED, "begin it again", None)


def test_request_that_was_given_up_stays_so() -> None:
    """Given a cancelled request, when the process says that it finished, expect one result, the first."""
    request = request_of()
    request.end(CANCELLED, "gone")
    emit(request, "a", output="a")
    write = request.next_write(BUFFER, NOW_US)
    assert write.chunks == []
    assert write.result is not None and write.result.status == CANCELLED
    assert not request.is_sent


def test_request_that_a_batcher_answered_is_only_removed() -> None:
    request = request_of(answered_before=frozenset({0}))
    request.is_sent = False
    assert request.has_ended and request.has_news(BUFFER) and not request.is_waiting
    write = request.next_write(BUFFER, NOW_US)
    assert (write.chunks, write.result) == ([], None)
    carry_out(request, write)
    assert request.is_waiting, "Redis did not know the answer any more: somebody must give it one"


def test_request_whose_last_chunks_redis_lost_is_generated_again() -> None:
    request = request_of()
    emit(request, "a", output="a")
    request.begin_again(2, [])
    assert (request.result, request.is_waiting, request.written) == (None, True, 0)
    request.end(CANCELLED, "gone")
    request.begin_again(3, [])
    assert request.has_ended


# --- suspects ----------------------------------------------------------------------------------------------


def test_deaths_of_others_do_not_add_up() -> None:
    request = request_of()
    for _ in range(5):
        request.suspect(was_alone=False)
        assert request.execution.deaths == {0: 1}
        for _ in range(request.begin_alone() - 1):
            assert not request.stepped_alone()
        assert request.stepped_alone()
        assert request.execution.deaths == {}


def test_a_start_that_was_survived_does_not_count() -> None:
    """Not even if that could not be written to Redis before it is alone again."""
    request = request_of()
    request.suspect(was_alone=False)
    assert request.next_start == 1
    assert request.begin_alone() == 1
    assert request.next_start == 2
    assert request.stepped_alone() and request.has_passed
    assert request.next_start == 1
    request.suspect(was_alone=False)
    request.begin_alone()
    assert not request.has_passed, "this start is not to be forgotten"


def test_second_death_alone_is_its_own() -> None:
    request = request_of()
    request.suspect(was_alone=False)
    request.begin_alone()
    request.suspect(was_alone=True)
    assert request.execution.deaths == {0: 2}


def test_steps_alone_are_doubled_for_a_request_that_begins_anew() -> None:
    request = request_of(stream=False)
    steps = []
    for _ in range(20):
        request.suspect(was_alone=False)
        request.begin_again(request.key + 1, ())
        steps.append(request.begin_alone())
    assert steps[:5] == [1, 2, 4, 8, 16]
    assert max(steps) == 1 << step_execution.STEPS_ALONE_DOUBLINGS_MAX
    assert request_of(epoch=2).begin_alone() == 1
    assert request_of(epoch=4).begin_alone() == 4


def test_one_that_goes_on_from_its_chunks_is_at_once_where_its_process_died() -> None:
    """Unless that dies again later: it may do so some steps after each beginning."""
    request = request_of()
    steps = []
    for _ in range(7):
        request.suspect(was_alone=False)
        request.begin_again(2, [pack_values(["a"])])
        steps.append(request.begin_alone())
    assert steps == [1, 1, 1, 1, 2, 4, 8]


def test_passing_is_written_once_and_an_end_counts_as_passing() -> None:
    request = request_of(epoch=4)
    request.begin_alone()
    emit(request, failure=(INTERNAL, "raised"))
    assert request.stepped_alone()
    write = request.next_write(BUFFER, NOW_US)
    assert write.has_passed
    carry_out(request, write)
    assert not request.next_write(BUFFER, NOW_US).has_passed


# --- readers -----------------------------------------------------------------------------------------------


def observed(reader: Reader, unread: int, written: int, now_s: float, *, is_list: bool = True) -> float:
    reader.observe(StepReply("WRITTEN", unread), written, is_list=is_list, stream_buffer=BUFFER, now_s=now_s)
    return reader.idle_s


def test_reader_of_a_list_is_idle_while_something_is_there_and_nothing_is_removed() -> None:
    reader = Reader(0.0)
    assert observed(reader, 0, 0, 0.5) == 0
    assert observed(reader, 1, 1, 1.0) == 0.5
    assert observed(reader, 3, 3, 1.5) == 1.0
    assert observed(reader, 2, 3, 2.0) == 0  # one was read
    assert observed(reader, 3, 4, 2.5) == 0.5  # read as many as before: none since then
    assert observed(reader, 0, 4, 3.0) == 0
    assert observed(reader, 0, 4, 99.0) == 0, "there is nothing to read"


def test_reader_of_a_reply_stream_is_idle_while_it_is_full_and_does_not_shrink() -> None:
    reader = Reader(0.0)
    assert observed(reader, BUFFER - 1, 9, 0.5, is_list=False) == 0
    assert observed(reader, BUFFER, 9, 1.0, is_list=False) == 0.5
    assert observed(reader, BUFFER + 5, 9, 1.5, is_list=False) == 1.0  # others write there as well
    assert observed(reader, BUFFER + 4, 9, 2.0, is_list=False) == 0
    assert observed(reader, BUFFER + 4, 9, 2.5, is_list=False) == 0.5


def test_time_in_which_nobody_looked_counts_in_part() -> None:
    """While Redis cannot be reached, a reader cannot read."""
    reader = Reader(0.0)
    observed(reader, 1, 1, 0.0)
    assert observed(reader, 1, 1, 3600.0) == UNSEEN_S_MAX
    assert observed(reader, 1, 1, 3600.5) == UNSEEN_S_MAX + 0.5


@pytest.mark.parametrize(("stream", "status"), [(True, CANCELLED), (False, None)])
def test_idle_reader_is_given_up(stream: bool, status: str | None) -> None:
    request = request_of(stream=stream)
    emit(request, "a")
    for now_s in (0.5, 1.0, 1.5):
        carry_out(request, request.next_write(BUFFER, NOW_US), unread=1, now_s=now_s)
        request.give_up_idle_reader(1000)
        assert (request.result is not None) == (now_s > 1.2 and stream)
    assert (request.result.status if request.result else None) == status
