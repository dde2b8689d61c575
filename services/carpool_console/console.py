"""What all pages share: the reader, connections for actions, users, sessions, templates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any, Final, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from carpool.address import without_password
from carpool.cluster import is_cluster
from carpool.errors import UnavailableError
from carpool.settings import ConsoleSettings
from carpool.shown import printable
from carpool.store.connection import CommandError, Link
from carpool_console import formats
from carpool_console.dead_indexes import DeadIndexes
from carpool_console.jobs import Jobs
from carpool_console.proxies import Proxies
from carpool_console.reader import SharedReader
from carpool_console.sessions import Attempts, Sessions
from carpool_console.users import Users

TEMPLATES: Final = Path(__file__).parent / "templates"
LINKS_MAX: Final = 8  # connections that are kept for later
JOBS_END_S: Final = 5.0  # in which jobs stop when the process ends
_TIMEOUT_S: Final = 5.0


class Page(NamedTuple):
    """An entry of a navigation. `path`: of a page about a model what follows `/models/NAME/`."""

    path: str
    title: str


class Exact(str):
    """A text that templates write as it is, escaped for HTML: the value of a field, not for people."""

    __slots__ = ()


class Console:
    """What handlers find as `request.app.state.console`. Any thread may use it."""

    def __init__(self, settings: ConsoleSettings, users: Users, reader: SharedReader, name: str) -> None:
        self.settings = settings
        self.prefix = settings.prefix
        self.users = users
        self.reader = reader
        self.sessions = Sessions(settings.session_s)
        self.attempts = Attempts()
        self.proxies = Proxies(settings.trusted_proxy, settings.trusted_header)
        self.navigation: tuple[Page, ...] = ()
        self.model_links: tuple[Page, ...] = ()
        self.static_version = ""
        self.cookie = f"carpool_console_{settings.port}"  # browsers keep cookies of all ports together
        self._name = name
        self.dead = DeadIndexes(self.link, settings.prefix)
        self.jobs = Jobs(_explained)
        self._links: LifoQueue[Link] = LifoQueue(LINKS_MAX)
        self._environment = _environment()

    @contextmanager
    def link(self, key: str = "") -> Iterator[Link]:
        """A connection to Redis, for one thread. `key`: one of those it is for, which a cluster needs.

        Its methods raise LinkError and CommandError; the page then says so.
        """
        link = self._take_link(key)
        try:
            yield link
        except BaseException:
            link.close()  # replies may be outstanding
            raise
        if is_cluster(self.settings.redis_url) or self._links.full():
            link.close()
        else:
            self._links.put(link)

    def _take_link(self, key: str) -> Link:
        try:
            return self._links.get_nowait()
        except Empty:
            return Link(self.settings.redis_url, name=self._name, timeout_s=_TIMEOUT_S, key=key)

    def html(self, template: str, context: Mapping[str, Any]) -> str:
        """A template filled in. All strings are escaped, and control characters in them are shown."""
        return self._environment.get_template(template).render(
            navigation=self.navigation,
            model_links=self.model_links,
            static_version=self.static_version,
            redis_url=without_password(self.settings.redis_url),
            prefix=self.prefix,
            read_only=self.settings.read_only,
            now_s=time.monotonic(),
            **context,
        )

    def close(self) -> None:
        """Have jobs stop, and close all connections that are not in use."""
        self.jobs.close(JOBS_END_S)
        self.dead.close()
        while not self._links.empty():
            self._links.get().close()


def _explained(error: Exception) -> str | None:
    """Why a job failed, for people; None for what no job should raise."""
    if isinstance(error, UnavailableError):
        return f"Redis does not answer: {error.detail}. What was done until then is done"
    if isinstance(error, CommandError):
        return f"Redis refused a command: {error}"
    return None


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        finalize=_shown,
    )
    environment.filters.update(
        {
            "number": formats.number,
            "rate": formats.rate,
            "percent": formats.percent,
            "duration": formats.duration,
            "milliseconds": formats.milliseconds,
            "bytes": formats.size,
            "plural": formats.plural,
            "utc": formats.utc,
            "iso": formats.iso,
            "exact": Exact,
        }
    )
    return environment


def _shown(value: Any) -> Any:
    """What a template writes for a value: characters that would be obeyed, or not be seen, are escaped."""
    if isinstance(value, str) and not isinstance(value, (Markup, Exact)):
        return printable(value)
    return value
