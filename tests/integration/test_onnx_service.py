"""The file-type model of the magika wheel as a service, `onnx:FILE`, held against magika's own answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from carpool import Client
from carpool.errors import InvalidArgumentError
from carpool.keys import Keys
from support import magika_oracle as oracle
from support.stack import Stack


@pytest.fixture(scope="module")
def model() -> str:
    return oracle.model_path().parent.name


@pytest.fixture(scope="module")
def stack(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as one:
        one.batcher()
        one.worker(f"onnx:{oracle.model_path()}")
        one.wait_for_model(model)
        yield one


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, timeout=60) as one:
        yield one


def test_the_service_says_what_the_model_takes_and_gives(stack: Stack, model: str) -> None:
    registered = stack.redis.hgetall(Keys(model).registration)
    (taken,), (given,) = (json.loads(registered[kind]) for kind in (b"inputs", b"outputs"))
    assert (taken["datatype"], given["datatype"]) == ("INT32", "FP32")
    assert taken["shape"] == [len(oracle.features(b"x" * 100))]


def test_files_are_recognised_as_magika_does(client: Client, model: str) -> None:
    """Given real files, each a request of its own, expect magika's labels and scores from shared batches."""
    paths = oracle.sample_files()
    expected = oracle.answers(paths)

    arrays = [oracle.features(path.read_bytes()) for path in paths]
    futures = [client.submit(model, array) for array in arrays]
    found = [oracle.label_of(future.result(60)) for future in futures]

    assert len(paths) > 40
    assert [label for label, _ in found] == [label for label, _ in expected]
    np.testing.assert_allclose(
        [score for _, score in found], [score for _, score in expected], rtol=0, atol=oracle.SCORE_TOLERANCE
    )
    assert len({label for label, _ in found}) > 10


@pytest.mark.parametrize("label", sorted(oracle.made_files()))
def test_made_files_alone(client: Client, model: str, label: str) -> None:
    data = oracle.made_files()[label]
    reply = client.request(model, oracle.features(data))
    assert reply.batch_size == 1
    found, score = oracle.label_of(reply.value)
    expected, expected_score = oracle.answer(data)
    assert found == expected == label
    assert score == pytest.approx(expected_score, abs=oracle.SCORE_TOLERANCE)


def test_json_and_raw_bytes_give_the_same_answer(client: Client, stack: Stack, model: str) -> None:
    array = oracle.features(oracle.made_files()["html"])
    expected, score = oracle.label_of(client.infer(model, array))

    raw = client.infer(model, array.tobytes(), content_type="application/octet-stream")
    entry_id = stack.send(model, body=json.dumps(array.tolist()))
    tensor: dict[str, Any] = stack.result(model, entry_id)["body"]

    for row in (np.frombuffer(raw, np.float32), np.array(tensor["data"], np.float32)):
        found, found_score = oracle.label_of(row)
        assert found == expected
        assert found_score == pytest.approx(score, abs=oracle.SCORE_TOLERANCE)


def test_a_tensor_of_the_wrong_shape_fails_alone(client: Client, model: str) -> None:
    array = oracle.features(oracle.made_files()["png"])
    wrong = [array[:-1], array.astype(np.float32), np.stack([array, array])]
    futures = [client.submit(model, one) for one in (array, *wrong, array)]
    good, *bad, also_good = futures
    assert oracle.label_of(good.result(30))[0] == oracle.label_of(also_good.result(30))[0] == "png"
    for future in bad:
        with pytest.raises(InvalidArgumentError, match="but this model takes"):
            future.result(30)
