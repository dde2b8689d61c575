"""An execution: what a death of its model process does to it, and of whose requests not all are executed."""

from __future__ import annotations

from typing import Any

from carpool.messages.settled import ExecutedOf
from carpool.wire.tensors import TensorSpec
from carpool_worker.execution import PRODUCERS_TOLD_MAX
from support.executions import (
    NOW_US,
    codec_of,
    codec_of_model,
    echo,
    executed,
    executed_by,
    execution_of,
    positions,
    prepared,
    request_of,
)

ANY = TensorSpec("x", "FP32", (-1,))


def test_frame_the_process_died_on_is_split_and_others_are_not() -> None:
    codec = codec_of(ANY)
    execution = prepared(codec, request_of([1]), request_of([1, 2]), request_of([3]), request_of([4, 5]))
    assert positions(execution) == [[0, 2], [1, 3]]
    execution.split(execution.frames[0])
    assert execution.is_suspect
    assert positions(execution) == [[0], [2], [1, 3]]
    assert execution.deaths == {0: 1, 2: 1} and not execution.results


def test_request_that_expired_meanwhile_is_not_executed_again() -> None:
    codec = codec_of()
    execution = prepared(codec, request_of(0, deadline_us=NOW_US + 10), request_of(1))
    execution.split(execution.frames[0])
    assert not codec.prepare_next(execution, NOW_US + 10)
    assert positions(execution) == [[1]]
    assert execution.results[0].status == "DEADLINE_EXCEEDED"


def test_second_death_dead_letters_the_request_with_a_reason() -> None:
    codec = codec_of()
    execution = prepared(codec, *(request_of(number) for number in range(3)))
    # Given that a process died on all three, and another on the second alone
    execution.split(execution.frames[0])
    assert codec.prepare_next(execution, NOW_US)
    (first,) = execution.frames
    codec.give_results(execution, first, *executed(codec, first, echo))
    del execution.frames[0]
    assert codec.prepare_next(execution, NOW_US)
    execution.split(execution.frames[0])
    assert not codec.prepare_next(execution, NOW_US)
    # Then the third is still to be executed, and the second is not
    assert positions(execution) == [[2]]
    execution.separate()
    assert {position: result.status for position, result in execution.results.items()} == {
        0: "OK",
        1: "ABORTED",
    }
    (letter,) = execution.dead_letters
    assert letter == (
        execution.batch.requests[1],
        "its model process or worker died 2 times while executing it",
        2,
    )
    assert execution.results[1].detail == f"given up, and kept as a dead letter: {letter.reason}"
    assert execution.results[1].correlation_id == execution.batch.requests[1].correlation_id


def test_deaths_with_other_workers_count() -> None:
    codec = codec_of()
    execution = prepared(codec, request_of(0), request_of(1), deaths={0: 1, 1: 2}, epoch=3)
    assert codec.prepare_next(execution, NOW_US)
    assert not codec.prepare_next(execution, NOW_US)
    assert positions(execution) == [[0]]
    assert [letter.attempts for letter in execution.dead_letters] == [2]
    assert execution.results[1].status == "ABORTED"


def test_dead_letter_names_the_number_of_deaths() -> None:
    execution = execution_of(request_of(0), deaths={0: 5})
    execution.dead_letter(0)
    assert "5 times" in execution.dead_letters[0].reason and execution.dead_letters[0].attempts == 5


def test_unusable_outcome_fails_every_request_of_its_frame() -> None:
    codec = codec_of(ANY)
    execution = prepared(codec, request_of([1]), request_of([1, 2]), request_of([3]))
    execution.fail_frame(execution.frames[0], "the model's results cannot be read")
    assert {
        position: (result.status, result.detail) for position, result in execution.results.items()
    } == dict.fromkeys((0, 2), ("INTERNAL", "the model's results cannot be read"))


class Strict:
    """Refuses strings, and answers zero with an error."""

    def validate(self, body: Any) -> None:
        if isinstance(body, str):
            raise ValueError("no strings")

    def predict(self, batch: list[Any]) -> list[Any]:
        return [body or ValueError("zero") for body in batch]


def test_requests_that_were_refused_or_not_decoded_are_told_by_producer() -> None:
    codec, model = codec_of_model(Strict())
    bodies: dict[str, list[Any]] = {"a": [1, "refused", 0, b"{not json"], "b": [2, 3], "c": ["refused"]}
    requests = [
        request_of(body, extra={"tenant": name.encode()})._replace(reply_to="s")
        for name, of_producer in bodies.items()
        for body in of_producer
    ]
    execution = prepared(codec, *requests)
    (frame,) = execution.frames
    codec.give_results(execution, frame, *executed_by(model, frame))
    assert sorted(execution.executed_by_producer()) == [
        ExecutedOf(("a", "s"), 4, 2),  # the model executed the one that it answered with an error
        ExecutedOf(("c", "s"), 1, 0),
    ]


def test_only_the_producers_with_the_most_unexecuted_requests_are_told() -> None:
    execution = execution_of(
        *(request_of(number, extra={"tenant": str(number).encode()}) for number in range(50)),
        request_of(7, extra={"tenant": b"7"}),
    )
    execution.unexecuted = list(range(51))
    told = execution.executed_by_producer()
    assert len(told) == PRODUCERS_TOLD_MAX
    assert told[0] == ExecutedOf(("7", ""), 2, 0)
