"""What nodes share, from Redis's replies: what is malformed is left out."""

from __future__ import annotations

from typing import Any

import pytest

from carpool.keys import NodesKeys
from carpool.wire.nodes import (
    NodeReport,
    OutcomeState,
    SeatState,
    choose_version,
    decode_load,
    decode_snapshot,
    load_arguments,
    outcome_of,
    snapshot_commands,
)
from carpool_cli.nodes import as_json
from carpool_console.pages.nodes import SeatView, nodes_of

TIME = [b"1000", b"0"]
LIVES, DEAD = b"1000001", b"1000000"
ECHO = b'[{"generation":7,"entry":"echo","version":"2","parameters":"{\\"a\\":\\"1\\"}","replicas":1}]'
REPORT = NodeReport("a", 2, {"echo": ["1", "2", "10"]}, {"echo version 1": "why"}).encode().encode()


def snapshot(wanted: Any = (), seats: Any = (), leases: Any = (), reports: Any = ()) -> Any:
    return decode_snapshot([TIME, list(wanted), list(seats), list(leases), list(reports)])


def test_snapshot_has_what_is_wanted_and_who_lives() -> None:
    found = snapshot([b"echo", ECHO], [b"7/0", b"SERVING a"], [b"a", LIVES, b"b", DEAD], [b"a", REPORT])
    (wanted,), (node,) = found.wanted, found.nodes
    assert (wanted.model, wanted.generation, wanted.parameters, wanted.share) == ("echo", 7, {"a": "1"}, None)
    assert (node.name, node.room, node.used, node.free) == ("a", 2, 1, 1) and node.has(wanted)
    assert found.serving(wanted) == 1
    assert outcome_of(found, None, "other", 7).state is OutcomeState.GONE
    assert outcome_of(found, b"FAILED no weights", "echo", 7) == (OutcomeState.FAILED, "no weights")
    assert len(snapshot_commands(NodesKeys())) == 5


def test_seat_whose_worker_an_operator_drains_is_shown_as_draining() -> None:
    report = NodeReport("a", 2, {"echo": ["2"]}, {}, drained=["7/0"]).encode().encode()
    found = snapshot([b"echo", ECHO], [b"7/0", b"SERVING a"], [b"a", LIVES], [b"a", report])
    ((node,), (wanted,)) = found.nodes, found.wanted
    assert found.shown_state(node, node.seats[0]) is SeatState.DRAINING
    assert found.serving(wanted) == 1  # its version is not loaded again because of that
    assert nodes_of(found)[0].seats == [SeatView("echo", "2", "draining")]
    assert as_json(found)["nodes"][0]["seats"][0]["state"] == "DRAINING"


@pytest.mark.parametrize(
    "malformed",
    [b"", b"nonsense", b"[{}]", b"{}", b"[1]", b'[{"generation":"x"}]', b"null", b'["a"]', b"\xff"],
)
def test_what_a_user_wrote_is_left_out(malformed: bytes) -> None:
    found = snapshot(
        [b"bad", malformed, b"echo", ECHO],
        [b"7/0", malformed, malformed, b"SERVING a", b"7/1", b"SLEEPING a"],
        [b"a", LIVES, b"b", LIVES],
        [b"a", malformed, b"b", REPORT],
    )
    assert [wanted.model for wanted in found.wanted] == ["echo"]
    assert found.seats == {}
    assert [(node.name, node.room) for node in found.nodes] == [("a", 0), ("b", 2)]


def test_newest_version_is_that_of_the_largest_number() -> None:
    nodes = snapshot(leases=[b"a", LIVES], reports=[b"a", REPORT])
    assert choose_version(nodes, "echo", None) == "10"
    assert choose_version(snapshot(), "echo", "3") == "3"  # the first node that has it loads it
    with pytest.raises(ValueError, match="no version '3'; there are: 1, 2, 10"):
        choose_version(nodes, "echo", "3")


def test_arguments_of_a_load_are_checked_and_equal_parameters_have_equal_texts() -> None:
    assert load_arguments("m", "e", "1", {"b": "2", "a": "1"}, None, 10)[3:6] == [
        '{"a":"1","b":"2"}',
        "",
        "10",
    ]
    for arguments, error in (
        (("../m", "e", "1", {}, None, None), "no valid name"),
        (("m", "e", "1", {}, 257, None), "replicas is 257"),
        (("m", "e", "1", {}, None, 100), "share is 100"),
    ):
        with pytest.raises(ValueError, match=error):
            load_arguments(*arguments)
    assert decode_load(7) == 7
    with pytest.raises(ValueError, match="why not"):
        decode_load(b"why not")
