"""Text files in the encodings that Windows writes, as commands read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carpool.errors import InvalidArgumentError
from carpool.messages.requests import JSON
from carpool.settings import BatcherSettings, read_settings
from carpool.text_files import read_text
from carpool.wire.bodies import decode_body
from carpool_cli.check.bodies import read_bodies
from carpool_cli.check.command import CheckSettings
from carpool_cli.infer import read_body

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_marks_and_ends_of_lines_are_no_part_of_a_text(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "file"
    file.write_bytes("grün\r\nblau\rrot\n".encode(encoding))
    assert read_text(file) == "grün\nblau\nrot\n"
    file.write_bytes(b"")
    assert read_text(file) == ""


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("text", "value"), [('{"für": 1}\r\n', {"für": 1}), ("grün", "grün")])
def test_body_of_a_file_may_have_a_mark(tmp_path: Path, encoding: str, text: str, value: object) -> None:
    (tmp_path / "body").write_bytes(text.encode(encoding))
    assert read_body(f"@{tmp_path / 'body'}") == value


def test_body_of_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"gr\xfcn")
    with pytest.raises(InvalidArgumentError, match=r"not UTF-8 text \(byte 0xfc in line 1\).*--content-type"):
        read_body(f"@{tmp_path / 'body'}")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"a": 1, "a": 2}', "the name 'a' is in a map more than once"),
        ("1e400", "the number 1e400 is outside the range of FP64"),
        ("[1, NaN]", "not JSON"),
        ("9" * 5000, "a whole number has more than 4300 digits"),
        ("[" * 65 + "]" * 65, "nested deeper than 64"),
        ('"\\ud800"', "lone surrogate"),
        ('{"datatype": "INT8", "shape": [1], "data": [300]}', "body.data"),
    ],
)
def test_body_that_services_refuse_is_refused(body: str, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        read_body(body)
    with pytest.raises(InvalidArgumentError, match=why):
        decode_body(JSON, body.encode())


def test_tensor_in_a_body_is_sent_as_it_is_written() -> None:
    tensor = {"datatype": "FP32", "shape": [2, 1], "data": [[1], [2.5]]}
    assert read_body(json.dumps(tensor)) == tensor


def test_lines_of_bodies_end_with_a_line_and_not_with_a_character_of_json(tmp_path: Path) -> None:
    (tmp_path / "bodies.jsonl").write_bytes('"a\u2028b"\r\n"c"\r\n'.encode("utf-16"))
    settings = read_settings(CheckSettings, ["square", f"@{tmp_path / 'bodies.jsonl'}"], "carpool check")
    assert read_bodies(settings.body, settings.body_type, settings.extra).encoded == [
        '"a\u2028b"'.encode(),
        b'"c"',
    ]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_password_file_may_have_a_mark(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "password").write_bytes("s3cret\r\n".encode(encoding))
    flags = ["--redis-url", "redis://h", "--redis-password-file", str(tmp_path / "password")]
    assert read_settings(BatcherSettings, flags, "batcher").redis_url == "redis://:s3cret@h"


def test_mark_in_a_certificate_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ca").write_bytes("\ufeff-----BEGIN CERTIFICATE-----\n".encode())
    with pytest.raises(SystemExit):
        read_settings(
            BatcherSettings, ["--redis-url", "rediss://h", "--redis-ca-file", str(tmp_path / "ca")], "batcher"
        )
    assert f"is {tmp_path / 'ca'}: it begins with a byte-order mark" in capsys.readouterr().err
