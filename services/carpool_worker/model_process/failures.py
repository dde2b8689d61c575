"""From what a model raised to what the producer gets: status and detail. Or to the end of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from carpool.errors import INVALID_ARGUMENT, CarpoolError, Unhealthy
from carpool_worker.model_process.broken_devices import broken_device
from carpool_worker.model_process.frames import Failure

# Errors of a program rather than of its input: the class helps to find them.
_OF_PROGRAMS: Final = (LookupError, TypeError, AttributeError, NameError)
CAUSES_MAX: Final = 8  # of an exception, that are looked at
# What is raised about a body, or by the model on purpose. Such an exception may quote the body.
_ABOUT_BODIES: Final = (CarpoolError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)


# Is told what a model raised (see `raised`), and on which requests: indexes in the frame, or keys of a Step.
Observe = Callable[[BaseException, Sequence[int]], None]


class OutputError(Exception):
    """What the model returned cannot be taken. It raised nothing, and the text of this says all."""


class WrongOutputError(OutputError):
    """What the model returned is not one result for each item."""


class WrongCostError(OutputError):
    """What the model's `cost` returned is no cost."""


class UnclearOutputError(OutputError):
    """What the model returned for several items has two meanings. For one item it has one."""


class BrokenDeviceError(Unhealthy):
    """The accelerator does not work any more, as the error says that the model raised: its cause."""


def not_observed(_error: BaseException, _concerned: Sequence[int]) -> None:
    """Where nobody watches the model."""


def failure_of(error: BaseException, status: str) -> Failure:
    """The status and detail for the producer: no traceback, and the exception's class only where nothing else
    tells what is wrong.

    Raises Unhealthy if it is no failure of a request: this process cannot go on.
    """
    _check_health(error)
    if isinstance(error, CarpoolError):
        return str(error.status), _text(getattr(error, "detail", ""))  # a subclass may not set it
    if isinstance(error, WrongOutputError | WrongCostError):
        return status, _text(error)
    failure = (
        "the model rejected this body" if status == INVALID_ARGUMENT else "the model failed on this request"
    )
    return status, f"{failure}: {_reason(error)}"


def _reason(error: BaseException) -> str:
    """What the exception says. Some say little without their class, such as KeyError('speed')."""
    kind, message = type(error).__name__, _text(error)
    if not message:
        return f"{kind}, without a message"
    return f"{kind}: {message}" if isinstance(error, _OF_PROGRAMS) else message


def _check_health(error: BaseException) -> None:
    """Raise Unhealthy if the model said so, or its accelerator does not work any more."""
    for cause in islice(_with_causes(error), CAUSES_MAX):
        if isinstance(cause, Unhealthy):
            raise cause
        if not isinstance(cause, _ABOUT_BODIES) and (broken := broken_device(cause, _text(cause))):
            raise BrokenDeviceError(f"the accelerator is broken: {broken}") from error


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what it was raised from or during, and so on."""
    while error is not None:
        yield error
        cause, context = error.__cause__, error.__context__
        error = context if cause is None and not error.__suppress_context__ else cause


def _text(value: object) -> str:
    try:
        return str(value).strip()
    except Exception:  # the __str__ of a model's exception is user code
        return ""
