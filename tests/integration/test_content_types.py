"""An image in and a label out: the content types of requests and of their results differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from carpool.client.sync import Client
from carpool.errors import InvalidArgumentError
from carpool.messages.requests import JSON, MSGPACK, RAW
from support.command import carpool
from support.stack import Stack
from support.waiting import EVENTUALLY_S

PNG = b"\x89PNG..."


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("plain.py:label", "plain.py:image", "plain.py:Rows", "stepping.py:countdown")
        yield stack


@pytest.fixture
def client(shared: Stack) -> Iterator[Client]:
    with Client(shared.url, timeout=EVENTUALLY_S) as client:
        yield client


@pytest.mark.parametrize("content_type", ["image/png", "IMAGE/PNG", RAW, "video/mp4; codecs=avc1"])
def test_label_of_an_image_is_json(shared: Stack, content_type: str) -> None:
    name = shared.send("label", body=PNG, content_type=content_type)
    result = shared.result("label", name)
    assert (result["status"], result["content_type"]) == ("OK", JSON)
    assert result["body"] in (b'{"bytes":7}', {"bytes": 7})


def test_content_type_of_json_may_have_parameters(shared: Stack) -> None:
    name = shared.send(
        "image", body='"cat"', content_type="application/json; charset=utf-8", accept="image/png"
    )
    result = shared.result("image", name)
    assert (result["status"], result["content_type"], result["body"]) == ("OK", "image/png", b"\x89PNG cat")


def test_clients_send_and_accept_any_content_type(client: Client) -> None:
    assert client.infer("label", PNG) == {"bytes": 7}
    assert client.infer("label", PNG, content_type="image/png", accept=MSGPACK) == {"bytes": 7}
    assert client.infer("image", "cat", accept="image/png") == b"\x89PNG cat"
    assert client.infer("image", "cat", accept=RAW) == b"\x89PNG cat"
    with pytest.raises(InvalidArgumentError, match="accept: application/json cannot hold bytes"):
        client.infer("image", "cat", accept=JSON)
    with pytest.raises(InvalidArgumentError, match=r"accept: image/png is bytes, but .* of type dict"):
        client.infer("label", PNG, accept="image/png")


def test_rows_are_results_of_the_accepted_type(client: Client) -> None:
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    for accept in (JSON, MSGPACK):
        results: Any = client.infer_many("Rows", array, accept=accept)
        assert np.array_equal(results, array)
    assert client.infer_many("Rows", array, accept=RAW) == [row.tobytes() for row in array]


def test_streams_have_the_accepted_type(client: Client) -> None:
    stream = client.stream("countdown", 3, content_type=JSON, accept=MSGPACK)
    assert list(stream) == [3, 2, 1]


@pytest.mark.parametrize("field", ["content_type", "accept"])
@pytest.mark.parametrize("wrong", ["json", "image/", "a/b/c", "x" * 200, "image/p ng"])
def test_what_is_no_content_type_is_refused(client: Client, field: str, wrong: str) -> None:
    options: Any = {field: wrong}
    with pytest.raises(InvalidArgumentError, match=f"{field}: .* is no content type"):
        client.infer("label", PNG, **options)


def test_command_line_sends_files_of_any_type(shared: Stack, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    (tmp_path / "name.msgpack").write_bytes(msgpack.packb("cat"))

    def infer(*arguments: str) -> bytes:
        return carpool(shared.url, "infer", *arguments, folder=tmp_path, check=True).output

    assert infer("label", "@cat.png", "--content-type", "image/png") == b'{"bytes":7}\n'
    assert infer("image", "cat", "--accept", "image/png") == b"\x89PNG cat"
    packed = ("@name.msgpack", "--content-type", MSGPACK)
    assert infer("image", *packed, "--accept", RAW, "--field", "user=x", "--cost", "2") == b"\x89PNG cat"
