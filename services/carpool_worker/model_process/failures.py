"""From what a model raised to the status and the detail that the producer gets."""

from __future__ import annotations

from carpool.errors import INVALID_ARGUMENT, CarpoolError
from carpool_worker.model_process.frames import Failure


class WrongOutputError(Exception):
    """What the model returned is not one result for each item."""


def failure_of(error: BaseException, status: str) -> Failure:
    """The status and detail for the producer: neither the exception's class nor a traceback."""
    if isinstance(error, CarpoolError):
        return str(error.status), _text(getattr(error, "detail", ""))  # a subclass may not set it
    message = _text(error)
    if isinstance(error, WrongOutputError):
        return status, message
    failure = (
        "the model rejected this body" if status == INVALID_ARGUMENT else "the model failed on this request"
    )
    return status, f"{failure}: {message}" if message else failure


def _text(value: object) -> str:
    try:
        return str(value).strip()
    except Exception:  # the __str__ of a model's exception is user code
        return ""
