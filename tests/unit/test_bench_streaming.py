"""The bench of streams, the parts that compute: workloads, figures, aims, and which rounds are repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import mean
from typing import Any

import host
import pytest
from stepping import document, heard, models, runs, workloads
from stepping.heard import Heard, Sent
from stepping.in_process import BatchEngine, StepperEngine, run
from stepping.runs import Cell, Results
from stepping.systems import SYSTEMS
from stepping.workloads import BURST, FULL, POISSON, Ask, Window

from carpool_worker.model_process.model import SteppingModel, load_model


class Instant:
    """A network that takes no time, and counts what is asked of it."""

    def __init__(self) -> None:
        self.steps, self.rows_max, self.running = 0, 0, 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[Any]:
        self.running += len(prompts)
        self.rows_max = max(self.rows_max, self.running)
        return [None] * len(prompts)

    def step(self, states: Sequence[Any]) -> None:
        self.steps += 1

    def end(self, state: Any) -> None:
        self.running -= 1


class InstantSteps(models.Steps):
    network = Instant


class InstantBatches(models.Batches):
    network = Instant


def heard_of(due_s: float, *read_s: float, way_s: float = 0.001) -> Heard:
    return Heard(Ask(due_s, len(read_s)), 0.0, [at_s - way_s for at_s in read_s], list(read_s))


# --- workloads ---------------------------------------------------------------------------------------------


def test_a_burst_is_that_of_the_post() -> None:
    asks = workloads.asks(BURST, 1000.0, 10.0, 1)
    assert [(ask.due_s, ask.length) for ask in asks] == [(0.0, 8)] * 32
    assert BURST.window(10.0) is None


@pytest.mark.parametrize("workload", POISSON)
def test_arrivals_at_random_want_a_share_of_the_capacity(workload: workloads.Workload) -> None:
    asks = workloads.asks(workload, 4000.0, 500.0, 1)
    assert workload.load is not None
    assert sum(ask.length for ask in asks) / 500.0 == pytest.approx(workload.load * 4000.0, rel=0.03)
    assert all(0 < ask.due_s < 500.0 for ask in asks)
    assert asks != workloads.asks(workload, 4000.0, 500.0, 2)


def test_more_than_can_be_served_is_there_from_the_start() -> None:
    asks = workloads.asks(FULL, 4000.0, 10.0, 1)
    assert sum(ask.length for ask in asks) > 4000.0 * 10.0 + models.SLOTS * models.LENGTH_MAX
    assert {ask.due_s for ask in asks} == {0.0}


def test_lengths_are_geometric() -> None:
    random = Random(3)
    lengths = [workloads.geometric_length(random) for _ in range(50_000)]
    assert mean(lengths) == pytest.approx(workloads.mean_length(), rel=0.02)
    assert (min(lengths), max(lengths)) == (1, models.LENGTH_MAX)
    assert workloads.mean_length() == pytest.approx(31.45, abs=0.01)


# --- what was heard ----------------------------------------------------------------------------------------


def test_figures_of_a_burst() -> None:
    sent = Sent([heard_of(0.0, 0.010, 0.020), heard_of(0.0, 0.012, 0.040)], None, 0.040, {"a": 400.0})
    shown = heard.figures([sent, sent])
    assert shown["ttft_p50_ms"] == pytest.approx(12.0)
    assert shown["gap_p99_ms"] == pytest.approx(28.0)
    assert shown["way_p99_ms"] == pytest.approx(1.0)
    assert shown["tokens_per_s"] == pytest.approx(100.0)
    assert shown["cpu_us"] == {"a": 100.0}


def test_only_what_is_in_the_window_counts() -> None:
    window = Window(1.0, 2.0, 3.0)
    early, late = heard_of(0.5, 0.6, 1.5), heard_of(1.2, 1.8, 2.4)
    never = Heard(Ask(1.9, 5))
    shown = heard.figures([Sent([early, late, never], window, 2.9, {"a": 6.0})])
    assert shown["tokens_per_s"] == pytest.approx(2.0)
    assert shown["ttft_p50_ms"] == pytest.approx(1000.0)  # the one without a token waits until the end
    assert shown["gap_p50_ms"] == pytest.approx(600.0)
    assert shown["cpu_us"] == {"a": 2.0}  # of all tokens until the end of the window


def test_chunks_of_several_tokens_are_read_at_once() -> None:
    one = Heard(Ask(0.0, 3))
    one.read(5_000_000_000, 0.1, 4.95)
    one.read([5_100_000_000, 5_200_000_000], 0.4, 4.95)
    assert one.read_s == [0.1, 0.4, 0.4]
    assert one.emitted_s == pytest.approx([0.05, 0.15, 0.25])


def test_percentile_of_nothing() -> None:
    assert math.isnan(heard.percentile([], 99))
    assert heard.percentile(range(100), 99) == 99


# --- in one process ----------------------------------------------------------------------------------------


def asks_of(*lengths: int) -> list[Ask]:
    return [Ask(0.0, length) for length in lengths]


def test_stepping_fills_slots_as_they_become_free() -> None:
    model = InstantSteps()
    loaded = load_model(model, "cpu")
    assert isinstance(loaded, SteppingModel)
    sent = run(StepperEngine(loaded), asks_of(*[5] * models.SLOTS, *[2] * 4), None)
    assert [len(one.read_s) for one in sent.heard] == [5] * models.SLOTS + [2] * 4
    network = model._network
    assert isinstance(network, Instant)
    assert (network.steps, network.rows_max, network.running) == (7, models.SLOTS, 0)


def test_static_batches_run_to_the_longest() -> None:
    model = InstantBatches()
    model.load("cpu")
    sent = run(BatchEngine(model), asks_of(*[5] * models.SLOTS, 2, 3), None)
    assert [len(one.read_s) for one in sent.heard] == [5] * models.SLOTS + [2, 3]
    network = model._network
    assert isinstance(network, Instant)
    assert network.steps == 5 + 3


def test_a_network_of_gpt2s_shape_gives_each_row_what_it_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"layers": 2, "heads": 3, "width": 48, "vocabulary": 101}.items():
        monkeypatch.setattr(models.Gpt2, name, value)

    def tokens(*prompts: Sequence[int]) -> list[list[int]]:
        network, generated = models.Gpt2(), []
        leaver, *rows = network.begin([[9, 9, 9, 9], *prompts])
        network.end(leaver)  # a row that is not in use is before the others
        for _ in range(6):
            network.step(rows)
            generated.append([int(network._next[row]) for row in rows])
        return [list(of_row) for of_row in zip(*generated, strict=True)]

    one, other = [1, 2, 3, 4], [50, 60, 70, 80]
    together = tokens(one, other)
    assert together == [*tokens(one), *tokens(other)]
    assert together[0] != together[1]


# --- rounds, tables ----------------------------------------------------------------------------------------


def test_what_is_not_done_is_repeated_as_often_again() -> None:
    taken: list[tuple[int, str]] = []
    for turn in host.turns(["a", "b"], 2, lambda item: item == "b" and len(taken) >= 2):
        taken.append(turn)
    assert taken == [(0, "a"), (0, "b"), (1, "a"), (2, "a"), (3, "a")]


def test_disturbed_rounds_count_only_if_there_are_no_others() -> None:
    calm, disturbed = {"stolen": 0.01}, {"stolen": 0.3}
    assert host.usable([disturbed, calm]) == [calm]
    assert host.usable([disturbed]) == [disturbed]


def results_of(**changed: float) -> Results:
    """The same figures for all, but for those of Carpool."""
    results = Results(capacities={"sleeper": 4000.0})
    for workload in (BURST, *POISSON, FULL):
        for system in SYSTEMS:
            figures = dict.fromkeys(document.COLUMNS, 10.0) | {"cpu_us": {"worker": 25.0}, "stolen": 0.0}
            if system.name == "Carpool":
                figures |= changed
            results.rounds[Cell("sleeper", workload.name, system.name)] = [figures]
    return results


def test_aims_are_met_or_not() -> None:
    good = results_of(submit_ms=0.05, ttft_p99_ms=13.0, gap_p99_ms=12.0, tokens_per_s=20.0)
    assert [aim for aim in document.aims(good) if not aim.is_met] == []
    bad = results_of(submit_ms=0.06, ttft_p99_ms=13.1, gap_p99_ms=12.1, tokens_per_s=9.4)
    assert [aim for aim in document.aims(bad) if aim.is_met] == []


def test_figures_of_disturbed_rounds_are_marked() -> None:
    results = results_of()
    cell = Cell("sleeper", "80%", "Carpool")
    results.rounds[cell] = [results.rounds[cell][0] | {"stolen": 0.5}]
    marked = [aim for aim in document.aims(results) if aim.mark == runs.MARK]
    assert {aim.workload for aim in marked} == {"80%"}
    assert f"| Carpool{runs.MARK} |" in document.document(results, 10.0, 3, [])


def test_the_document_has_short_lines_and_the_figures_of_the_post() -> None:
    text = document.document(results_of(), 10.0, 3, ["2 cores."])
    assert max(map(len, text.splitlines())) < 120
    assert "- 2 cores.\n" in text
    assert "| post, queue | 2.681 | 403.1 | 750.3 | 775.6 |" in text
    assert set(document.plots(results_of(ttft_p99_ms=13.0))) == {"streaming_sleeper.svg"}
