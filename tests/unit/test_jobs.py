"""Jobs of the operators' page: watched, stopped, limited, and what becomes of those that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from carpool_console.jobs import KEPT_MAX, RUNNING_MAX, Job, JobFailedError, Jobs, TooManyJobsError
from support.waiting import wait_until


def explain(error: Exception) -> str | None:
    return str(error) if isinstance(error, ValueError) else None


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    started = Jobs(explain)
    yield started
    started.close(10.0)


def until_stopped(job: Job) -> str:
    done = 0
    while not job.is_stopping:
        done += 1
        job.tell("works", done, 100)
        job.pause(0.001)
    return f"stopped after {done}"


def ended(job: Job) -> None:
    wait_until(lambda: not job.state.is_running, description="the job has ended")


def test_job_is_watched_and_stopped(jobs: Jobs) -> None:
    job = jobs.start("counts", "m", "ann", until_stopped)
    wait_until(lambda: job.state.done > 2, description="it counts")
    assert (job.state.state, job.state.total, job.state.who) == ("running", 100, "ann")
    found = jobs.get(job.id)
    assert found is job and jobs.get("unknown") is None
    job.stop()
    ended(job)
    assert job.state.state == "stopped" and job.state.text.startswith("stopped after")
    assert jobs.all()[0].id == job.id


def test_failures_are_explained_and_defects_are_named_without_their_texts(jobs: Jobs) -> None:
    def fail(error: Exception) -> Job:
        def work(_: Job) -> str:
            raise error

        job = jobs.start("fails", "m", "ann", work)
        ended(job)
        return job

    assert fail(ValueError("no such model")).state.text == "no such model"
    assert fail(JobFailedError("no node has it")).state.text == "no node has it"
    state = fail(KeyError("secret")).state
    assert state.state == "failed" and "KeyError" in state.text and "secret" not in state.text


def test_jobs_are_limited(jobs: Jobs) -> None:
    running = [jobs.start("counts", f"m{number}", "ann", until_stopped) for number in range(RUNNING_MAX)]
    with pytest.raises(TooManyJobsError, match="of m0, runs already"):
        jobs.start("counts", "m0", "ben", until_stopped)
    with pytest.raises(TooManyJobsError, match="jobs run already"):
        jobs.start("counts", "m", "ben", until_stopped)
    for job in running:
        job.stop()
    for job in running:
        ended(job)
    for _ in range(KEPT_MAX + 5):
        ended(jobs.start("ends", "m", "ann", lambda job: "done"))
    assert len(jobs.all()) <= KEPT_MAX + 1


def test_close_stops_what_runs_and_begins_nothing() -> None:
    jobs = Jobs(explain)
    job = jobs.start("counts", "m", "ann", until_stopped)
    jobs.close(10.0)
    assert job.state.state == "stopped"
    assert not any(thread.name == f"job-{job.id}" for thread in threading.enumerate())
    with pytest.raises(TooManyJobsError):
        jobs.start("counts", "m", "ann", until_stopped)
