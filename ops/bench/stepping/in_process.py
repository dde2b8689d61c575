"""The same in one process, without Redis: the production `Stepper`, and static batches.

Requests are handed over when they are due, or when the model returns if it computes then.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from service_processes import CpuMeter

from carpool_worker.model_process.frames import pack_values, unpack_values
from carpool_worker.model_process.model import SteppingModel, load_model
from carpool_worker.model_process.stepping.frames import Admit
from carpool_worker.model_process.stepping.stepper import Stepper
from stepping.heard import Heard, Sent
from stepping.models import SLOTS, Batches, Steps
from stepping.workloads import Ask, Window

ROLE: Final = "one process"


class Engine(Protocol):
    """What generates. `advance` returns the requests' numbers with what was emitted for them."""

    @property
    def has_next(self) -> bool: ...

    def admit(self, number: int, ask: Ask) -> None: ...

    def advance(self) -> Sequence[tuple[int, Any]]: ...

    def close(self) -> None: ...


class StepperEngine:
    """A stepping model, as a model process runs it."""

    def __init__(self, model: SteppingModel) -> None:
        self._stepper = Stepper(model)

    @property
    def has_next(self) -> bool:
        return self._stepper.has_next

    def admit(self, number: int, ask: Ask) -> None:
        admit = Admit(number, (), (f"bench-{number}", "", {}), 1, True)
        self._stepper.admit(admit, pack_values([ask.body]))

    def advance(self) -> Sequence[tuple[int, Any]]:
        step = self._stepper.advance()
        advances = [] if step is None else step.advances
        return [(advance.key, unpack_values(advance.chunk)) for advance in advances]

    def close(self) -> None:
        self._stepper.close()


class BatchEngine:
    """A model of static batches: it takes all that wait, up to a full batch."""

    def __init__(self, model: Batches) -> None:
        self._model = model
        self._waiting: deque[tuple[int, Ask]] = deque()

    @property
    def has_next(self) -> bool:
        return bool(self._waiting)

    def admit(self, number: int, ask: Ask) -> None:
        self._waiting.append((number, ask))

    def advance(self) -> Sequence[tuple[int, Any]]:
        batch = [self._waiting.popleft() for _ in range(min(SLOTS, len(self._waiting)))]
        outputs = self._model.predict([ask.body for _, ask in batch])
        return [(number, output) for (number, _), output in zip(batch, outputs, strict=True)]

    def close(self) -> None:
        self._waiting.clear()


def engines(kind: type[Steps] | type[Batches]) -> Callable[[], Engine]:
    """Load a model; what is returned makes an engine of it for each run."""
    model = kind()
    if isinstance(model, Batches):
        model.load("cpu")
        return lambda: BatchEngine(model)
    loaded = load_model(model, "cpu")
    assert isinstance(loaded, SteppingModel)
    return lambda: StepperEngine(loaded)


def run(engine: Engine, asks: Sequence[Ask], window: Window | None) -> Sent:
    """Run until all are answered, or until the window is over."""
    heard = [Heard(ask) for ask in asks]
    to_admit, without_token = deque(enumerate(heard)), len(heard)
    meter = CpuMeter({ROLE: os.getpid()})
    start_s, now_s = time.monotonic(), 0.0
    while to_admit or engine.has_next:
        while to_admit and to_admit[0][1].ask.due_s <= now_s:
            _admit(engine, *to_admit.popleft())
        if engine.has_next:
            emitted = engine.advance()
            now_s = time.monotonic() - start_s
            for number, values in emitted:
                without_token -= not heard[number].read_s
                heard[number].read(values, now_s, start_s)
        else:
            time.sleep(max(0.0, to_admit[0][1].ask.due_s - now_s))
            now_s = time.monotonic() - start_s
        if window is not None and now_s >= window.span_s:
            meter.stop()
            if now_s >= window.until_s or not without_token:
                break
    engine.close()
    return Sent(heard, window, now_s, meter.stop())


def _admit(engine: Engine, number: int, heard: Heard) -> None:
    started_s = time.perf_counter()
    engine.admit(number, heard.ask)
    heard.submit_s = time.perf_counter() - started_s
