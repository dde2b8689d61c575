"""A change of settings is taken back from its entry in the audit, if nothing else was changed since."""

from __future__ import annotations

import pytest

from carpool_console.undo import changes_back


def test_overrides_before_a_change_are_restored() -> None:
    details = {"max_batch_size": "none -> 4", "policy": "eager -> deferred", "max_queue_size": "9 -> none"}
    now = {"max_batch_size": "4", "policy": "deferred", "result_ttl_ms": "5"}
    assert changes_back(details, now) == ["max_batch_size=", "policy=eager", "max_queue_size=9"]


@pytest.mark.parametrize(
    ("details", "now", "error"),
    [
        ({"policy": "eager -> deferred"}, {"policy": "other"}, "policy was changed since"),
        ({"policy": "eager -> deferred"}, {}, "its override is none now"),
        ({"policy": "none -> deferred"}, {"policy": "eager"}, "not deferred"),
        ({"tenant_weights": f"none -> {'x' * 500}"}, {"tenant_weights": "x" * 500}, "its whole value"),
        ({"priority_policies": "a -> b -> c"}, {"priority_policies": "c"}, "its whole value"),
        ({"reason": "written by hand"}, {}, "its whole value"),
        ({}, {}, "does not say"),
    ],
)
def test_what_cannot_be_taken_back_is_named(details: dict[str, str], now: dict[str, str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        changes_back(details, now)
