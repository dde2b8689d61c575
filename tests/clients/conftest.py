"""Fixtures for tests of producers in other languages: a stack, two ways to connect, and compiled programs."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Final, NamedTuple, NoReturn

import pytest
from redis import Redis

from carpool_cli.local.embedded import EmbeddedRedis
from carpool_cli.roles import rules
from clients.languages import LANGUAGES, CommandFailedError, Language, environment, missing
from support.stack import Stack

PASSWORD: Final = secrets.token_urlsafe(32)
RUN_S: Final = 30.0
REQUIRED: Final = "CARPOOL_CLIENTS_REQUIRED"

ROOT: Final = Path(__file__).parents[2]


class Documented(NamedTuple):
    """A model in docs/models.md, and the program that uses it."""

    model: str
    program: str


def _stateful() -> Documented:
    _, _, rest = (ROOT / "docs" / "models.md").read_text("utf-8").partition("\n## Models that keep a state\n")
    (block,) = re.findall(r"^    import numpy.*?(?=^\S)", rest, re.MULTILINE | re.DOTALL)
    model, with_, program = dedent(block).partition("with ")
    return Documented(model, with_ + program)


STATEFUL: Final = _stateful()

Build = Callable[[Language, Path], list[str]]


@pytest.fixture(params=list(LANGUAGES.values()), ids=list(LANGUAGES))
def language(request: pytest.FixtureRequest) -> Language:
    """Each language in turn. The test is skipped where part of the toolchain does not work."""
    language: Language = request.param
    reason = missing(language)
    if reason is not None:
        skip_or_fail(language, reason)
    return language


def skip_or_fail(language: Language, reason: str) -> NoReturn:
    """Skip the test, or fail it where CARPOOL_CLIENTS_REQUIRED names the language."""
    if language.name in os.environ.get(REQUIRED, "").split():
        pytest.fail(f"{reason} ({REQUIRED} names this language)")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Returns the command that runs a source; each source is compiled once."""

    @cache
    def built(language: Language, source: Path) -> list[str]:
        try:
            return language.build(source, tmp_path_factory.mktemp(language.name))
        except CommandFailedError as error:
            return pytest.fail(str(error))

    return built


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with the models of the documents and programs; `away` has no worker any more."""
    server = EmbeddedRedis(append_only=False)
    url = f"redis://services:{PASSWORD}@127.0.0.1:{server.port}/0"
    variables = {"CARPOOL_REDIS_URL": url}
    environment = {"batcher": variables, "worker": variables}
    with Stack(tmp_path_factory.mktemp("stack"), server=server, environment=environment) as stack:
        with stack.redis as default:
            default.acl_setuser(
                "services", enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"], categories=["+@all"]
            )
        stack.redis = Redis.from_url(url, protocol=2, socket_timeout=30)
        stack.batcher()
        total = tmp_path_factory.mktemp("models") / "total.py"
        total.write_text(STATEFUL.model, encoding="utf-8")
        models = {
            "total": f"{total}:Total",
            "square": "square",
            "countdown": "stepping.py:countdown",
            **{name.lower(): f"polyglot.py:{name}" for name in ("Transpose", "Vectors", "Away", "writer")},
        }
        workers = {name: stack.worker(f"{name}={spec}", ready=False) for name, spec in models.items()}
        for name, worker in workers.items():
            worker.wait_for("worker ready")
            stack.wait_for_model(name)
        workers["away"].terminate()
        yield stack


@pytest.fixture
def open_url(live: Stack) -> str:
    """A URL without a user."""
    return live.url


@pytest.fixture
def locked_url(live: Stack) -> Iterator[str]:
    """A URL with a user that has the permissions of `carpool acl` for a producer. Others cannot connect."""
    selectors = int(live.server.version.split(".")[0]) >= 7
    granted = rules("producer", selectors=selectors).split()
    live.redis.execute_command("ACL", "SETUSER", "producer", "reset", "on", f">{PASSWORD}", *granted)
    live.redis.execute_command("ACL", "SETUSER", "default", "off")
    yield f"redis://producer:{PASSWORD}@127.0.0.1:{live.server.port}/0"
    live.redis.execute_command("ACL", "SETUSER", "default", "on")


def output(command: list[str], **variables: str) -> str:
    """Run a program, and return its output. Fails if the program fails or prints errors."""
    done = subprocess.run(
        command,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
