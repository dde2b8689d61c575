"""The indexes of dead letters of all models that somebody looks at, and the thread that builds them.

A page that looks at a model reads what is new, and builds for a moment; the thread does the rest, with
pauses, so that Redis is busy with it for a small part of the time. An index that nobody looked at for a while
is forgotten.

Why: docs/decisions/0117.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from carpool.keys import Keys
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.dead_pages import LetterId, read_page
from carpool_console.dead_index import DeadIndex

INDEXES_MAX: Final = 256
LETTERS_MAX: Final = 400_000  # of all indexes together, about 250 MB; those looked at least recently go first
LOOK_S: Final = 0.03  # in which a page builds
IDLE_S_MAX: Final = 600.0
# Between two times that all letters of a model are read again: so long, and for each letter.
CHECK_S: Final = 5.0
CHECK_S_PER_LETTER: Final = 0.0005
_BUSY_SHARE: Final = 0.2  # of the time, in which the thread reads
_RETRY_S: Final = 1.0

OpenLink = Callable[[str], AbstractContextManager[Link]]
"""A connection for the time of a `with`, to the server that has a key."""


class _Kept:
    """An index, and what belongs to it. `lock` guards both."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.index = DeadIndex()
        self.looked_s = time.monotonic()
        self.checked_s = -math.inf
        self.failed_s = -math.inf  # when a page could not read it, and why
        self.failure = ""


class DeadIndexes:
    """For all threads."""

    def __init__(self, open_link: OpenLink, prefix: str) -> None:
        self._open_link = open_link
        self._prefix = prefix
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._work = threading.Event()  # there may be an index to build
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def look(self, model: str, within_s: float = LOOK_S) -> Iterator[DeadIndex]:
        """The index of a model, with what is new, built for at most so long; no other thread has it then.

        Raises LinkError and CommandError. A thread that waited for another one, which Redis did not answer,
        does not try it as well: else pages would wait in turn, and take the threads of all others.
        """
        kept, asked_s = self._of(model), time.monotonic()
        with kept.lock:
            if kept.failed_s >= asked_s:
                raise LinkError(kept.failure)
            try:
                with self._open_link(Keys(model, self._prefix).dead) as link:
                    self._build(link, model, kept, within_s)
            except LinkError as error:
                kept.failed_s, kept.failure = time.monotonic(), error.detail
                raise
            if not kept.index.is_settled:
                self._have_built()
            yield kept.index

    def discard(self, model: str, letter_id: LetterId) -> None:
        """This letter was sent again or dropped, or is gone."""
        with self._lock:
            kept = self._kept.get(model)
        if kept is not None:
            with kept.lock:
                kept.index.discard(letter_id)

    def _of(self, model: str) -> _Kept:
        with self._lock:
            kept = self._kept.pop(model, None) or _Kept()
            self._kept[model] = kept  # the last one is that which was looked at last
            kept.looked_s = time.monotonic()
            letters = sum(len(one.index) for one in self._kept.values())
            for name in list(self._kept)[:-1]:
                if len(self._kept) <= INDEXES_MAX and letters <= LETTERS_MAX:
                    break
                letters -= len(self._kept.pop(name).index)
            return kept

    def _build(self, link: Link, model: str, kept: _Kept, within_s: float) -> None:
        """Read pages, one at least, until all is read or the time has passed."""
        until_s = time.monotonic() + within_s
        index, keys = kept.index, Keys(model, self._prefix)
        while True:
            of = index.next_range()
            index.take(of, read_page(link, keys, of))
            now_s = time.monotonic()
            if index.must_check and now_s > kept.checked_s + CHECK_S + CHECK_S_PER_LETTER * len(index):
                kept.checked_s = now_s
                index.check()
            if index.is_settled or now_s > until_s:
                return

    # --- the thread ----------------------------------------------------------------------------------------

    def _have_built(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="dead-indexes", daemon=True)
                self._thread.start()
        self._work.set()

    def _run(self) -> None:
        while True:
            self._work.wait()
            if self._closing.is_set():
                return
            self._work.clear()
            began_s = time.thread_time()  # Redis takes less for a page than this thread
            try:
                if not self._build_all():
                    self._work.set()
                pause_s = (time.thread_time() - began_s) * (1 / _BUSY_SHARE - 1)
            except (LinkError, CommandError):  # pages that look say so
                self._work.set()
                pause_s = _RETRY_S
            self._closing.wait(min(pause_s, _RETRY_S))

    def _build_all(self) -> bool:
        """Read a page of each index that is not complete. Returns whether all are."""
        with self._lock:
            now_s = time.monotonic()
            for name, kept in list(self._kept.items()):
                if now_s - kept.looked_s > IDLE_S_MAX:
                    del self._kept[name]
            unread = [(name, kept) for name, kept in self._kept.items() if not kept.index.is_settled]
        for name, kept in unread:
            with kept.lock, self._open_link(Keys(name, self._prefix).dead) as link:
                self._build(link, name, kept, 0.0)
        return all(kept.index.is_settled for _, kept in unread)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._work.set()
