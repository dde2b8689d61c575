"""Streams at the front ends of gateways while everything behind and before them is killed: what a client has
seen of a text is its beginning, never with a gap, and nothing of it twice."""

from __future__ import annotations

import os
import signal

import pytest

from support.front_ends import BROKEN, COMPLETE, FAILED, FRONT_ENDS, MODEL, Readers, Seen
from support.models.stepping import text_of
from support.stack import Stack, frozen_with_batch
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

TOLD = "stepping.py:Told"
# A worker that only waits for this machine must not lose its requests.
LEASE = ("--lease-ms", "2000")


def test_what_a_client_has_seen_is_the_beginning_of_the_text(stack: Stack) -> None:
    stack.redis.config_set("appendfsync", "always")
    batchers = [stack.batcher(), stack.batcher()]
    workers = [stack.worker(TOLD, *LEASE) for _ in range(2)]
    gateways = [stack.gateway("--grpc-port", "0") for _ in range(2)]
    stack.wait_for_model(MODEL, 2)
    rpc = {gateway.url: gateway.wait_for("gateway started")["grpc"] for gateway in gateways}
    with Readers([*rpc], rpc, FRONT_ENDS) as readers:
        readers.wait_for_more(2)

        readers.wait_until_open()
        (process,) = workers[0].children()
        os.kill(process, signal.SIGKILL)
        readers.wait_for_more(2)

        with frozen_with_batch(stack, MODEL, workers[0]):
            workers[0].kill()
        readers.wait_for_more(2)
        workers[0] = stack.worker(TOLD, *LEASE)

        readers.wait_until_open()
        active = stack.active_batcher(MODEL)
        active.kill()
        assert active in batchers
        readers.wait_for_more(2)
        assert readers.ends().keys() == {COMPLETE}, "batchers, workers and model processes are replaced"

        readers.wait_until_open()
        os.kill(stack.server.pid, signal.SIGKILL)
        wait_until(lambda: not stack.server.alive, description="Redis has ended")
        stack.server.restart()
        readers.wait_for_more(2)

        readers.urls = [gateways[1].url, gateways[0].url]
        readers.wait_until_open(gateways[0].url)
        gateways[0].kill()
        readers.urls = [gateways[1].url]
        readers.wait_for_more(2)

    assert readers.faults() == []
    ended_early = {(one.end, one.url) for one in readers.seen if one.end != COMPLETE}
    assert ended_early == {(BROKEN, gateways[0].url)}, "all others survive what happens behind a gateway"
    stack.wait_until_idle(MODEL)


TEXT = text_of("", 3, "p")


@pytest.mark.parametrize(
    ("text", "end", "is_right"),
    [
        (TEXT, COMPLETE, True),
        (TEXT[:7], FAILED, True),
        ("", BROKEN, True),
        (TEXT[:14], COMPLETE, False),  # the end is missing
        (TEXT[:7] + TEXT[14:], COMPLETE, False),  # a gap
        (TEXT[:7] + TEXT[14:], BROKEN, False),
        (TEXT[:7] + TEXT[:7], BROKEN, False),  # twice
        (TEXT + TEXT[-7:], COMPLETE, False),
    ],
)
def test_what_is_wrong_with_a_text_is_found(text: str, end: str, *, is_right: bool) -> None:
    assert Seen("native", "http://x", "p", 3, text, end).is_right is is_right
