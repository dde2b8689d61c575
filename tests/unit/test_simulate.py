"""`carpool simulate` without Redis."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from carpool_cli.screen import Screen
from carpool_cli.tuning.simulate import Watch, main

BRIEF = ("--requests", "400")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of Carpool's in the environment, and no `.env` where we are."""
    for name in [name for name in os.environ if name.startswith("CARPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*BRIEF, *words, "--json"]) == 0
    said: dict[str, object] = json.loads(capsys.readouterr().out)
    return said


def test_the_table_says_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BRIEF, "--rate", "100", "--intercept-ms", "2", "--slope-ms", "0.5"]) == 0
    said = capsys.readouterr()
    head, *rows = said.out.splitlines()
    assert head == "eager, up to 32 in a batch, 1 process, l(n) = 2 + 0.5 n ms"
    values = {name: value for name, _, value in (row.strip().rpartition("  ") for row in rows)}
    figures = {name.strip(): value for name, value in values.items()}
    assert figures["requests"] == "400"
    # Not the 100 that were asked for: what came, and each was answered before the next hundred came.
    assert figures["requests/s offered"] == figures["requests/s served"] == "96"
    assert figures["goodput"] == "100.00%"
    assert figures["left: idle"] == "100.0%"
    assert not any(name.startswith("within") for name in figures)
    assert said.err == ""


def test_what_is_aimed_at_is_told_beside_what_is_late(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--rate", "4000", "--noise", "0.5", "policy=deferred")
    assert simulated(capsys, *words)["within_target"] is None
    aims = simulated(capsys, *words, "target_latency_ms=20")
    assert 0.1 < aims["within_target"] < 1  # type: ignore[operator]
    assert (aims["late"], aims["goodput"]) == (0, 1)  # nobody said when it expires
    main([*BRIEF, *words, "target_latency_ms=20"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "within" in line]
    assert row.split() == ["within", "20", "ms", f"{aims['within_target']:.2%}"]


@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_where_all_is_served_as_much_is_served_as_came(
    arrivals: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(capsys, "--rate", "250", "--requests", "2000", "--arrivals", arrivals)
    assert found["goodput"] == 1
    assert found["served_per_s"] == pytest.approx(found["offered_per_s"], rel=0.01)


def test_a_recording_says_now_and_then_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch(Screen(sys.stderr), "square", 12)
    for tenth in range(120):
        watch.step(tenth / 10, 7 * tenth)
    watch.end()
    assert capsys.readouterr().err.splitlines() == [
        "recording what arrives at square for 12 s",
        "  5 of 12 s, 350 arrivals",
        "  10 of 12 s, 700 arrivals",
    ]


def test_settings_and_flags_are_heeded(capsys: pytest.CaptureFixture[str]) -> None:
    plain = simulated(capsys, "--rate", "4000")
    waits = simulated(capsys, "--rate", "4000", "max_queue_delay_ms=20", "max-batch-size=64")
    assert waits["mean_batch"] > plain["mean_batch"]  # type: ignore[operator]
    assert waits["reasons"] != plain["reasons"]
    quick = simulated(capsys, "--rate", "4000", "--workers", "4", "--slope-ms", "0", "--trip-ms", "0")
    assert quick["p99_ms"] < plain["p99_ms"]  # type: ignore[operator]
    far = simulated(capsys, "--rate", "4000", "--trip-slope-ms", "0.1")
    assert far["p50_ms"] > plain["p50_ms"]  # type: ignore[operator]
    shaky = simulated(capsys, "--rate", "4000", "--trip-noise", "0.5")
    assert shaky["p99_ms"] > plain["p99_ms"]  # type: ignore[operator]
    expires = simulated(capsys, "--rate", "4000", "--expiration-ms", "5")
    assert expires["late"] == 400 and expires["goodput"] == 0  # l(1) alone is 5.05 ms
    model_expires = simulated(capsys, "--rate", "4000", "default_expiration_ms=5")
    assert model_expires["late"] == 400


def test_a_model_that_preserves_order_holds_results(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--rate", "4000", "--workers", "3", "--noise", "0.4")
    free, held = (simulated(capsys, *words, f"preserve_ordering={order}") for order in ("false", "true"))
    assert held["p50_ms"] > free["p50_ms"]  # type: ignore[operator]
    assert held["mean_batch"] == free["mean_batch"]


def test_the_seed_decides(capsys: pytest.CaptureFixture[str]) -> None:
    first = simulated(capsys, "--noise", "0.2", "--arrivals", "bursty")
    assert first == simulated(capsys, "--noise", "0.2", "--arrivals", "bursty", "--seed", "0")
    assert first != simulated(capsys, "--noise", "0.2", "--arrivals", "bursty", "--seed", "1")


def test_a_recorded_trace_is_replayed_once_at_its_own_rate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "trace.txt").write_text("\n".join(str(at / 50) for at in range(101)))
    assert main(["--arrivals", "trace.txt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["offered_per_s"]) == (101, 50)
    assert found["p99_ms"] == pytest.approx(5.05 + 1.02)  # each alone


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--arrivals", "nowhere"], "poisson, bursty, or a file"),
        (["max_batch_size=0"], "must be a whole number, 1 or more"),
        (["preferred_batch_sizes=8,64"], "64 can never be filled, because max_batch_size is 32"),
        (["policy=mine:Mine"], "is not simulated"),
        (["polcy=eager"], "did you mean policy?"),
        (["policy"], "policy=VALUE"),
        (["--record", "trace.txt"], "--model"),
    ],
)
def test_what_makes_no_sense_is_said_so(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err
