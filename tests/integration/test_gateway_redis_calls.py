"""Connections of the gateway to Redis for commands beside requests and results."""

from __future__ import annotations

import asyncio
from unittest import mock

import redis

from carpool_gateway import redis_calls
from carpool_gateway.redis_calls import CONNECTIONS_MAX, RedisCalls
from support.stack import Stack


def test_names_that_clients_make_up_do_not_take_more_connections(stack: Stack) -> None:
    """As in a cluster, where a connection is for the node of a key, and used again for that key alone."""
    key, keys = (
        "carpool:{m}:config",
        [f"carpool:{{{number}}}:config" for number in range(2 * CONNECTIONS_MAX)],
    )

    async def ask() -> int:
        with mock.patch.object(redis_calls, "is_cluster", return_value=True):
            asked = RedisCalls(stack.url)
        for each in keys:
            assert await asked.call(each, ("HGETALL", each)) == []
        await asyncio.gather(*(asked.call(each, ("HGETALL", each)) for each in keys))
        assert await asked.call(key, ("HGETALL", key)) == []
        number = _connections(stack.redis)
        asked.close()
        return number

    assert asyncio.run(ask()) <= CONNECTIONS_MAX


def test_a_connection_is_used_again(stack: Stack) -> None:
    async def ask() -> int:
        asked = RedisCalls(stack.url)
        for number in range(20):
            key = f"carpool:{{{number}}}:config"
            await asked.call(key, ("HGETALL", key))
        number = _connections(stack.redis)
        asked.close()
        return number

    assert asyncio.run(ask()) == 1


def _connections(server: redis.Redis) -> int:
    return sum(client["name"] == "gateway:calls" for client in server.client_list())
