"""The file-type model of the magika wheel as a service, `onnx:FILE`, compared with magika's own results."""

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
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.batcher()
        stack.worker(f"onnx:{oracle.model_path()}")
        stack.wait_for_model(model)
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, timeout=60) as client:
        yield client


def test_registration_contains_the_models_tensors(stack: Stack, model: str) -> None:
    registered = stack.redis.hgetall(Keys(model).registration)
    (input_spec,), (output_spec,) = (json.loads(registered[kind]) for kind in (b"inputs", b"outputs"))
    assert (input_spec["datatype"], output_spec["datatype"]) == ("INT32", "FP32")
    assert input_spec["shape"] == [len(oracle.features(b"x" * 100))]


def test_files_in_shared_batches_are_classified_like_magika(client: Client, model: str) -> None:
    """Each file is a request of its own; the batches are shared."""
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


@pytest.mark.parametrize("label", sorted(oracle.generated_files()))
def test_generated_file_alone_is_classified_like_magika(client: Client, model: str, label: str) -> None:
    data = oracle.generated_files()[label]
    reply = client.request(model, oracle.features(data))
    assert reply.batch_size == 1
    found, score = oracle.label_of(reply.value)
    expected, expected_score = oracle.answer(data)
    assert found == expected == label
    assert score == pytest.approx(expected_score, abs=oracle.SCORE_TOLERANCE)


def test_json_and_octet_stream_give_the_same_result(client: Client, stack: Stack, model: str) -> None:
    array = oracle.features(oracle.generated_files()["html"])
    expected, score = oracle.label_of(client.infer(model, array))

    raw = client.infer(model, array.tobytes(), content_type="application/octet-stream")
    entry_id = stack.send(model, body=json.dumps(array.tolist()))
    tensor: dict[str, Any] = stack.result(model, entry_id)["body"]

    for row in (np.frombuffer(raw, np.float32), np.array(tensor["data"], np.float32)):
        found, found_score = oracle.label_of(row)
        assert found == expected
        assert found_score == pytest.approx(score, abs=oracle.SCORE_TOLERANCE)


def test_tensor_of_the_wrong_shape_fails_alone(client: Client, model: str) -> None:
    array = oracle.features(oracle.generated_files()["png"])
    invalid = [array[:-1], array.astype(np.float32), np.stack([array, array])]
    futures = [client.submit(model, tensor) for tensor in (array, *invalid, array)]
    first, *failing, last = futures
    assert oracle.label_of(first.result(30))[0] == oracle.label_of(last.result(30))[0] == "png"
    for future in failing:
        with pytest.raises(InvalidArgumentError, match="but this model takes"):
            future.result(30)
