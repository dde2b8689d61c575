"""The texts at which a written text ends, found while it is written in pieces. Pure.

    stops = StopTexts(["\n\n", "END"])
    for piece in pieces:
        send(stops.add(piece))          # what no stop text can begin with any more
        if stops.has_stopped:
            break                       # what was sent ends before the stop text
    else:
        send(stops.rest())

How a text is divided into pieces changes nothing: it ends before the stop text that is complete first and, of
those that are complete together, before the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Finds the first of some texts in a text that grows, and holds back what may be the beginning of one.

    `stop`: the texts; none may be empty. `sent`: if another process wrote the beginning of the text, what it
    sent of that. It is not returned again, and `add` gets what follows it. Raises ValueError for an empty
    stop text, and TypeError for one text in place of a list.

    `has_stopped`: whether a stop text was found; the text has ended then.
    """

    __slots__ = ("_held", "_longest", "_sent_chars", "_stop", "has_stopped")

    def __init__(self, stop: Sequence[str] = (), sent: str = "") -> None:
        if isinstance(stop, str):
            raise TypeError(f"stop: {stop!r:.60} must be a list of texts")
        if not all(stop):
            raise ValueError("stop: an empty text would end every text at once")
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = self._beginning_in(sent)
        self._sent_chars = len(self._held)  # of what is held, how much was sent before
        self.has_stopped = False

    def add(self, text: str) -> str:
        """Add what the text goes on with; return what may be sent now. After a stop text that is nothing."""
        if self.has_stopped:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = self._first_in(text)
        if found is not None:
            self.has_stopped = True
            self._held, free = "", found
        else:
            self._held = self._beginning_in(text)
            free = len(text) - len(self._held)
        ready = text[self._sent_chars : free]
        self._sent_chars = max(0, self._sent_chars - free)
        return ready

    def rest(self) -> str:
        """What is held back, once the text has ended without a stop text."""
        return self._held[self._sent_chars :]

    def _first_in(self, text: str) -> int | None:
        """Where the stop text begins that is complete first; None if there is none."""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _beginning_in(self, text: str) -> str:
        """The longest end of a text that a stop text begins with, without being one."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(stop.startswith(end) for stop in self._stop):
                return end
        return ""
