"""A few hundred inputs for the fuzz targets of `support.fuzzing`; `make fuzz` tries a million."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings

from carpool.model_settings import ModelSettings
from carpool.wire.requests import decode_entry
from carpool_worker.codec import Codec
from support import fuzzing
from support.executions import codec_of
from support.fuzzing import FLATS, check_entry, check_oversized, codecs, settings_of_models

few: Final = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@few
@given(FLATS, settings_of_models, codecs)
def test_any_entry_is_answered(flat: list[bytes], model: ModelSettings, codec: Codec) -> None:
    check_entry(flat, model, codec)


@few
@given(FLATS)
def test_any_oversized_entry_is_answered(flat: list[bytes]) -> None:
    check_oversized(flat)


def _crash(*_: object) -> None:
    raise KeyError("crashed")


def _fill_memory(*arguments: Any) -> object:
    bytearray(2 * fuzzing.MEMORY_MIN)
    return decode_entry(*arguments)


def _answer_nobody(*_: object) -> tuple[object, list[object]]:
    return None, []


@pytest.mark.parametrize(
    ("fault", "kind", "error"),
    [
        (_crash, KeyError, "crashed"),
        (_fill_memory, AssertionError, "bytes of memory"),
        (_answer_nobody, AssertionError, "no request is answered"),
    ],
)
def test_target_notices(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., object], kind: type[Exception], error: str
) -> None:
    """A crash, memory out of proportion, and an entry that nobody answers."""
    monkeypatch.setattr(fuzzing, "decode_entry", fault)
    with pytest.raises(kind, match=error):
        check_entry([b"body", b"1"], ModelSettings(), codec_of())


def test_target_notices_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "INPUT_S_MAX", 0.0)
    with pytest.raises(AssertionError, match="of CPU time"):
        check_entry([b"body", b"1"], ModelSettings(), codec_of())
