"""What a stepping model does with a request, and what of that is sent; generator functions as models."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from carpool.errors import ResourceExhaustedError
from carpool.wire.tensors import TensorSpec, datatype_of, to_bfloat16
from carpool_worker.model_process.frames import Failure, pack_values, too_large, unpack_results, unpack_values
from carpool_worker.model_process.stepping.frames import Admit, Advance
from carpool_worker.model_process.stepping.generation import CHUNK_OVERHEAD_BYTES, Generation
from carpool_worker.model_process.stepping.requests import GeneratorModel, ResultLimit


def generation(body: Any = "body", sent: Sequence[Any] = (), *, is_streamed: bool = True) -> Generation:
    """A request of which these values were sent by another process, one in each chunk."""
    chunks = [pack_values([value]) for value in sent]
    return Generation(Admit(7, (), ("id", "lane", {"user": b"x"}), 3, is_streamed, chunks), body)


def taken(request: Generation) -> Advance:
    advance = request.pop_advance()
    assert advance is not None
    return advance


def output(request: Generation) -> Any:
    advance = taken(request)
    assert advance.failure is None
    assert advance.output is not None
    (value,) = unpack_values(advance.output)
    return value


def failure(request: Generation) -> Failure:
    advance = taken(request)
    assert advance.output is None
    assert advance.failure is not None
    return advance.failure


# --- requests ----------------------------------------------------------------------------------------------


def test_model_sees_what_the_producer_sent() -> None:
    request = generation({"text": "a"})
    assert (request.correlation_id, request.lane, request.fields) == ("id", "lane", {"user": b"x"})
    assert (request.body, request.cost, request.chunks, request.state) == ({"text": "a"}, 3, [], None)


def test_values_of_a_step_are_one_chunk() -> None:
    request = generation()
    assert request.pop_advance() is None
    request.emit("Once")
    assert taken(request) == Advance(7, pack_values(["Once"]), 1)
    assert request.pop_advance() is None
    request.emit(" upon")
    request.emit(" a")
    assert taken(request) == Advance(7, pack_values([" upon", " a"]), 3)
    request.emit(" time")
    request.finish()
    advance = taken(request)
    assert (advance.chunk, advance.emitted) == (pack_values([" time"]), 4)
    assert advance.output == pack_values(["Once upon a time"])


def test_many_values_of_one_step() -> None:
    request = generation()
    for number in range(20_000):
        request.emit(number)
    assert unpack_values(taken(request).chunk) == list(range(20_000))
    request.finish()
    assert output(request) == list(range(20_000))


def test_only_the_output_is_sent_if_chunks_are_not_wanted() -> None:
    request = generation(is_streamed=False)
    request.emit("a")
    assert request.pop_advance() is None
    request.emit("b")
    request.finish()
    assert taken(request) == Advance(7, b"", 2, pack_values(["ab"]))


@pytest.mark.parametrize("given", [None, "whole", [1], {"a": [b"\x00"]}])
def test_finish_with_an_output_replaces_the_chunks(given: Any) -> None:
    request = generation()
    request.emit("part")
    request.finish(given)
    assert output(request) == given


def test_nothing_emitted_is_null() -> None:
    request = generation()
    request.finish()
    assert taken(request) == Advance(7, b"", 0, pack_values([None]))


def test_array_that_the_model_writes_to_later_is_sent_as_it_was_emitted() -> None:
    request = generation()
    row = np.zeros((1, 2), np.float32)
    for number in range(3):
        row[:] = number
        request.emit(row)
    request.finish()
    assert output(request).tolist() == [[0, 0], [1, 1], [2, 2]]


def test_request_goes_on_from_its_chunks() -> None:
    request = generation(sent=["Once", " upon"])
    assert (request.chunks, request.emitted) == (["Once", " upon"], 2)
    request.emit(" a")
    assert taken(request) == Advance(7, pack_values([" a"]), 3)
    assert request.chunks == ["Once", " upon"]
    request.finish()
    assert output(request) == "Once upon a"


def test_chunks_of_several_values_of_every_kind() -> None:
    values = ["text", b"\x00", 1.5, None, [1, {"a": 2}], *range(20)]
    chunks = [pack_values(values[:2]), pack_values(values[2:]), pack_values([])]
    request = Generation(Admit(7, (), ("id", "", {}), 1, True, chunks), "body")
    assert request.chunks == values
    assert request.emitted == len(values)
    request.finish()
    assert output(request) == values


# --- the limit of a result ---------------------------------------------------------------------------------


def limited(bytes_max: int, sent: Sequence[Any] = (), *, is_streamed: bool) -> tuple[Generation, ResultLimit]:
    chunks, limit = [pack_values([value]) for value in sent], ResultLimit(bytes_max)
    admit = Admit(7, (), ("id", "lane", {}), 3, is_streamed, chunks)
    return Generation(admit, "body", limit=limit), limit


def test_stream_over_the_limit_fails_and_keeps_what_it_emitted_before() -> None:
    """A chunk that was taken counts more than its value. Nothing that comes afterwards has an effect."""
    request, _ = limited(2 * (CHUNK_OVERHEAD_BYTES + 4) + 4, is_streamed=True)
    for text in ("abc", "def", "ghi"):  # packed, each has 4 bytes
        request.emit(text)
        assert taken(request).chunk == pack_values([text])
    request.emit("jkl")
    request.emit("mno")
    request.finish("whole")
    advance = taken(request)
    assert (advance.chunk, advance.emitted, advance.output) == (b"", 3, None)
    assert advance.failure == too_large(2 * (CHUNK_OVERHEAD_BYTES + 4) + 4)
    assert request.is_too_large and "max_result_bytes" in advance.failure[1]


def test_one_value_over_the_limit_is_not_kept() -> None:
    request, _ = limited(1000, is_streamed=True)
    request.emit("a")
    request.emit("b" * 1000)
    advance = taken(request)
    assert (advance.chunk, advance.failure) == (pack_values(["a"]), too_large(1000))
    assert request.chunks == [] and len(request._packed) == 2


def test_request_without_a_stream_has_the_same_limit_for_its_values() -> None:
    request, _ = limited(8, is_streamed=False)
    request.emit("abc")
    request.emit("def")
    assert request.pop_advance() is None
    request.emit("")
    assert failure(request) == too_large(8)


def test_output_over_the_limit_fails() -> None:
    request, _ = limited(8, is_streamed=False)
    request.emit("abc")
    request.finish("12345678")
    assert failure(request) == too_large(8)
    request, _ = limited(8, is_streamed=False)
    request.finish("1234567")
    assert output(request) == "1234567"


def test_chunks_of_another_process_count() -> None:
    request, _ = limited(2 * (CHUNK_OVERHEAD_BYTES + 4) + 4, ["abc", "def"], is_streamed=True)
    request.emit("ghi")
    assert not request.has_ended
    request, _ = limited(2 * (CHUNK_OVERHEAD_BYTES + 4) + 3, ["abc", "def"], is_streamed=True)
    request.emit("ghi")
    assert failure(request) == too_large(2 * (CHUNK_OVERHEAD_BYTES + 4) + 3)


def test_limit_may_change_while_a_request_is_generated() -> None:
    request, limit = limited(8, is_streamed=False)
    request.emit("abc")
    limit.bytes_max = 7
    request.emit("def")
    assert failure(request) == too_large(7)


def test_what_was_emitted_in_vain_does_not_count() -> None:
    """A model that cannot continue begins at the start, and what was not sent is forgotten."""
    request, _ = limited(4, is_streamed=False)
    request.emit("abc")
    request.restart(continues=False)
    request.emit("def")
    assert not request.has_ended


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ResourceExhaustedError("no memory"), ("RESOURCE_EXHAUSTED", "no memory")),
        (ValueError("why"), ("INTERNAL", "the model failed on this request: why")),
        ("a sentence", ("INTERNAL", "a sentence")),
    ],
)
def test_failed_request_has_the_status_and_detail_of_the_error(error: Any, expected: Failure) -> None:
    request = generation()
    request.emit("a")
    request.fail(error)
    advance = taken(request)
    assert (advance.chunk, advance.output, advance.failure) == (pack_values(["a"]), None, expected)


@pytest.mark.parametrize(
    ("method", "arguments", "detail"),
    [
        ("emit", ("late",), "the model emitted a value after it had finished the request"),
        ("finish", (), "the model finished the request twice"),
        ("finish", ("late",), "the model finished the request twice"),
        ("fail", ("late",), "late"),
    ],
)
def test_what_follows_finish_fails_the_request(method: str, arguments: tuple[Any, ...], detail: str) -> None:
    request = generation()
    request.finish("output")
    getattr(request, method)(*arguments)
    assert failure(request) == ("INTERNAL", detail)


def test_first_failure_counts() -> None:
    request = generation()
    request.fail("first")
    request.fail("second")
    request.emit("late")
    request.finish()
    assert failure(request) == ("INTERNAL", "first")
    assert request.emitted == 0


class Unreadable:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("on another device")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "its type is object"),
        ({1, 2}, "its type is set"),
        (1 << 64, "more than 64 bits"),
        (-1 << 64, "more than 64 bits"),
        ("\ud800", "surrogates not allowed"),
        ({(1, 2): 3}, "a key in a dict is a tuple: use text"),
        ([Unreadable()], "on another device"),
    ],
)
@pytest.mark.parametrize("method", ["emit", "finish"])
def test_value_that_cannot_be_sent_fails_its_request(method: str, value: Any, reason: str) -> None:
    request = generation()
    request.emit("before")
    getattr(request, method)(value)
    status, detail = failure(request)
    assert status == "INTERNAL"
    assert detail.startswith("the model's result cannot be sent: ")
    assert reason in detail


# --- generators --------------------------------------------------------------------------------------------


def countdown(body: int) -> Iterator[int]:
    yield from range(body, 0, -1)


def stepped(function: Any, request: Generation) -> Generation:
    """This request, generated to its end."""
    model = GeneratorModel(function)
    model.begin([request])
    while not request.has_ended:
        model.step([request])
    return request


def test_each_value_that_a_generator_yields_is_a_chunk() -> None:
    model, request = GeneratorModel(countdown), generation(2)
    model.begin([request])
    chunks = []
    while not request.has_ended:
        model.step([request])
        chunks.append(taken(request))
    assert chunks == [
        Advance(7, pack_values([2]), 1),
        Advance(7, pack_values([1]), 2),
        Advance(7, b"", 2, pack_values([[2, 1]])),
    ]


def test_value_that_a_generator_returns_is_the_output() -> None:
    def total(body: Sequence[int]) -> Generator[int, None, int]:
        yield from body
        return sum(body)

    assert output(stepped(total, generation([1, 2]))) == 3


def test_generators_advance_together_and_the_one_that_raises_fails_alone() -> None:
    def inverse(body: int) -> Iterator[float]:
        yield 1 / body

    model = GeneratorModel(inverse)
    requests = [generation(body) for body in (2, 0, 4)]
    model.begin(requests)
    model.step(requests)
    assert [request.emitted for request in requests] == [1, 0, 1]
    assert failure(requests[1]) == ("INTERNAL", "the model failed on this request: division by zero")
    assert not requests[2].has_ended


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_generator_that_wants_to_exit_fails_alone(error: BaseException) -> None:
    def exits(_: Any) -> Iterator[int]:
        yield 1
        raise error

    assert failure(stepped(exits, generation()))[0] == "INTERNAL"


def test_call_that_raises_fails_the_request() -> None:
    class Picky:
        def __call__(self) -> Iterator[int]:
            yield 1

    assert "positional argument" in failure(stepped(Picky(), generation()))[1]


def test_continued_generator_skips_what_was_sent() -> None:
    request = generation(4, sent=[4, 3])
    GeneratorModel(countdown).begin([request])
    assert request.emitted == 2
    assert output(stepped(countdown, generation(4, sent=[4, 3]))) == [4, 3, 2, 1]


BFLOAT16 = to_bfloat16(np.array([1.5, -2.0, 0.1], np.float32))
EMITTED = [
    BFLOAT16,
    *[(1, "a"), 1, b"x", float("nan"), np.float32(0.1)],
    *[np.arange(3), {"x": np.ones(2)}, np.array(["a", "bc"])],
]


def test_values_of_every_kind_are_recognised_when_they_are_continued() -> None:
    def every_kind(_: Any) -> Generator[Any, None, str]:
        yield from EMITTED
        return "done"

    assert output(stepped(every_kind, generation(sent=EMITTED))) == "done"


def test_chunks_that_are_arrays_are_joined_as_they_were_emitted() -> None:
    request = generation(sent=[BFLOAT16])
    request.emit(BFLOAT16)
    request.finish()
    advance = taken(request)
    assert advance.output is not None
    (joined,) = unpack_results(advance.output)
    assert joined.tolist() == [*BFLOAT16.tolist()] * 2 and datatype_of(joined) == "BF16"


def test_chunks_that_are_arrays_of_texts_are_joined_as_lists_of_texts_are() -> None:
    texts = np.array([["a0", "b"], ["c", "d"]])
    request = generation(sent=[texts])
    assert request.chunks[0].tolist() == texts.tolist()
    request.emit(texts[:1])
    request.finish()
    assert output(request) == {"datatype": "BYTES", "shape": [3, 2], "data": ["a0", "b", "c", "d", "a0", "b"]}


@pytest.mark.parametrize(("sent", "index"), [([4, 2], 1), ([5], 0), ([4, 3, 2, 1, 0], 4), ([4.0], 0)])
def test_generator_that_yields_other_values_than_were_sent_is_aborted(sent: list[Any], index: int) -> None:
    request = stepped(countdown, generation(4, sent=sent))
    assert failure(request) == (
        "ABORTED",
        f"the model was run again, and chunk {index} is not as it was sent: send the request again",
    )


def test_ended_generator_is_closed() -> None:
    closed: list[int] = []

    def guarded(body: int) -> Iterator[int]:
        try:
            yield body
        finally:
            closed.append(body)

    model, request = GeneratorModel(guarded), generation(1)
    model.begin([request])
    model.step([request])
    model.end(request)
    assert closed == [1]


def test_request_whose_generator_was_never_made_can_end() -> None:
    request = generation()
    GeneratorModel(countdown).end(request)
    assert request.state is None


# --- declared outputs --------------------------------------------------------------------------------------

TEXT = TensorSpec("text", "BYTES", (1,))
SCORE = TensorSpec("score", "FP32", (1,))


def declaring(*outputs: TensorSpec, sent: Sequence[Any] = ()) -> Generation:
    chunks = [pack_values([value]) for value in sent]
    return Generation(Admit(7, (), ("id", "", {}), 1, True, chunks), "body", outputs=outputs)


def test_what_is_emitted_is_as_it_is_declared() -> None:
    request = declaring(TEXT, SCORE)
    request.emit({"text": "a", "score": 1})
    (value,) = unpack_values(taken(request).chunk)
    assert value["text"] == {"datatype": "BYTES", "shape": [1], "data": ["a"]}
    assert (value["score"].dtype, value["score"].tolist()) == (np.float32, [1.0])
    request = declaring(TEXT)
    for value in ("a", ["a"], np.array(["a"], object), {"text": "a"}):
        request.emit(value)
    assert [one["data"] for one in unpack_values(taken(request).chunk)] == [["a"]] * 4


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("a", "emitted a str, but declares the outputs 'text', 'score'"),
        ({"text": "a"}, "emitted the outputs 'text', but declares 'text', 'score'"),
        ({"text": ["a", "b"], "score": 1}, "shape [2]"),
        ({"text": "a", "score": "b"}, "output 'score'"),
    ],
)
def test_what_is_emitted_otherwise_fails_the_request(value: Any, why: str) -> None:
    request = declaring(TEXT, SCORE)
    request.emit(value)
    status, detail = failure(request)
    assert status == "INTERNAL"
    assert why in detail


def test_a_continued_request_sees_arrays_by_name() -> None:
    request = declaring(
        TEXT, SCORE, sent=[{"text": np.array(["a"], object), "score": np.array([1], np.float32)}]
    )
    (value,) = request.chunks
    assert (value["text"].tolist(), value["score"].tolist()) == (["a"], [1.0])


def test_a_generator_is_continued_after_values_that_were_sent_as_declared() -> None:
    def generate(body: Any) -> Iterator[Any]:
        yield from ("a", "b")

    model = GeneratorModel(generate)
    request = declaring(TEXT, sent=[np.array(["a"], object)])
    model.begin([request])
    model.step([request])
    (value,) = unpack_values(taken(request).chunk)
    assert value["data"] == ["b"]
