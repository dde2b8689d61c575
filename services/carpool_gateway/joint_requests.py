"""The requests of one call, which are answered together: rows of a tensor, or several prompts.

What becomes of them is told once, by the callback that reads the last result, so a call needs no task. If one
request fails, that is told at once, and the others are withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from carpool.client.packing import Packer

Result = TypeVar("Result")


class JointRequests(Generic[Result]):
    """Waits until all requests have a result, or one has failed. `what`: what a request is, in errors.

    `answer` is called once, with the results of all, or only with that of the one that failed. Each request
    is sent with one of `targets`, and its correlation ID is added to `names`.
    """

    def __init__(
        self, packer: Packer, count: int, answer: Callable[[Sequence[Result]], None], what: str
    ) -> None:
        self.targets: list[Target[Result]] = [(self, at) for at in range(count)]  # none once it is over
        self.names: list[str] = []
        self._packer = packer
        self._answer = answer
        self._what = what
        self._results: list[Result | None] = [None] * count
        self._missing = count
        self._is_over = False  # it is answered, or nobody wants the answer

    def put(self, at: int, result: Result) -> None:
        """A request has succeeded."""
        if self._is_over or self._results[at] is not None:
            return
        self._results[at] = result
        self._missing -= 1
        if not self._missing:
            self.finish()

    def fail(self, at: int, result: Result) -> None:
        """A request has failed: this is the answer, and the others are withdrawn."""
        if self._is_over or self._results[at] is not None:
            return
        self.withdraw()
        self._answer([result])

    def told(self, at: int, detail: str) -> str:
        """The text of an error, with the number of the request if there are several."""
        return f"{self._what} {at}: {detail}" if len(self.targets) > 1 else detail

    def finish(self) -> None:
        """All results are here."""
        self._close()
        self._answer(cast(list[Result], self._results))

    def withdraw(self, _: object = None) -> None:
        """Withdraw what has no result: nobody wants it. Then nothing is answered."""
        for name, target in zip(self.names, self._close(), strict=False):  # not all may be sent
            self._packer.withdraw(name, target)

    def _close(self) -> list[Target[Result]]:
        """It is over. Returns the targets, which lead back here: such cycles would be left to the garbage
        collector, which runs rarely, and then holds up all requests."""
        self._is_over = True
        targets, self.targets = self.targets, []
        return targets


Target = tuple[JointRequests[Result], int]
