"""URLs of Redis Cluster, and which node they lead to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from carpool.cluster import Cluster, slot_of
from carpool.keys import Keys
from carpool.settings import ConnectionSettings, read_settings
from carpool.store.connection import Link, LinkError

KEY = "carpool:{a}:requests"
SLOT = slot_of(KEY)


def cluster(url: str, key: str = KEY) -> Cluster:
    found = Cluster.of(url, key)
    assert found is not None
    return found


def known(answers: dict[str, Any]) -> Any:
    def ask(url: str, command: tuple[str, ...]) -> Any:
        assert command == ("CLUSTER", "SLOTS")
        answer = answers[url]
        if isinstance(answer, str):
            raise LookupError(answer)
        return answer

    return ask


def ranges(host: bytes | None, port: int) -> list[Any]:
    """A reply to CLUSTER SLOTS in which a node has the slot, with a replica; and another one has the rest."""
    replica = [b"replica", 1, b"id", []]
    return [
        [0, SLOT - 1, [b"other", 2, b"id", []]],
        [SLOT, SLOT, [host, port, b"id", []], replica],
        [SLOT + 1, 16_383, [b"other", 2, b"id", []]],
    ]


def test_url_of_a_server_names_no_cluster() -> None:
    for url in ("redis://a:6379/0", "rediss://a", "unix:///tmp/redis.sock", "redis+sentinel://a/main"):
        assert Cluster.of(url, KEY) is None


def test_all_keys_of_a_model_have_one_slot() -> None:
    keys = Keys("a")
    assert {slot_of(key) for key in (keys.requests, keys.batches, keys.body("{b}"), "{a}")} == {SLOT}


def test_nodes_that_are_down_or_do_not_know_are_passed_over() -> None:
    found = cluster("redis+cluster://a,b:7,c:8")
    answers = {"redis://a:6379/0?": "refused", "redis://b:7/0?": [], "redis://c:8/0?": ranges(b"10.0.0.1", 9)}
    for _ in range(20):  # they are asked in any order
        assert found.server_url(known(answers)) == "redis://10.0.0.1:9/0?"


def test_credentials_and_options_are_those_of_all_nodes() -> None:
    found = cluster("rediss+cluster://me:p%40ss@[::1]:7?ssl_ca_certs=%2Fca")
    answers = {"rediss://me:p%40ss@[::1]:7/0?ssl_ca_certs=%2Fca": ranges(b"fe80::1", 8)}
    assert found.server_url(known(answers)) == "rediss://me:p%40ss@[fe80::1]:8/0?ssl_ca_certs=%2Fca"


@pytest.mark.parametrize("nameless", [b"", None])
def test_node_without_a_name_is_where_it_was_asked(nameless: bytes | None) -> None:
    answers = {"redis://[::1]:7/0?": ranges(nameless, 8)}
    assert cluster("redis+cluster://[::1]:7").server_url(known(answers)) == "redis://[::1]:8/0?"


def test_error_says_what_each_node_answered() -> None:
    answers = {"redis://a:6379/0?": "refused", "redis://b:6379/0?": []}
    with pytest.raises(LookupError) as raised:
        cluster("redis+cluster://a,b").server_url(known(answers))
    assert "refused" in str(raised.value)
    assert f"according to b:6379, no node has the hash slot {SLOT}" in str(raised.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+cluster://a:6379/1", "has database 0 only"),
        ("redis+cluster://a:x", "each node must be HOST or HOST:PORT"),
        ("redis+cluster://a,,b", "each node must be HOST or HOST:PORT"),
    ],
)
def test_url_that_cannot_be_used_is_refused_at_once(
    url: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(ConnectionSettings, ["--redis-url", url], "test")
    assert re.search(reason, capsys.readouterr().err)
    with pytest.raises(LinkError, match=reason):
        Link(url, name="test")
