"""When a model process is replaced because of its age, and whether there is space for two."""

from __future__ import annotations

import pytest

from carpool_worker.memory import GpuUse
from carpool_worker.succession import Limits, Reason, has_space_beside, why_too_old

GIB = 1 << 30


@pytest.mark.parametrize(
    ("limits", "requests", "resident", "loaded", "reason"),
    [
        (Limits(), 10**9, 100 * GIB, 0, None),
        (Limits(requests=10), 9, None, 0, None),
        (Limits(requests=10), 10, None, 0, "requests"),
        (Limits(memory_bytes=10 * GIB), 0, None, 0, None),  # unknown
        (Limits(memory_bytes=10 * GIB), 0, 8 * GIB - 1, 0, None),
        (Limits(memory_bytes=10 * GIB), 0, 8 * GIB, 0, "memory"),
        (Limits(memory_bytes=10 * GIB), 0, 8 * GIB, 5 * GIB, None),  # it begins at 9 GiB
        (Limits(memory_bytes=10 * GIB), 0, 9 * GIB, 5 * GIB, "memory"),
        (Limits(memory_bytes=10 * GIB), 0, 20 * GIB, 10 * GIB, None),  # so would be another one
        (Limits(10, 10 * GIB), 10, 20 * GIB, 10 * GIB, "requests"),
    ],
)
def test_when_a_process_is_replaced(
    limits: Limits, requests: int, resident: int | None, loaded: int, reason: Reason | None
) -> None:
    assert why_too_old(limits, requests, resident, loaded) == reason


@pytest.mark.parametrize(
    ("device", "resident", "available", "gpu", "has_space"),
    [
        ("cpu", 4 * GIB, 5 * GIB, None, True),
        ("cpu", 4 * GIB, 5 * GIB - 1, None, False),
        ("cpu", None, 5 * GIB, None, False),
        ("cpu", 4 * GIB, None, None, False),
        ("cuda:0", 1, GIB, None, False),
        ("cuda:0", 1, GIB, GpuUse(4 * GIB, 5 * GIB), True),
        ("cuda:0", 1, GIB, GpuUse(4 * GIB, 4 * GIB), False),
    ],
)
def test_whether_another_process_has_space(
    device: str, resident: int | None, available: int | None, gpu: GpuUse | None, has_space: bool
) -> None:
    assert has_space_beside(device, resident, available, gpu) is has_space
