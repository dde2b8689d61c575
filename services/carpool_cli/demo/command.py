"""`carpool demo`: search in the documentation on this machine, request by request, measured and checked.

The main thread supervises the stack, as `carpool up` does; another runs `story`.
"""

from __future__ import annotations

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
from carpool_cli.demo.story import MODELS, Story
from carpool_cli.local.embedded import EmbeddedRedisError
from carpool_cli.local.supervisor import POLL_S, Plan, StartError, Supervisor
from carpool_cli.local.up import served
from carpool_cli.screen import Screen


class DemoSettings(CarpoolSettings):
    """Search in the documentation on this machine: measured, checked, and gone when it ends.

    Starts a Redis of its own, a batcher and workers, sends real queries as single requests from one producer,
    and then some of them one at a time; shows answers and figures, and compares a sample with direct
    computation.
    """

    queries: int = Field(5000, ge=1, le=1_000_000, description="how many to send")
    in_flight: int = Field(256, ge=1, le=10_000, description="how many of them may be under way at once")
    keep: bool = Field(False, description="leave the stack up at the end, until Ctrl-C")


def main(argv: Sequence[str]) -> int:
    """Tell the story. 1 if anything in it was wrong, 130 if it was cut short."""
    settings = read_settings(DemoSettings, argv, "carpool demo")
    configure_logs("warning", "supervisor")
    stop = stop_on_signals()
    screen = Screen()
    logs = Path(tempfile.mkdtemp(prefix="carpool-demo-"))
    supervisor = Supervisor(Plan(models=MODELS, logs=logs))
    story = Story(supervisor, screen, settings.queries, settings.in_flight, keep=settings.keep)
    try:
        told = _supervise(supervisor, story, screen, stop)
    except (StartError, EmbeddedRedisError) as error:
        told = True
        story.problems.append(_why(error, supervisor))
    finally:
        supervisor.stop()
    if not story.problems:
        shutil.rmtree(logs, ignore_errors=True)
        return 0 if told else 130
    _show_problems(story, screen, logs)
    return 1


def _supervise(supervisor: Supervisor, story: Story, screen: Screen, stop: threading.Event) -> bool:
    """Keep the stack alive while the story is told, and on if it is to be kept. Whether all was told."""
    supervisor.start()
    telling = threading.Thread(target=story.tell, name="story", daemon=True)
    telling.start()
    while telling.is_alive() or (story.keep and not story.problems):
        if stop.wait(POLL_S):
            break
        for worker in supervisor.run_once():
            screen.say(served(worker, 1))
        if supervisor.serving:
            story.served.set()
    told = not telling.is_alive()
    if not told:
        screen.hush()  # what else it has to say is only that the stack is gone
    return told


def _why(error: Exception, supervisor: Supervisor) -> str:
    """An error, with what the workers' logs say of it."""
    logs = [WorkerLog(worker.log) for worker in supervisor.workers if worker.log is not None]
    return ": ".join([str(error), *(reason for log in logs if (reason := log.last_error()))])


def _show_problems(story: Story, screen: Screen, logs: Path) -> None:
    screen.title("Something is wrong")
    for problem in story.problems:
        screen.say(f"  {problem}")
    screen.say(f"  The services' logs are in {logs}")
