"""What operators see of a bound model on a real stack: models, top, config, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from carpool import Client
from support.command import carpool
from support.stack import Stack
from support.waiting import EVENTUALLY_S, wait_until

MODEL: Final = "Hearing"
SLOTS: Final = 4
PROCESSES: Final = 2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.batcher()
        stack.worker(f"bound.py:{MODEL}", "--replicas", str(PROCESSES))
        stack.wait_for_model(MODEL, PROCESSES)
        yield stack


def top(stack: Stack) -> dict[str, Any]:
    done = carpool(stack.url, "top", "--once", "--json")
    (found,) = json.loads(done.stdout)["models"]
    assert isinstance(found, dict)
    return found


def test_models_and_top_show_slots(served: Stack) -> None:
    with (
        Client(served.url, timeout=EVENTUALLY_S) as client,
        client.sequence(MODEL) as one,
        client.sequence(MODEL) as two,
    ):
        for sequence in (one, two):
            sequence.infer(1)
        shown = {"kept": 2, "slots": PROCESSES * SLOTS}
        wait_until(
            lambda: shown.items() <= (top(served)["sequences"] or {}).items(), description="two are kept"
        )
        wait_until(
            lambda: "  2 kept  8 slots  " in carpool(served.url, "top", "--once").stdout,
            description="a person is shown the same",
        )
        wait_until(
            lambda: carpool(served.url, "models").stdout.rstrip().endswith("  2 of 8 slots"),
            description="they are listed with the model",
        )
    assert "number of slots" in carpool(served.url, "config", MODEL).stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("tune", MODEL, "7", "--latency-ms", "30"),
        ("tune", MODEL, "--latency-ms", "30"),
        ("simulate", "--model", MODEL, "policy=deferred"),
    ],
)
def test_what_is_for_any_process_is_refused(served: Stack, arguments: tuple[str, ...]) -> None:
    done = carpool(served.url, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"carpool {arguments[0]}: {MODEL} binds each sequence to one of its processes"
    )
