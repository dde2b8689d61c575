"""Executes items in the process of a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from carpool_worker.model_process.executor import Items, Outcome, execute_async, run_now
from carpool_worker.model_process.loaded import LoadedModel


def execute(
    model: LoadedModel, items: Items, requests: Sequence[Sequence[Any]], *more: Any, **named: Any
) -> Outcome:
    """As `execute_async`, of a model that is not async."""
    return run_now(execute_async(model, items, requests, *more, **named))
