"""Producers in Python: `AsyncClient`, and `Client` for programs without an event loop.

aio           AsyncClient: requests, timeouts, results
sync          Client: AsyncClient on a thread of its own
transport     the two connections to Redis, reconnection, and how requests share entries
"""

from carpool.client.aio import AsyncClient, Reply
from carpool.client.sync import Client

__all__ = ["AsyncClient", "Client", "Reply"]
