"""Models that bind sequences: their slots, rows that are not ready, and what fails together or alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.errors import ABORTED, INTERNAL, INVALID_ARGUMENT
from carpool.plugins import UnusableError
from carpool.wire.tensors import StateSpec, TensorSpec
from carpool_worker.model_process.bound_executor import BoundExecutor
from carpool_worker.model_process.executor import ListItems, Outcome, StackedItems
from carpool_worker.model_process.model import BoundModel, BoundSequence, RequestInfo, load_model
from support.models.bound import Adding, Hearing, digest


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "hooks"
    path.touch()
    monkeypatch.setenv("CARPOOL_TEST_HOOKS", str(path))
    yield path


def executor_of(model: Any) -> BoundExecutor:
    loaded = load_model(model, "cpu")
    assert isinstance(loaded, BoundModel)
    return BoundExecutor(loaded)


def request(sequence_id: str, *, starts: bool = False) -> RequestInfo:
    return RequestInfo(f"r-{sequence_id}", "", {}, sequence_id, starts, False)


def heard(executor: BoundExecutor, **bodies: Any) -> Outcome:
    """Execute a request for each sequence; those whose name begins with a capital letter start."""
    requests = [request(name.lower(), starts=name[0].isupper()) for name in bodies]
    return executor.execute(ListItems(list(bodies.values())), requests)


def test_row_of_a_batch_is_a_slot_and_others_are_not_ready() -> None:
    """Given sequences in any order, expect each to be heard in its own slot, and no other row to be."""
    executor = executor_of(Hearing())
    assert heard(executor, A=1, B=2, C=3).results == [
        [digest("a", [1]), 0],
        [digest("b", [2]), 1],
        [digest("c", [3]), 2],
    ]
    outcome = heard(executor, c=4, a=5)
    assert (outcome.failures, outcome.executed_together) == ({}, 2)
    assert outcome.results == [[digest("c", [3, 4]), 2], [digest("a", [1, 5]), 0]]


def test_slot_is_freed_by_the_end_alone_and_the_lowest_is_taken(hooks: Path) -> None:
    executor = executor_of(Hearing())
    heard(executor, A=1, B=2, C=3, D=4)
    assert heard(executor, E=1).failures == {
        0: (ABORTED, "sequence_id: no slot is free for e; begin it again with sequence_start")
    }
    executor.end(["c", "b", "never-known"])
    assert heard(executor, E=5, F=6).results == [[digest("e", [5]), 1], [digest("f", [6]), 2]]
    executor.close()
    assert hooks.read_text().split("\n")[4:-1] == [
        "end c", "end b", "start e", "start f", "end a", "end d", "end e", "end f",
    ]  # fmt: skip


def test_sequence_that_starts_again_keeps_its_slot(hooks: Path) -> None:
    executor = executor_of(Hearing())
    heard(executor, A=1, B=2)
    assert heard(executor, A=3).results == [[digest("a", [3]), 0]]
    assert hooks.read_text().split() == ["start", "a", "start", "b", "end", "a", "start", "a"]


def test_sequence_without_a_slot_fails_alone() -> None:
    executor = executor_of(Hearing())
    outcome = heard(executor, a=1, B=2)
    assert outcome.failures == {
        0: (ABORTED, "sequence_id: its model process does not have a; begin it again with sequence_start")
    }
    assert outcome.results == [[digest("b", [2]), 0]]


def test_model_that_raises_fails_all_that_were_ready_and_is_not_called_again() -> None:
    """Given a sequence that was not ready, expect it to go on."""
    model = Hearing()
    executor = executor_of(model)
    heard(executor, A=1, B=2, C=3)
    outcome = heard(executor, a=4, b="raise", x=5)
    failure = INTERNAL, "the model failed on this request: told to raise"
    assert {index: outcome.failures[index] for index in (0, 1)} == {0: failure, 1: failure}
    assert outcome.failures[2][0] == ABORTED
    assert (outcome.results, outcome.executed_together) == ([], 0)
    assert model.heard[0] == ("a", [1, 4])  # once
    assert heard(executor, c=6).results == [[digest("c", [3, 6]), 2]]


@pytest.mark.parametrize(
    ("bodies", "status"),
    [
        ({"A": 1, "B": "refuse", "C": 3}, INVALID_ARGUMENT),
        ({"A": 1, "B": "return", "C": 3}, INTERNAL),
        ({"A": 1, "Bad": 2, "C": 3}, INTERNAL),
    ],
)
def test_request_that_is_refused_or_whose_start_raises_fails_alone(
    bodies: dict[str, Any], status: str
) -> None:
    executor = executor_of(Hearing())
    outcome = heard(executor, **bodies)
    assert [(index, failure[0]) for index, failure in outcome.failures.items()] == [(1, status)]
    assert [result[0] for result in outcome.results] == [digest("a", [1]), digest("c", [3])]


def test_sequence_whose_start_raised_is_ended(hooks: Path) -> None:
    """`end` is called once for each `start`, when the worker says so."""
    executor = executor_of(Hearing())
    heard(executor, Bad=1)
    executor.end(["bad"])
    assert hooks.read_text().split("\n")[:-1] == ["start bad", "end bad"]


def test_tensors_are_rows_of_all_slots_and_zeros_where_not_ready() -> None:
    executor = executor_of(Adding())

    def added(*rows: tuple[str, list[int]]) -> Any:
        items = StackedItems({"x": np.array([row for _, row in rows], np.int64)})
        outcome = executor.execute(items, [request(name.lower(), starts=name.isupper()) for name, _ in rows])
        assert not outcome.failures
        assert isinstance(outcome.results, dict)
        (results,) = outcome.results.values()
        return results.tolist()

    assert added(("A", [1, 2]), ("B", [3, 4])) == [[1, 2], [3, 4]]
    assert added(("b", [10, 10])) == [[13, 14]]
    assert added(("C", [5, 5]), ("a", [1, 1])) == [[5, 5], [2, 3]]


def test_several_tensors_and_strings_are_spread_by_name() -> None:
    given: list[dict[str, Any]] = []

    class Named:
        max_batch_size = 3
        binds_sequences = True
        inputs = (TensorSpec("data", "BYTES", (1,)), TensorSpec("x", "FP32", ()))

        def predict(self, batch: dict[str, Any]) -> Any:
            given.append(batch)
            return {"y": batch["x"] * 2, "z": batch["x"]}

    executor = executor_of(Named())
    items = StackedItems({"data": np.array([[b"hi"]], object), "x": np.array([1.5], np.float32)})
    outcome = executor.execute(items, [request("a", starts=True)])
    assert isinstance(outcome.results, dict)
    assert {name: column.tolist() for name, column in outcome.results.items()} == {"y": [3.0], "z": [1.5]}
    assert given[0]["data"].tolist() == [[b"hi"], [b""], [b""]]
    assert given[0]["x"].tolist() == [1.5, 0, 0]


def test_wrong_number_of_rows_fails_all() -> None:
    class Short:
        max_batch_size = 4
        binds_sequences = True

        def predict(self, batch: list[Any]) -> list[Any]:
            return [body for body in batch if body is not None]

    outcome = heard(executor_of(Short()), A=1, B=2)
    assert set(outcome.failures.values()) == {(INTERNAL, "the model returned 2 results for 4 requests")}
    assert list(outcome.failures) == [0, 1]


def test_end_that_raises_is_logged_and_frees_the_slot() -> None:
    class Raising:
        max_batch_size = 1
        binds_sequences = True

        def predict(self, batch: list[Any]) -> list[Any]:
            return batch

        def end(self, sequence: BoundSequence) -> None:
            raise SystemExit(sequence.sequence_id)

    executor = executor_of(Raising)
    heard(executor, A=1)
    executor.end(["a"])
    assert heard(executor, B=2).results == [2]


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"binds_sequences": "yes"}, "must be True or False"),
        ({"states": [StateSpec("s", "FP32", (-1, 2))]}, "in Redis or inside it, not both"),
        ({"step": Hearing.predict, "begin": Hearing.start, "predict": None}, "binds_sequences"),
        ({"preserve_ordering": True}, "preserve_ordering"),
        ({"policy": "deferred"}, "policy"),
    ],
)
def test_what_a_bound_model_cannot_be_is_said(attributes: dict[str, Any], reason: str) -> None:
    class Bound:
        binds_sequences = True

        def predict(self, batch: list[Any]) -> list[Any]:
            return batch

    with pytest.raises(UnusableError, match=reason):
        load_model(type("Wrong", (Bound,), attributes), "cpu")


def test_coroutine_hooks_are_refused() -> None:
    async def start(model: Any, sequence: BoundSequence) -> None: ...

    with pytest.raises(UnusableError, match="'start' is a coroutine function"):
        load_model(type("Bound", (Hearing,), {"start": start}), "cpu")


def test_model_with_end_that_binds_no_sequences_is_a_plain_one() -> None:
    class Plain(Hearing):
        binds_sequences = False

    assert not isinstance(load_model(Plain, "cpu"), BoundModel)
