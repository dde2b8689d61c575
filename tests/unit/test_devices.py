"""Model processes get the named devices in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from carpool_worker.devices import devices


@pytest.mark.parametrize(
    ("names", "replicas", "expected"),
    [
        ("cpu", 3, ["cpu", "cpu", "cpu"]),
        ("cuda:0,cuda:1", 3, ["cuda:0", "cuda:1", "cuda:0"]),
        (" cuda:2 , cpu", 1, ["cuda:2"]),
        ("", 1, ["cpu"]),
        ("cuda:0,cuda:1", "auto", ["cuda:0", "cuda:1"]),
        ("", "auto", ["cpu"]),
    ],
)
def test_each_model_process_gets_a_device_in_turn(
    names: str, replicas: int | Literal["auto"], expected: Sequence[str]
) -> None:
    assert devices(names, replicas) == expected
