"""`carpool demo`: a documentation search on this machine, with measured throughput and checked results.

The main thread supervises the stack, as `carpool up` does; another thread runs the scenario.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from carpool.lifecycle import stop_on_signals
from carpool.logs import configure_logs
from carpool.settings import CarpoolSettings, read_settings
from carpool_cli.demo.measure import WorkerLog
from carpool_cli.demo.scenario import MODELS, Scenario
from carpool_cli.local.embedded import EmbeddedRedisError
from carpool_cli.local.supervisor import (
    POLL_S,
    StackPlan,
    StartError,
    Supervisor,
    can_serve_http,
    can_show_pages,
)
from carpool_cli.local.up import served_line
from carpool_cli.screen import Screen


class DemoSettings(CarpoolSettings):
    """Serve a documentation search on this machine, measure it, check its results, and stop it.

    The demo starts its own Redis, a batcher and workers. One producer sends real queries, each as its own
    request and many at once; then it sends some of them again, one at a time. The demo prints answers and
    figures, and compares a sample of the results with direct calls of the model. Then a small language
    model writes texts, which appear as they are written. At the end, a model hears at many
    microphones where somebody speaks.
    """

    queries: int = Field(5000, ge=1, le=1_000_000, description="number of queries to send")
    in_flight: int = Field(256, ge=1, le=10_000, description="number of requests in flight at once")
    keep: bool = Field(False, description="keep the stack running at the end, until Ctrl-C")


def main(argv: Sequence[str]) -> int:
    """Run the demo. Returns 1 if it found a problem, 130 if it was interrupted."""
    settings = read_settings(DemoSettings, argv, "carpool demo")
    configure_logs("warning", "supervisor")
    stop = stop_on_signals()
    # The models share the cores of this machine: threads of one's matrix products would disturb the others.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    screen = Screen()
    logs = Path(tempfile.mkdtemp(prefix="carpool-demo-"))
    gateway_port = 0 if settings.keep and can_serve_http() else None  # for the commands that are printed
    console_port = 0 if settings.keep and can_show_pages() else None
    supervisor = Supervisor(
        StackPlan(models=MODELS, logs=logs, gateway_port=gateway_port, console_port=console_port)
    )
    scenario = Scenario(supervisor, screen, settings.queries, settings.in_flight, keep=settings.keep)
    try:
        is_finished = _supervise(supervisor, scenario, screen, stop)
    except (StartError, EmbeddedRedisError) as error:
        is_finished = True
        scenario.problems.append(_explain(error, supervisor))
    finally:
        supervisor.stop()
    if not scenario.problems:
        shutil.rmtree(logs, ignore_errors=True)
        return 0 if is_finished else 130
    _show_problems(scenario, screen, logs)
    return 1


def _supervise(supervisor: Supervisor, scenario: Scenario, screen: Screen, stop: threading.Event) -> bool:
    """Supervise the stack during the scenario, with --keep also afterwards. Whether the scenario finished."""
    supervisor.start()
    running = threading.Thread(target=scenario.run, name="scenario", daemon=True)
    running.start()
    while running.is_alive() or (scenario.keep and not scenario.problems):
        if stop.wait(POLL_S):
            break
        for worker in supervisor.run_once():
            screen.print(served_line(worker))
        if supervisor.serving:
            scenario.all_served.set()
    is_finished = not running.is_alive()
    if not is_finished:
        screen.mute()  # the scenario could only report that its stack was stopped
    return is_finished


def _explain(error: Exception, supervisor: Supervisor) -> str:
    """An error, with the last errors in the workers' logs."""
    logs = [WorkerLog(worker.log) for worker in supervisor.workers if worker.log is not None]
    return ": ".join([str(error), *(reason for log in logs if (reason := log.last_error()))])


def _show_problems(scenario: Scenario, screen: Screen, logs: Path) -> None:
    screen.title("The demo failed")
    for problem in scenario.problems:
        screen.print(f"  {problem}")
    screen.print(f"  The logs of the batcher and the workers are in {logs}")
