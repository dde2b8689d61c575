"""Clients for systems that are HTTP servers: aiohttp, and wrk."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp

from grid.models import MODELS, Array
from grid.setup import Setup
from grid.systems.client_wrk import Call, WrkClient, connect_wrk


class AiohttpClient:
    """One session, with as many connections as there are requests in flight, up to `in_flight_max`."""

    in_flight_max = 1024

    def __init__(
        self,
        session: aiohttp.ClientSession,
        path: str,
        encode: Callable[[Array], bytes],
        decode: Callable[[bytes], Array],
        content_type: str,
    ) -> None:
        self._session, self._path = session, path
        self._encode, self._decode = encode, decode
        self._headers = {"Content-Type": content_type}

    async def call(self, body: Array) -> Array:
        """POST a body."""
        data = self._encode(body)
        async with self._session.post(self._path, data=data, headers=self._headers) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            return self._decode(await response.read())

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


async def connect_http(setup: Setup) -> AiohttpClient | WrkClient:
    """The client that the setup names, for raw bytes at /inference."""
    model = MODELS[setup.model]
    return await http_client(
        setup, "/inference", "application/octet-stream", lambda body: body.tobytes(), model.decode_result
    )


async def http_client(
    setup: Setup,
    path: str,
    content_type: str,
    encode: Callable[[Array], bytes],
    decode: Callable[[bytes], Array],
) -> AiohttpClient | WrkClient:
    """The client that the setup names; wrk once the server serves."""
    model = MODELS[setup.model]
    if setup.client == "wrk":
        call = Call(path, {"Content-Type": content_type}, encode(model.body(0)))
        return await connect_wrk(setup, call, decode)
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=AiohttpClient.in_flight_max)
    session = aiohttp.ClientSession(setup.http_url, connector=connector, timeout=timeout)
    return AiohttpClient(session, path, encode, decode, content_type)
