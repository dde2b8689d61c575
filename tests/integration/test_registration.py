"""What a worker registers about its model, in a real Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool.store.worker import WorkerStore
from carpool.wire.registration import decode_inputs, encode_registration
from carpool.wire.tensors import TensorSpec
from carpool_cli.local.embedded import EmbeddedRedis

TENSOR = TensorSpec("x", "FP32", (3,))


@pytest.fixture
def link() -> Iterator[Link]:
    with EmbeddedRedis(append_only=False) as server:
        link = Link(server.url, name="test")
        yield link
        link.close()


def test_model_without_tensors_that_takes_the_name_of_another_declares_none(link: Link) -> None:
    store, directory = WorkerStore(link, Keys("m")), Directory(link, "carpool")
    store.register(encode_registration(ModelSettings().as_text(), [TENSOR], [TENSOR]))
    registered, _ = directory.config("m")
    assert (decode_inputs(registered), "outputs" in registered) == ([TENSOR], True)
    store.register(encode_registration(ModelSettings().as_text(), [], [TENSOR]))
    registered, _ = directory.config("m")
    assert (decode_inputs(registered), "outputs" in registered) == ([], True)
    store.register(encode_registration(ModelSettings().as_text(), [], []))
    registered, _ = directory.config("m")
    assert registered == encode_registration(ModelSettings().as_text(), [], [])
