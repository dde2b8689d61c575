"""`carpool result ID`: the result of a request that was enqueued, its state, or its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import Field
from pydantic_settings import CliPositionalArg

from carpool.client.aio import AsyncClient
from carpool.errors import CarpoolError
from carpool.settings import ConnectionSettings, Seconds, read_settings
from carpool.shown import complain
from carpool.store.kept import RequestStatus
from carpool_cli.infer import print_value
from carpool_cli.refused import explain

_HAS_ENDED: Final = "it has ended, and there is nothing to withdraw"
_CANCELLED: Final[Mapping[RequestStatus, str]] = {
    "waiting": "asked to withdraw it; its status is `failed` as soon as the batcher has done so",
    "in flight": "asked to withdraw it; a batch that is being executed ends only if its model steps, or "
    "executes several batches at a time",
    "done": _HAS_ENDED,
    "failed": _HAS_ENDED,
    "dead": _HAS_ENDED,
    "unknown": "asked to withdraw it",
}


class ResultSettings(ConnectionSettings):
    """Print the result of a request that was enqueued, as soon as it is there; or its state, or cancel it.

    ID is what `carpool infer MODEL BODY --enqueue` printed, or `enqueue` of a client returned. The result may
    be read again, as long as it is kept.
    """

    id: CliPositionalArg[str] = Field(description="MODEL/CORRELATION_ID")
    timeout: Seconds = Field(30.0, ge=0, description="seconds to wait for the result; 0: it must be there")
    status: bool = Field(
        False, description="print the state instead: waiting, in flight, done, failed, dead, or unknown"
    )
    cancel: bool = Field(
        False, description="withdraw the request instead, if it has no result yet, and print its state before"
    )
    raw: bool = Field(False, description="print a result of bytes or a tensor as its bytes")


def main(argv: Sequence[str]) -> int:
    """Do what is asked. Returns 1, with the error on standard error, if it failed."""
    settings = read_settings(ResultSettings, argv, "carpool result")
    if settings.status and settings.cancel:
        return _failed("--status and --cancel: only one of them")
    try:
        asyncio.run(_do(settings))
    except CarpoolError as error:
        return _failed(explain(error))
    return 0


def _failed(error: str) -> int:
    complain(f"carpool result: {error}")
    return 1


async def _do(settings: ResultSettings) -> None:
    async with AsyncClient(settings.redis_url, prefix=settings.prefix) as client:
        if settings.cancel:
            print(await _cancel(client, settings.id))
        elif settings.status:
            print(await client.status(settings.id))
        else:
            print_value(await client.result(settings.id, settings.timeout), raw=settings.raw)


async def _cancel(client: AsyncClient, request_id: str) -> str:
    """Withdraw a request, and return what can be said of it now: the batcher has not read it yet."""
    status = await client.status(request_id)
    await client.cancel(request_id)  # raises NotFoundError for one that is unknown
    return f"{request_id} was {status}: {_CANCELLED[status]}"
