"""`carpool infer MODEL BODY`: send one request from a shell."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.client.aio import AsyncClient
from carpool.errors import CarpoolError, DeadlineExceededError, InvalidArgumentError
from carpool.messages import JSON, PRIORITY_DEFAULT, RAW
from carpool.settings import ConnectionSettings, read_settings
from carpool.store.connection import LinkError
from carpool.wire.bodies import encode_body


class InferSettings(ConnectionSettings):
    """Send one request, and print its result as JSON.

    BODY is JSON; text that is not JSON is sent as a JSON string. @FILE sends the contents of a file, and -
    sends standard input. Write -- before a BODY that begins with a dash.
    """

    # `null` is a valid body. A NUL, which no command line can contain, stands for None instead.
    model_config = SettingsConfigDict(cli_parse_none_str="\0")

    model: CliPositionalArg[str] = Field(description="the model's name; `carpool models` lists them")
    body: CliPositionalArg[str] = Field(description="JSON, text, @FILE or -")
    timeout: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="seconds to wait for the result; the request expires after the same time",
    )
    priority: int = Field(PRIORITY_DEFAULT, ge=0, le=9, description="0 to 9; higher is served first")
    lane: str = Field("", description="lane of the request; only requests of the same lane share a batch")
    tenant: str = Field(
        "", description="tenant that the request belongs to; tenants are served in fair turns"
    )
    raw: bool = Field(False, description="send the body as raw bytes, and print the result's bytes")


def main(argv: Sequence[str]) -> int:
    """Print the result. Returns 1, with the error on standard error, if there is none."""
    settings = read_settings(InferSettings, argv, "carpool infer")
    try:
        result = asyncio.run(_infer(settings, read_body(settings.body, raw=settings.raw)))
    except LinkError as error:
        return _failed(
            f"{error}\n    if no Redis runs there, start one with `carpool up {settings.model}`, or name "
            "another with --redis-url (CARPOOL_REDIS_URL)"
        )
    except DeadlineExceededError as error:
        return _failed(f"{error}\n    `carpool models` shows whether requests wait and a worker is alive")
    except CarpoolError as error:  # before OSError, because some are both
        return _failed(str(error))
    except OSError as error:
        return _failed(f"BODY: cannot read {error.filename}: {error.strerror}")
    sys.stdout.buffer.write(result if settings.raw else result + b"\n")
    sys.stdout.buffer.flush()
    return 0


def _failed(error: str) -> int:
    print(f"carpool infer: {error}", file=sys.stderr)
    return 1


def read_body(body: str, *, raw: bool = False) -> Any:
    """Parse the BODY argument: a JSON value, or bytes if `raw`. Raises OSError, InvalidArgumentError."""
    data = _body_bytes(body)
    if raw:
        return data
    try:
        return json.loads(data)
    except UnicodeDecodeError:
        raise InvalidArgumentError("body: is not UTF-8 text; --raw sends bytes") from None
    except RecursionError:
        raise InvalidArgumentError("body: is nested too deep") from None
    except ValueError:
        return data.decode()


def _body_bytes(body: str) -> bytes:
    if body == "-":
        return sys.stdin.buffer.read()
    if body.startswith("@"):
        return Path(body[1:]).read_bytes()
    return os.fsencode(body)


async def _infer(settings: InferSettings, body: Any) -> bytes:
    """The result, encoded in the content type of the request."""
    content_type: Final = RAW if settings.raw else JSON
    async with AsyncClient(settings.redis_url, prefix=settings.prefix, timeout=settings.timeout) as client:
        result = await client.infer(
            settings.model,
            body,
            priority=settings.priority,
            lane=settings.lane or None,
            tenant=settings.tenant or None,
            content_type=content_type,
        )
    return encode_body(content_type, result)
