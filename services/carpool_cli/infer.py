"""`carpool infer MODEL BODY`: send one request from a shell."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.client.aio import AsyncClient
from carpool.client.options import DEFAULT_TIMEOUT_S, RequestOptions
from carpool.errors import CarpoolError, DeadlineExceededError, InvalidArgumentError
from carpool.messages.requests import JSON, PRIORITY_DEFAULT, RAW
from carpool.settings import CarpoolSettings, ConnectionSettings, Lines, Seconds, read_settings
from carpool.shown import complain, printable_lines
from carpool.store.kept import TIMEOUT_S
from carpool.text_files import decoded
from carpool.wire.bodies import NotJSONError, decode_body, decode_json, encode_body
from carpool.wire.content_types import checked
from carpool_cli.refused import explain


class BodySettings(CarpoolSettings):
    """What BODY is, and what comes with it."""

    raw: bool = Field(False, description="the body is raw bytes, as is a result of bytes or a tensor")
    content_type: str = Field(
        "", description="content type of the body, such as image/png; all but JSON are taken as they are"
    )
    accept: str = Field("", description="content type of the result (default: that of the body, or JSON)")
    field: Lines = Field([], description="NAME=VALUE: a further field, for the model; may be repeated")

    @property
    def body_type(self) -> str:
        """The content type of the body. Raises InvalidArgumentError."""
        if self.content_type:
            return checked("--content-type", self.content_type)
        return RAW if self.raw else JSON

    @property
    def result_type(self) -> str:
        """The content type that is wanted of the result; empty for none. Raises InvalidArgumentError."""
        return checked("--accept", self.accept) if self.accept else ""

    @property
    def fields(self) -> dict[str, str]:
        """The further fields. Raises InvalidArgumentError."""
        return dict(map(_named, self.field))


class RequestSettings(BodySettings, ConnectionSettings):
    """How BODY is sent."""

    cost: int | None = Field(None, ge=0, description="what the request counts towards max_batch_cost")

    @property
    def body_options(self) -> RequestOptions:
        """The options of a request with the body. Raises InvalidArgumentError."""
        return {
            "content_type": self.body_type,
            "accept": self.result_type or None,
            "fields": self.fields,
            "cost": self.cost,
        }


class InferSettings(RequestSettings):
    """Send one request, and print its result as JSON; with --stream as it comes, with --enqueue its ID.

    BODY is JSON; text that is not JSON is sent as a JSON string. @FILE sends the contents of a file, and -
    sends standard input. Write -- before a BODY that begins with a dash.
    """

    # `null` is a valid body. A NUL, which no command line can contain, stands for None instead.
    model_config = SettingsConfigDict(cli_parse_none_str="\0")

    model: CliPositionalArg[str] = Field(description="the model's name; `carpool models` lists them")
    body: CliPositionalArg[str] = Field(description="JSON, text, @FILE or -")
    timeout: Seconds | None = Field(
        None,
        gt=0,
        le=86_400,
        description="seconds to wait for the result; the request expires after the same time (default: 30, "
        "with --enqueue 3600)",
    )
    not_before: Seconds = Field(0.0, ge=0, description="seconds in which the request is not dispatched")
    priority: int = Field(PRIORITY_DEFAULT, ge=0, le=9, description="0 to 9; higher is served first")
    lane: str = Field("", description="lane of the request; only requests of the same lane share a batch")
    version: str = Field("", description="version of the model that must execute it (default: any)")
    tenant: str = Field(
        "", description="tenant that the request belongs to; tenants are served in fair turns"
    )
    stream: bool = Field(
        False,
        description="print each chunk when it comes: texts end to end, any other value as a line of JSON",
    )
    enqueue: bool = Field(
        False,
        description="do not wait: print the ID with which `carpool result` gets the result, anywhere",
    )
    correlation_id: str = Field(
        "", description="with --enqueue: your own ID; what is enqueued again under it is executed once"
    )
    result_ttl: Seconds | None = Field(
        None,
        gt=0,
        description="with --enqueue: seconds for which the result is kept (default: as the model has it)",
    )
    sequence_id: str = Field("", description="sequence of the request, of a model that keeps states")
    sequence_start: bool = Field(False, description="the request is the first one of its sequence")
    sequence_end: bool = Field(False, description="the request is the last one of its sequence")
    sequence_index: int | None = Field(
        None, ge=0, description="number of the request in its sequence, from 0"
    )

    @property
    def options(self) -> RequestOptions:
        """The options of the request."""
        return {
            **self.body_options,
            "not_before": self.not_before,
            "priority": self.priority,
            "lane": self.lane or None,
            "version": self.version or None,
            "tenant": self.tenant or None,
            "sequence_id": self.sequence_id or None,
            "sequence_start": self.sequence_start,
            "sequence_end": self.sequence_end,
            "sequence_index": self.sequence_index,
        }


def main(argv: Sequence[str]) -> int:
    """Print the result, or its chunks. Returns 1, with the error on standard error, if it failed."""
    settings = read_settings(InferSettings, argv, "carpool infer")
    if mistake := _mistake(settings):
        return _failed(mistake)
    send = _print_chunks if settings.stream else _print_id if settings.enqueue else _print_result
    try:
        asyncio.run(send(settings, read_body(settings.body, settings.body_type)))
    except BrokenPipeError:  # of standard output
        raise
    except DeadlineExceededError as error:
        advice = f"{_hint(settings)}`carpool models` shows whether requests wait and a worker is alive"
        return _failed(f"{error}\n    {advice}")
    except CarpoolError as error:  # before OSError, because some are both
        return _failed(explain(error))
    except OSError as error:
        return _failed(f"BODY: cannot read {error.filename}: {error.strerror}")
    return 0


def _mistake(settings: InferSettings) -> str:
    """What is wrong with these arguments together; empty if nothing is."""
    if settings.stream and settings.sequence_id:
        return "--stream: a request of a sequence has one result, and no chunks; omit --stream"
    if settings.stream and settings.enqueue:
        return "--stream: chunks are for a client that waits; the result of --enqueue is the whole output"
    if not settings.enqueue and (settings.correlation_id or settings.result_ttl is not None):
        return "--correlation-id and --result-ttl: only with --enqueue"
    return ""


def _named(field: str) -> tuple[str, str]:
    name, equals, value = field.partition("=")
    if not (name and equals):
        raise InvalidArgumentError(f"--field: {field!r:.60} is not NAME=VALUE")
    return name, value


def _hint(settings: InferSettings) -> str:
    """What else may keep a request waiting."""
    index = settings.sequence_index
    return f"the request waits for those of its sequence with the indexes below {index}; " if index else ""


def _failed(error: str) -> int:
    complain(f"carpool infer: {error}")
    return 1


def read_body(body: str, content_type: str = JSON) -> Any:
    """Read the BODY argument, as its content type says, which is canonical. Raises OSError,
    InvalidArgumentError."""
    data = _body_bytes(body)
    if content_type != JSON:
        return decode_body(content_type, data, declared=True)
    try:
        text = decoded(data, "body:")
    except ValueError as error:
        raise InvalidArgumentError(
            f"{error}, or name its --content-type, such as image/png, or use --raw"
        ) from None
    try:
        return decode_json(text.encode())
    except NotJSONError:
        return text


def _body_bytes(body: str) -> bytes:
    if body == "-":
        return sys.stdin.buffer.read()
    if body.startswith("@"):
        return Path(body[1:]).read_bytes()
    return os.fsencode(body)


def _client(settings: InferSettings) -> AsyncClient:
    timeout_s = DEFAULT_TIMEOUT_S if settings.timeout is None else settings.timeout
    return AsyncClient(settings.redis_url, prefix=settings.prefix, timeout=timeout_s)


async def _print_result(settings: InferSettings, body: Any) -> None:
    async with _client(settings) as client:
        result = await client.infer(settings.model, body, **settings.options)
    print_value(result, raw=settings.raw)


async def _print_id(settings: InferSettings, body: Any) -> None:
    options = settings.options
    options["timeout"] = TIMEOUT_S if settings.timeout is None else settings.timeout
    options["correlation_id"] = settings.correlation_id or None
    options["result_ttl"] = settings.result_ttl
    async with AsyncClient(settings.redis_url, prefix=settings.prefix) as client:
        print(await client.enqueue(settings.model, body, **options))


def print_value(result: Any, *, raw: bool) -> None:
    """Print a result: as JSON, or bytes as they are. `raw`: also the bytes of a tensor, and on a terminal."""
    as_bytes = isinstance(result, bytes | np.ndarray) if raw else isinstance(result, bytes)
    data = encode_body(RAW, result) if as_bytes else encode_body(JSON, result) + b"\n"
    if _is_read_by_people(raw=raw):
        data = _as_text(data).encode() + (b"\n" if as_bytes else b"")
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _is_read_by_people(*, raw: bool) -> bool:
    """Whether the output goes to a terminal, which would obey the control characters in it."""
    return sys.stdout.isatty() and not raw


def _as_text(data: bytes) -> str:
    """What people see of a result, or of a chunk."""
    try:
        return printable_lines(data.decode())
    except UnicodeDecodeError:
        return f"({len(data):,} bytes; --raw, a pipe or a file gets them)"


async def _print_chunks(settings: InferSettings, body: Any) -> None:
    """If this is interrupted, or nobody reads standard output any more, the request is withdrawn."""
    printer = _ChunkPrinter(sys.stdout.buffer, is_read_by_people=_is_read_by_people(raw=settings.raw))
    async with _client(settings) as client, client.stream(settings.model, body, **settings.options) as stream:
        try:
            async for chunk in stream:
                printer.print(chunk)
        finally:
            printer.end_line()


class _ChunkPrinter:
    """Prints each chunk at once: texts and bytes end to end, any other value as a line of JSON.

    `is_read_by_people`: control characters are escaped.
    """

    def __init__(self, output: BinaryIO, *, is_read_by_people: bool = False) -> None:
        self._output = output
        self._is_read_by_people = is_read_by_people
        self._in_text = False  # the last line has no end yet

    def print(self, chunk: Any) -> None:
        if isinstance(chunk, bytes):
            self._write(chunk)
        elif isinstance(chunk, str):
            self._in_text = True
            self._write(chunk.encode(errors="replace"))  # JSON may have half a surrogate pair
        else:
            self.end_line()
            self._write(encode_body(JSON, chunk) + b"\n")

    def end_line(self) -> None:
        """End the line of the last text."""
        if self._in_text:
            self._in_text = False
            self._write(b"\n")

    def _write(self, data: bytes) -> None:
        self._output.write(_as_text(data).encode() if self._is_read_by_people else data)
        self._output.flush()
