"""The connections of a client, for tests that break them."""

from __future__ import annotations

from carpool import AsyncClient
from carpool.client.transport import Transport


def transport_of(client: AsyncClient) -> Transport:
    """Those to one server: the client is not one of a cluster."""
    assert isinstance(client._packer.transport, Transport)
    return client._packer.transport
