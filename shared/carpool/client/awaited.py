"""Requests without a result. Each result, and each chunk, goes to the sink of its request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from carpool.client.entries import OutgoingEntry
from carpool.client.sinks import Envelope, Sink
from carpool.client.timeouts import Timeouts
from carpool.errors import (
    OK,
    CarpoolError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    UnconfirmedError,
)
from carpool.messages.results import ResultColumns
from carpool.wire.results import check_envelope, columns_of, decode_results

_LOG: Final = logging.getLogger("carpool.client")
_WARNINGS_LOGGED_MAX: Final = 100


class AwaitedRequests:
    """The requests that have no result, by correlation ID, and what gives them one: a result or an error.

    `entries` has the entry of each; the entry has the target that its sink needs. The sender of a request
    puts it into both. An entry's timeout is stopped when none of its requests is awaited any more.

    `on_unusable` is called with the correlation ID and the target of a request that failed here because of
    one of its chunks or results: it may continue, and is to be removed and withdrawn.
    """

    def __init__(self, on_unusable: Callable[[str, Any], None]) -> None:
        self.entries: dict[str, OutgoingEntry] = {}
        self.late_results = 0  # that nobody awaited any more, of successful requests
        self.malformed_results = 0  # somebody else wrote them, or they were damaged
        self._on_unusable = on_unusable
        self._logged: set[str] = set()  # the warnings

    def __len__(self) -> int:
        return len(self.entries)

    def entries_as_sent(self) -> list[OutgoingEntry]:
        """The entry of each request, once, in the order in which they were sent."""
        return list(dict.fromkeys(self.entries.values()))

    def on_results(self, flat: Sequence[bytes]) -> bool:
        """Results and chunks from an entry of a reply stream. Returns whether there were chunks.

        Results that are no longer wanted are only counted, and such chunks are ignored. What is malformed
        concerns only itself.
        """
        has_chunks = False
        for name, packed in zip(flat[::2], flat[1::2], strict=True):
            if name not in (b"columns", b"results"):
                continue
            try:
                elements = decode_results(packed)
            except InvalidArgumentError:
                self.malformed_results += 1
                continue
            for element in elements:
                try:
                    has_chunks |= self._on_element(element, is_columns=name == b"columns")
                except InvalidArgumentError as error:
                    self._on_malformed(element, error.detail)
        return has_chunks

    def _on_element(self, element: Any, *, is_columns: bool) -> bool:
        """Whether it is a chunk. Raises InvalidArgumentError if it is malformed, before anything happens."""
        if is_columns:
            self._on_columns(columns_of(element))
            return False
        check_envelope(element)
        if element["final"]:
            self._on_result(element)
            return False
        self._on_chunk(element)
        return True

    def _on_malformed(self, element: Any, reason: str) -> None:
        """Fail the request that it names, if it does."""
        self.malformed_results += 1
        named = element.get("correlation_id") if type(element) is dict else None
        if type(named) is str and (entry := self.entries.get(named)) is not None:
            target = entry.awaited[named]
            error = InternalError(f"its result is malformed: {reason}", correlation_id=named)
            entry.sink.fail(target, error)
            self._on_unusable(named, target)

    def _on_columns(self, columns: ResultColumns) -> None:
        ids, pop = columns.correlation_ids, self.entries.pop
        entries = [pop(correlation_id, None) for correlation_id in ids]
        first = entries[0]
        if first is not None and entries.count(first) == len(entries):
            targets = [first.awaited.pop(correlation_id) for correlation_id in ids]
            first.sink.put_columns(targets, columns)
            if not first.awaited:
                Timeouts.stop(first)
            return
        by_sink: dict[Sink, dict[int, Any]] = {}  # the target of each result, by its position
        for at, entry in enumerate(entries):
            if entry is None:
                self.late_results += 1
            else:
                by_sink.setdefault(entry.sink, {})[at] = self._pop_target(entry, ids[at])
        for sink, found in by_sink.items():
            sink.put_columns(
                list(found.values()), columns if len(found) == len(ids) else columns.select(list(found))
            )

    def _on_chunk(self, envelope: Envelope) -> None:
        correlation_id = envelope["correlation_id"]
        entry = self.entries.get(correlation_id)
        if entry is None or not entry.sink.takes_chunks:
            return
        target = entry.awaited[correlation_id]
        try:
            entry.sink.put_chunk(target, envelope)
        except CarpoolError as error:
            entry.sink.fail(target, error)
            self._on_unusable(correlation_id, target)

    def _on_result(self, envelope: Envelope) -> None:
        correlation_id = envelope["correlation_id"]
        if "warnings" in envelope:
            self._log_warnings(envelope["warnings"])
        entry = self.entries.pop(correlation_id, None)
        if entry is None:
            self.late_results += envelope["status"] == OK
        else:
            entry.sink.put(self._pop_target(entry, correlation_id), envelope)

    def _log_warnings(self, sentences: Any) -> None:
        """Log what a result says about its request, each sentence once."""
        for sentence in sentences if type(sentences) is list else ():
            text = f"{sentence!s:.200}"
            if text not in self._logged and len(self._logged) < _WARNINGS_LOGGED_MAX:
                self._logged.add(text)
                _LOG.warning("a request was sent with a mistake: %s", text)

    def _pop_target(self, entry: OutgoingEntry, correlation_id: str) -> Any:
        """Remove a request that has its result from its entry; return its target."""
        target = entry.awaited.pop(correlation_id)
        if not entry.awaited:
            Timeouts.stop(entry)
            entry.runs.clear()
        return target

    def fail(self, entry: OutgoingEntry, error: CarpoolError) -> None:
        """Fail all requests of an entry that have no result. It will not be sent: its bodies are dropped."""
        Timeouts.stop(entry)
        awaited, entry.awaited = entry.awaited, {}
        entry.runs.clear()
        for correlation_id, target in awaited.items():
            del self.entries[correlation_id]
            entry.sink.fail(target, type(error)(error.detail, correlation_id=correlation_id))

    def fail_all(self, detail: str) -> None:
        """Fail all requests: no result of them is read any more."""
        for entry in set(self.entries.values()):
            self.fail(entry, UnconfirmedError(detail) if entry.sent else UnavailableError(detail))

    def rename(self, entry: OutgoingEntry, names: Mapping[str, str]) -> None:
        """Give requests of an entry other correlation IDs: `names` has these by their present ones. Of this
        entry, only these requests are sent from now on.
        """
        entry.rename(names)
        for old, new in names.items():
            del self.entries[old]
            self.entries[new] = entry

    def remove(self, correlation_id: str, target: Any) -> OutgoingEntry | None:
        """Remove a request, if it still has this target; return its entry."""
        entry = self.entries.get(correlation_id)
        if entry is None or entry.awaited[correlation_id] is not target:
            return None
        del self.entries[correlation_id]
        self._pop_target(entry, correlation_id)
        return entry

    def remove_all(self, sink: Sink) -> Iterator[tuple[OutgoingEntry, Iterable[str]]]:
        """Remove the requests whose results would go to this sink; yield each entry, with their IDs."""
        for entry in {entry for entry in self.entries.values() if entry.sink is sink}:
            Timeouts.stop(entry)
            awaited, entry.awaited = entry.awaited, {}
            for correlation_id in awaited:
                del self.entries[correlation_id]
            yield entry, awaited
