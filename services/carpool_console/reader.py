"""The thread that reads Redis for all who look, about once a second while anybody does.

A page asks for what it shows, and thereby says that somebody looks. It gets what was read last, unless that
is old because nobody looked: then it waits for a moment. While Redis is away, the last figures remain, with
their age and the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from carpool.errors import UnavailableError
from carpool.figures import figures
from carpool.keys import NodesKeys
from carpool.lifecycle import Loop
from carpool.shown import name_of
from carpool.store.connection import CommandError
from carpool.store.nodes import NodeStore
from carpool.store.workers import WorkerState
from carpool.wire.nodes import Snapshot
from carpool_console.history import ModelHistory
from carpool_console.links import Links
from carpool_console.reading import (
    UNREAD,
    ModelDetails,
    ModelReading,
    ModelsReader,
    Reading,
    RedisState,
    read_details,
    read_workers,
)
from carpool_console.trouble import Facts, Row, row_of, sorted_rows

INTERVAL_S: Final = 1.0
INTERVAL_S_MIN: Final = 0.1  # from one reading to the next, however many things are looked at
LOOKED_S: Final = 10.0  # after the last look, nothing is read any more
FRESH_S: Final = 3.0  # figures that are older are waited for ...
FRESH_WAIT_S: Final = 2.0  # ... for as long
DETAIL_WAIT_S: Final = 1.5  # for the batcher of a model at which nobody looked before
DETAILS_MAX: Final = 16  # models whose details are read
FORGOTTEN_S: Final = 600.0  # the history of a model that is gone
_IDLE_S: Final = 5.0  # how often the loop shows that it runs


class Overview(NamedTuple):
    """All models, the worst first. `read_at_s` is monotonic, 0 if nothing was read yet; `error`: why there
    is nothing newer, and whether Redis answers all the same."""

    rows: Sequence[Row] = ()
    redis: RedisState | None = None
    read_at_s: float = 0.0
    at_us: int = 0  # on Redis's clock
    left_out: int = 0
    error: str = ""
    answers: bool = True

    def row(self, model: str) -> Row | None:
        """The row of a model, if there is one of this name."""
        return next((row for row in self.rows if row.model == model), None)


class View(NamedTuple):
    """What was read last. `workers`: of all models, or of those that are looked at; `nodes`: None if nobody
    looks at them, or they may not be read, for the reason in `nodes_problem`."""

    overview: Overview = Overview()
    workers: Mapping[str, Sequence[WorkerState]] = {}
    has_all_workers: bool = False
    details: Mapping[str, ModelDetails] = {}
    nodes: Snapshot | None = None
    nodes_problem: str = ""


class _Looks:
    """Who looks at what: each kind of thing, by when somebody looked last."""

    def __init__(self) -> None:
        self._looked_s: dict[str, float] = {}

    def look(self, *things: str) -> bool:
        """Somebody looks at these. Whether somebody did before, at all of them."""
        were_watched, now_s = all(map(self.is_watched, things)), time.monotonic()
        for thing in things:
            self._looked_s.pop(thing, None)
            self._looked_s[thing] = now_s
        return were_watched

    def is_watched(self, thing: str) -> bool:
        """Whether somebody looked lately."""
        return time.monotonic() - self._looked_s.get(thing, -LOOKED_S) < LOOKED_S

    def watched(self, prefix: str, number_max: int) -> list[str]:
        """What is looked at and begins so, without that beginning; the latest ones, if there are many."""
        for thing in [thing for thing in self._looked_s if not self.is_watched(thing)]:
            del self._looked_s[thing]
        found = [thing for thing in self._looked_s if thing.startswith(prefix)]
        return [thing.removeprefix(prefix) for thing in found[-number_max:]]


_ALL: Final = "models"
_WORKERS: Final = "workers"
_NODES: Final = "nodes"
_MODEL: Final = "model "


class SharedReader:
    """What is read is shared by all threads that ask. `start` begins, `stop` ends."""

    def __init__(self, url: str, prefix: str, name: str, on_error: Callable[[Exception], None]) -> None:
        self._prefix = prefix
        self._links = Links(url, name)
        self._models = ModelsReader(self._links, prefix)
        self._changed = threading.Condition()
        self._looks = _Looks()
        self._view = View()
        self._histories: dict[str, tuple[float, ModelHistory]] = {}  # with the time when it was added to last
        self._is_stopping = False
        self._loop = Loop("reader", self._run_once, on_error)

    def start(self) -> None:
        """Start the thread, which waits until somebody looks."""
        self._loop.start()

    def stop(self) -> None:
        """End the thread."""
        self._loop.stop()
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._loop.join(FRESH_WAIT_S):
            self._links.close()

    @property
    def silent_s(self) -> float:
        """For how long the loop has not come round; infinity if its thread has ended."""
        return self._loop.silent_s if self._loop.alive else float("inf")

    @property
    def error(self) -> str:
        """Why Redis could not be read when it was tried last."""
        return self._view.overview.error

    def look(self, model: str = "", *, workers: bool = False, nodes: bool = False) -> View:
        """All models; the details of one; workers; nodes. Waits for a moment if what was read is
        old, or lacks what is asked for."""
        is_known = not self._view.overview.read_at_s or self._view.overview.row(model) is not None
        wanted = {_ALL: True, _MODEL + model: bool(model) and is_known, _WORKERS: workers, _NODES: nodes}
        things = [thing for thing, is_wanted in wanted.items() if is_wanted]
        with self._changed:
            is_first = not self._looks.look(*things)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has(model, workers, nodes), FRESH_WAIT_S)
            if model and is_first:
                self._changed.wait_for(lambda: self._has_detail(model), DETAIL_WAIT_S)
            return self._view

    def overview(self) -> Overview:
        """All models."""
        return self.look().overview

    def refresh(self) -> None:
        """Wait until all has been read that is there now: an action should be seen on the next page."""
        with self._changed:
            before_s = time.monotonic()
            self._looks.look(_ALL)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._view.overview.read_at_s > before_s, FRESH_WAIT_S)

    def _has(self, model: str, workers: bool, nodes: bool) -> bool:
        view = self._view
        if view.overview.error:
            return True
        return (
            time.monotonic() - view.overview.read_at_s < FRESH_S
            and (not workers or view.has_all_workers)
            and (not nodes or view.nodes is not None or bool(view.nodes_problem))
            and (not model or model in view.details or view.overview.row(model) is None)
        )

    def _has_detail(self, model: str) -> bool:
        row, details = self._view.overview.row(model), self._view.details.get(model)
        is_to_come = row is not None and row.figures.batcher and details is not None and not details.problem
        return not is_to_come or bool(details and details.detail)

    # --- on the thread -------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        with self._changed:
            if not self._changed.wait_for(self._has_work, _IDLE_S) or self._is_stopping:
                return
            models = self._looks.watched(_MODEL, DETAILS_MAX)
            asks_workers, asks_nodes = map(self._looks.is_watched, (_WORKERS, _NODES))
        began_s = time.monotonic()
        try:
            view = self._read(models, asks_workers, asks_nodes, began_s)
        except (UnavailableError, CommandError) as error:
            self._publish_failure(str(error), answers=isinstance(error, CommandError))
            raise  # the loop tries again after a pause, and reports it
        except Exception as error:
            self._links.close()  # replies may be outstanding
            self._publish_failure(
                f"a mistake of the console, {name_of(error)}: its log has more", answers=True
            )
            raise
        self._publish(view)
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping, INTERVAL_S_MIN)
            left_s = INTERVAL_S - (time.monotonic() - began_s)
            self._changed.wait_for(lambda: self._is_stopping or self._lacks(models), max(0.0, left_s))

    def _has_work(self) -> bool:
        return self._is_stopping or self._looks.is_watched(_ALL)

    def _lacks(self, models: Sequence[str]) -> bool:
        """Whether somebody looks at what nobody looked at before: it is read at once."""
        view = self._view
        return (
            (self._looks.is_watched(_WORKERS) and not view.has_all_workers)
            or (self._looks.is_watched(_NODES) and view.nodes is None and not view.nodes_problem)
            or not set(self._looks.watched(_MODEL, DETAILS_MAX)).issubset(models)
        )

    def _publish_failure(self, error: str, *, answers: bool) -> None:
        overview = self._view.overview._replace(error=error, answers=answers)
        self._publish(self._view._replace(overview=overview))

    def _publish(self, view: View) -> None:
        with self._changed:
            self._view = view
            self._changed.notify_all()

    def _read(self, models: Sequence[str], asks_workers: bool, asks_nodes: bool, at_s: float) -> View:
        reading = self._models.read()
        known = [model for model in models if model in reading.models]
        with_workers = reading.models if asks_workers else {name: reading.models[name] for name in known}
        nodes, problem = self._read_nodes() if asks_nodes else (None, "")
        return View(
            self._digested(reading, at_s),
            read_workers(self._links, self._prefix, with_workers),
            asks_workers,
            read_details(self._links, self._prefix, known),
            nodes,
            problem,
        )

    def _read_nodes(self) -> tuple[Snapshot | None, str]:
        link = self._links.of(NodesKeys(self._prefix).wanted)
        try:
            return NodeStore(link, self._prefix).snapshot(), ""
        except CommandError as error:
            return None, str(error)

    def _digested(self, reading: Reading, at_s: float) -> Overview:
        rows = [self._row(name, one, reading.at_us, at_s) for name, one in reading.models.items()]
        for name, (added_s, _) in list(self._histories.items()):
            if at_s - added_s > FORGOTTEN_S:
                del self._histories[name]
        return Overview(sorted_rows(rows), reading.redis, at_s, reading.at_us, reading.left_out)

    def _row(self, name: str, read: ModelReading, at_us: int, at_s: float) -> Row:
        """The row of a model. One whose report makes no sense does not hide the others."""
        try:
            return row_of(self._facts(name, read, at_us, at_s))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            self._histories.pop(name, None)
            return row_of(Facts(figures(name, None, UNREAD), error=f"its report makes no sense: {error}"))

    def _facts(self, name: str, read: ModelReading, at_us: int, at_s: float) -> Facts:
        _, history = self._histories.get(name, (0.0, None))
        if read.error:
            return Facts(figures(name, None, read.sample), error=read.error)
        history = history or ModelHistory(name)
        history.add(at_s, read.sample)
        self._histories[name] = (at_s, history)
        newest_ms = read.dead_newest_ms
        return Facts(
            history.figures,
            history.minute,
            history.in_per_s,
            draining=len(read.members.draining),
            dead_newest_s=None if newest_ms is None else max(0.0, at_us / 1e6 - newest_ms / 1e3),
            points=tuple(history.points),
        )
