"""Producers on whose requests the model often raises: executed apart, until they no longer raise."""

from __future__ import annotations

from typing import Any

from carpool.messages.batches import BatchedRequest
from carpool.messages.settled import ExecutedOf
from carpool.producer_ratios import PRODUCERS_MAX, ProducerRatios
from carpool_worker.codec import Codec
from support.executions import codec_of, finish, positions, prepared, request_of


def of_tenant(tenant: bytes, body: Any = "fine") -> BatchedRequest:
    return request_of(body, extra={"tenant": tenant})


class Picky:
    """Raises on a batch that has "bad"; records the batches that it executed."""

    def __init__(self) -> None:
        self.executed: list[list[str]] = []

    def __call__(self, batch: list[str]) -> list[str]:
        if "bad" in batch:
            raise ValueError("bad")
        self.executed.append(batch)
        return batch


def served(codec: Codec, *requests: BatchedRequest) -> list[list[str]]:
    """The batches that the model executed."""
    model = Picky()
    results = finish(codec, prepared(codec, *requests), model)
    statuses = [result.status for result in results]
    assert statuses == ["INTERNAL" if request.body == b'"bad"' else "OK" for request in requests]
    return model.executed


def is_apart(codec: Codec, request: BatchedRequest) -> bool:
    """Whether it has a frame of its own, beside a request of another producer."""
    return positions(prepared(codec, request, of_tenant(b"other"))) == [[1], [0]]


MIXED = [of_tenant(b"flood", "bad"), of_tenant(b"a"), of_tenant(b"flood", "bad"), of_tenant(b"b")]


def test_others_are_executed_together_once_a_producer_often_raises() -> None:
    codec = codec_of()
    for _ in range(3):
        assert served(codec, *MIXED) == [["fine"], ["fine"]]  # halved
    assert positions(prepared(codec, *MIXED)) == [[1, 3], [0, 2]]
    assert served(codec, *MIXED) == [["fine", "fine"]]


def test_a_batch_is_a_normal_one_if_the_model_raised_on_what_is_apart_only() -> None:
    codec = codec_of()
    for number in range(4):
        execution = prepared(codec, *MIXED)
        finish(codec, execution, Picky())
        assert execution.executed_together == (2 if number == 3 else 0)
    assert execution.executed_by_producer() == [ExecutedOf(("flood", ""), 2, 0)]


def test_a_producer_that_seldom_raises_stays_with_others() -> None:
    codec = codec_of()
    for _ in range(10):
        served(codec, of_tenant(b"seldom", "bad"), of_tenant(b"a"))
        for _ in range(3):
            served(codec, of_tenant(b"seldom"), of_tenant(b"a"))
    assert positions(prepared(codec, of_tenant(b"seldom"), of_tenant(b"a"))) == [[0, 1]]


def test_a_producer_that_no_longer_raises_joins_the_others_and_is_forgotten() -> None:
    codec = codec_of()
    for _ in range(20):
        served(codec, of_tenant(b"t", "bad"))
    assert is_apart(codec, of_tenant(b"t"))
    for _ in range(3):
        served(codec, of_tenant(b"t"))
    assert not is_apart(codec, of_tenant(b"t"))
    for _ in range(10):
        served(codec, of_tenant(b"t"))
    assert len(codec._raising) == 0


def test_producers_are_known_by_tenant_and_by_reply_stream() -> None:
    codec = codec_of()
    of_stream = request_of("bad")._replace(reply_to="s1")
    for _ in range(3):
        served(codec, of_stream)
    assert is_apart(codec, of_stream)
    assert not is_apart(codec, of_stream._replace(reply_to="s2"))
    assert not is_apart(codec, of_stream._replace(extra={"tenant": b"t"}))
    assert not is_apart(codec, of_stream._replace(reply_to=None))


def test_a_refused_or_returned_failure_does_not_set_a_producer_apart() -> None:
    def predict(batch: list[str]) -> list[Any]:
        return [ValueError("bad") if body == "bad" else body for body in batch]

    codec = codec_of()
    for _ in range(5):
        finish(codec, prepared(codec, *MIXED), predict)
    assert positions(prepared(codec, *MIXED)) == [[0, 1, 2, 3]]


def test_names_without_end_use_bounded_memory() -> None:
    raising = ProducerRatios()
    for number in range(PRODUCERS_MAX + 50):
        raising.observe((str(number), ""), 1.0)
    assert len(raising) == PRODUCERS_MAX
