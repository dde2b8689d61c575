"""What crosses the boundary between a worker and the model process of a stepping model, used on both sides.

The first message is the result of loading, as for any model (`frames`); Raised is as there, too. From then on
neither side waits for the other: the worker sends Admit, Drop, Resume and Configure, and the process sends a
Step whenever a step of the model had an effect. Messages are framed as in `frames`; all of these are headers
without a payload, except that the payload of an Admit is the request's body.

Chunks are bytes here: each is a packed list (`frames.pack_values`) of what the model emitted for one request
in one step, usually of one value. The worker stores them as they are, and sends them back to the process that
continues a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from carpool_worker.model_process.frames import Failure, Layout, RequestFields

_ADMIT: Final = 0
_DROP: Final = 1
_RESUME: Final = 2
_CONFIGURE: Final = 3


class Admit(NamedTuple):
    """Worker to process: generate for this request, as soon as a slot is free.

    `key`: the worker's number for the request, never used twice for one process. `request`: what its model is
    told of it. The payload is the body of
    one request, encoded as in `frames.FrameHeader`: with `layouts`, tensors; without, a packed list of one
    value. `chunks`: those that its reader may have seen, oldest first, if another process began it.
    `is_streamed`: whether chunks are wanted; if not, only the output is sent.

    `steps_alone`, if it may have killed a process: it is begun at once and takes this many steps, fewer if it
    ends, while all others pause. Each of these Steps is sent, with an Advance of this key. Then everything
    pauses until the next request that is to be alone, or Resume; others that arrive meanwhile wait.
    """

    key: int
    layouts: Sequence[Layout]
    request: RequestFields
    cost: int
    is_streamed: bool
    chunks: Sequence[bytes] = ()
    steps_alone: int = 0

    def message(self) -> tuple[Any, ...]:
        """The header of the message."""
        return (_ADMIT, *self)


class Drop(NamedTuple):
    """Worker to process: these requests are no longer wanted. Unknown keys are ignored: they have ended."""

    keys: Sequence[int]

    def message(self) -> tuple[Any, ...]:
        """The header of the message."""
        return (_DROP, *self)


class Resume(NamedTuple):
    """Worker to process: no request that is to be alone follows. All that pause go on."""

    def message(self) -> tuple[Any, ...]:
        """The header of the message."""
        return (_RESUME,)


class Configure(NamedTuple):
    """Worker to process: the settings of these names have changed. Requests that have a slot keep it.
    `max_result_bytes` holds for these, too."""

    max_batch_size: int
    max_batch_cost: int | None
    max_prefill_cost: int | None
    max_result_bytes: int

    def message(self) -> tuple[Any, ...]:
        """The header of the message."""
        return (_CONFIGURE, *self)


WorkerMessage = Admit | Drop | Resume | Configure


def read_worker_message(fields: Sequence[Any]) -> WorkerMessage:
    """A header that the worker sent."""
    kind, *values = fields
    message: WorkerMessage = _KINDS[kind](*values)
    return message


_KINDS: Final[dict[int, Any]] = {_ADMIT: Admit, _DROP: Drop, _RESUME: Resume, _CONFIGURE: Configure}


class Advance(NamedTuple):
    """What a step did for one request.

    `chunk`: what it emitted, empty if nothing, and always empty if the request is not streamed. If it ended,
    either `output`, its whole output as a packed list of one value, or `failure` is set, and the key is not
    used any more. `emitted`: how many values it emitted so far, those before a process died included.
    """

    key: int
    chunk: bytes
    emitted: int
    output: bytes | None = None
    failure: Failure | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of this request."""
        return self.output is not None or self.failure is not None


class Step(NamedTuple):
    """Process to worker: what changed since the last one. Sent if something did, and now and then without,
    while the process steps, to show that it does not hang.

    `step_us`: how long `step` took, `begin_us` the `begin` before it; 0 if it was not called. What `begin`
    emitted or ended is sent before `step` is called, as one of these without a step. `running`: how many
    requests hold a slot after it, `size` how many took the step, or were begun. `errors`: as in an outcome
    (`frames`), with the keys of requests.
    """

    step_us: int
    begin_us: int
    size: int
    running: int
    advances: Sequence[Advance]
    errors: Mapping[str, Sequence[int]] = {}

    @property
    def has_stepped(self) -> bool:
        """Whether it tells of a call of `step`, and not of `begin` alone."""
        return self.step_us > 0 or not self.begin_us

    def error_of(self, key: int) -> str:
        """What the model raised last on the request of this key; empty if it did not."""
        return next((name for name in reversed([*self.errors]) if key in self.errors[name]), "")

    @classmethod
    def read(cls, fields: Sequence[Any]) -> Self:
        """A header that the process sent. Raises TypeError or ValueError if it is no Step."""
        step_us, begin_us, size, running, advances, errors = fields
        return cls(step_us, begin_us, size, running, [Advance(*advance) for advance in advances], errors)
