"""Streams at the front ends of gateways while everything behind and before them is killed: what a client has
seen of a text is its beginning, never with a gap, and nothing of it twice."""

from __future__ import annotations

import os
import signal

import pytest

from support.chaos.streams import LATE_S, Outage, judge_streams
from support.front_ends import BROKEN, COMPLETE, FAILED, FRONT_ENDS, MODEL, REFUSED, SPEC, Readers, Seen
from support.models.stepping import text_of
from support.stack import Stack, frozen_with_batch
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

# A worker that only waits for this machine must not lose its requests.
LEASE = ("--lease-ms", "2000")


def test_what_a_client_has_seen_is_the_beginning_of_the_text(stack: Stack) -> None:
    stack.redis.config_set("appendfsync", "always")
    batchers = [stack.batcher(), stack.batcher()]
    workers = [stack.worker(SPEC, *LEASE) for _ in range(2)]
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
        workers[0] = stack.worker(SPEC, *LEASE)

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


KILLED, TERMINATED = Outage("http://x", 5.0, True, 7.0), Outage("http://x", 5.0, False, 7.0)


@pytest.mark.parametrize(
    ("seen", "outage", "found"),
    [
        (("", BROKEN, 4.0, 5.5), KILLED, set()),
        ((TEXT[:7], BROKEN, 4.0, 5.5), KILLED, set()),
        (("", BROKEN, 6.0, 6.1), TERMINATED, set()),
        ((TEXT[:7], BROKEN, 4.0, 5.5), TERMINATED, {"cut_off"}),  # it had time to end this
        ((TEXT[:7], BROKEN, 4.0, 4.9), KILLED, {"cut_off"}),
        (("", BROKEN, 7.1, 7.2), KILLED, {"cut_off"}),
        (("", BROKEN, 5.0, 5.5), KILLED._replace(url="http://y"), {"cut_off"}),
        ((TEXT[7:], FAILED, 4.0, 5.0), KILLED, {"wrong"}),
        ((TEXT, COMPLETE, 4.0, 4.1 + LATE_S), KILLED, {"late"}),
        (("", REFUSED, 4.0, 4.1, 503), KILLED, set()),
        (("", REFUSED, 4.0, 4.1, 500), KILLED, {"unexpected"}),
    ],
)
def test_what_is_wrong_in_a_random_run_is_found(
    seen: tuple[str, str, float, float, int], outage: Outage, found: set[str]
) -> None:
    text, end, began_s, ended_s, code = (*seen, 0)[:5]
    right = Seen("native", "http://x", "p", 3, TEXT, COMPLETE)
    other = Seen("native", "http://x", "p", 3, text, end, "", began_s, ended_s, code)
    report = judge_streams([right, other], [outage])["native"]
    kinds = ("wrong", "cut_off", "unexpected", "late")
    assert {kind for kind in kinds if getattr(report, kind)} == found
    assert report.is_faultless is not bool(found)
    assert judge_streams([right, right], [])["native"].is_faultless
