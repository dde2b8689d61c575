"""Fuzzing everything that decodes a producer's bytes, from an entry of the request stream to results.

`check_entry` and `check_oversized` are the targets. `tests/unit/test_fuzz.py` gives them a few hundred
inputs; `make fuzz` a million:

    python -m support.fuzzing --inputs 1000000 --seed 1

Inputs are made by Hypothesis: fields that are nearly right, bodies of all content types, and both with bytes
changed, cut off or repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, Final

import hypothesis
import msgpack
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from carpool.keys import CORRELATION_ID
from carpool.messages.batches import Batch, Dispatch
from carpool.messages.requests import CONTENT_TYPES, Run, SequencesEnd, Withdrawal
from carpool.messages.results import Refusal, Result
from carpool.model_settings import ModelSettings
from carpool.rows import Rows, StoredBody
from carpool.wire.batches import decode_batch, encode_batch
from carpool.wire.request_fields import CARPOOL_FIELDS, COLUMN_FIELDS, STORED_BODY_FIELDS
from carpool.wire.requests import decode_entry, encode_runs, refuse_oversized
from carpool.wire.results import encode_result
from carpool.wire.tensors import TensorSpec
from carpool_worker.codec import Codec
from carpool_worker.execution import Execution
from support.executions import NOW_US, codec_of, echo, finish
from support.wire import ENTRY_ID

INPUTS_PER_SEED: Final = 5000  # Hypothesis remembers the inputs of a run
INPUT_S_MAX: Final = 5.0  # of CPU time; the slowest takes milliseconds
MEMORY_MIN: Final = 8 << 20
MEMORY_RATIO: Final = 100  # arrays and maps take 60 times their bytes, and are checked and copied

# --- inputs ------------------------------------------------------------------------------------------------

_SETTINGS: Final = (
    ModelSettings(),
    ModelSettings(max_body_bytes=16, default_expiration_ms=5, unknown_fields="refuse"),
)
_NAMES: Final = sorted(
    CARPOOL_FIELDS | COLUMN_FIELDS | STORED_BODY_FIELDS | {"tenant", "traceparent", "tickets", "x"}
)
_SCALARS: Final = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=4),
    st.binary(max_size=8), st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
)  # fmt: skip
_TENSORS: Final = st.fixed_dictionaries(
    {
        "datatype": st.sampled_from(
            ["FP32", "FP16", "INT64", "UINT8", "BOOL", "BYTES", "FP128", "", b"FP32"]
        ),
        "shape": st.lists(st.integers(-1, 4) | st.integers(-(2**63), 2**63), max_size=4) | _SCALARS,
        "data": st.binary(max_size=32) | st.lists(_SCALARS, max_size=8) | _SCALARS,
    }
)
_VALUES: Final = st.recursive(
    _SCALARS | _TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.binary(max_size=2), inner)
    ),
    max_leaves=12,
)


def _text_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _text_names(item) for name, item in value.items()}
    return [_text_names(item) for item in value] if isinstance(value, list) else value


def _as_json(value: Any) -> bytes:
    return json.dumps(_text_names(value), default=str).encode("utf-8", "surrogatepass")


_WRITTEN: Final = st.one_of(
    _VALUES.map(msgpack.packb),
    _VALUES.map(_as_json),
    st.binary(max_size=32),
    st.sampled_from(
        [b"[" * 200, b"\x91" * 2000, b'{"a":' * 100, b"9" * 5000, b"1e999", b"NaN", b"\xdd\xff\xff\xff\xff"]
    ),
)
_EDITS: Final = st.lists(
    st.tuples(
        st.sampled_from(["cut", "change", "repeat", "insert"]), st.integers(0, 1 << 16), st.binary(max_size=3)
    ),
    max_size=3,
)


def _edited(data: bytes, edits: Sequence[tuple[str, int, bytes]]) -> bytes:
    for how, where, new in edits:
        at = where % (len(data) + 1)
        if how == "cut":
            data = data[:at]
        elif how == "change":
            data = data[:at] + new + data[at + len(new) :]
        elif how == "repeat":
            data = data[:at] + data[at : at + 16] * 8 + data[at + 16 :]
        else:
            data = data[:at] + new + data[at:]
    return data


BODIES: Final = st.builds(_edited, _WRITTEN, _EDITS)
_TEXTS: Final = st.sampled_from(
    [b"", b"0", b"1", b"7", b"-1", b"a", b"a b", b"a  b", b"9" * 20, b"9" * 5000, b"\xff", b"1_0",
     b"\xd9\xa3", b"1-1:0+2", b"1-1:0+1 2-1:3+4", *(name.encode() for name in CONTENT_TYPES)]
)  # fmt: skip
_MAPS: Final = st.dictionaries(st.sampled_from(_NAMES), _TEXTS | BODIES | _VALUES, max_size=6)
_ONE_REQUEST: Final = st.fixed_dictionaries(
    {"correlation_id": st.sampled_from(["a", "b", "c/d", "é"]), "body": BODIES},
    optional={
        "content_type": st.sampled_from(CONTENT_TYPES),
        "priority": _SCALARS,
        "lane": st.text(max_size=3),
    },
)
_COLUMNS: Final = st.fixed_dictionaries(
    {"correlation_ids": st.sampled_from(["a", "a b", "a b c", "a /", " "])},
    optional={
        "rows": st.binary(max_size=12),
        "row_head": st.binary(max_size=4),
        "bodies": st.lists(BODIES | _MAPS, max_size=3),
        "content_type": st.sampled_from(CONTENT_TYPES),
    },
)
_PACKED: Final = st.builds(
    _edited, st.lists(_ONE_REQUEST | _COLUMNS | _MAPS | _VALUES, max_size=6).map(msgpack.packb), _EDITS
)
_ANY: Final = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([name.encode() for name in _NAMES]), _TEXTS | BODIES),
        st.tuples(st.just(b"body"), BODIES),
        st.tuples(st.just(b"content_type"), st.sampled_from([name.encode() for name in CONTENT_TYPES])),
        st.tuples(st.just(b"requests"), _PACKED),
        st.tuples(st.binary(max_size=4), st.binary(max_size=4)),
    ),
    max_size=6,
).map(lambda pairs: [part for pair in pairs for part in pair])
# Right but for the body, or the elements of the packed entry
_NEARLY_RIGHT: Final = st.builds(
    lambda content_type, name, value: [b"content_type", content_type.encode(), name, value],
    st.sampled_from(CONTENT_TYPES),
    *(st.just(b"body"), BODIES),
) | st.lists(_ONE_REQUEST | _COLUMNS, min_size=1, max_size=6).map(
    lambda maps: [b"requests", msgpack.packb(maps)]
)
FLATS: Final = _ANY | _NEARLY_RIGHT

# --- targets -----------------------------------------------------------------------------------------------


def _codecs() -> Sequence[Codec]:
    """Of a model that takes anything, and of models with each kind of tensors."""
    return (
        codec_of(),
        codec_of(TensorSpec("x", "FP32", (-1,))),
        codec_of(TensorSpec("x", "BOOL", (2,)), TensorSpec("y", "BYTES", (-1,))),
        codec_of(TensorSpec("x", "INT64", (2, -1))),
    )


_CODECS: Final = _codecs()


def check_entry(flat: Sequence[bytes], settings: ModelSettings, codec: Codec) -> None:
    """Whatever a producer sent: each request is answered, within bounds of time and memory."""
    bounded(lambda: _answer_entry(flat, settings, codec), sum(map(len, flat)))


def check_oversized(flat: Sequence[bytes]) -> None:
    """The same of the small fields of an entry that is too large to be read."""

    def refuse() -> None:
        _, decoded = refuse_oversized(ENTRY_ID.encode(), flat, b"x", 1 << 30)
        (refusal,) = decoded
        assert isinstance(refusal, Refusal)
        _assert_answered(refusal)

    bounded(refuse, sum(map(len, flat)))


def bounded(act: Callable[[], None], size_bytes: int) -> None:
    """Do it. Fails if it takes long, or much memory for so many bytes."""
    tracemalloc.start()
    started_s = time.process_time()
    try:
        act()
        taken_s, peak = time.process_time() - started_s, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken_s < INPUT_S_MAX, f"{size_bytes} bytes took {taken_s:.1f} s of CPU time"
    assert peak < MEMORY_MIN + MEMORY_RATIO * size_bytes, f"{size_bytes} bytes took {peak} bytes of memory"


def _answer_entry(flat: Sequence[bytes], settings: ModelSettings, codec: Codec) -> None:
    """As batcher and worker do: refuse what cannot be understood, and execute the rest."""
    _, decoded = decode_entry(ENTRY_ID.encode(), flat, settings)
    assert decoded, "no request is answered"
    runs = [item for item in decoded if isinstance(item, Run)]
    for item in decoded:
        if isinstance(item, Refusal):
            _assert_answered(item)
        else:
            assert isinstance(item, Run) or (
                isinstance(item, Withdrawal | SequencesEnd) and len(decoded) == 1
            )
    if runs:
        _assert_put_back_is_the_same(runs, settings)
        _assert_executed(runs, codec)


def _assert_answered(refusal: Refusal) -> None:
    """Its answers can be written, each under a key."""
    assert refusal.correlation_ids and refusal.status
    for name in refusal.correlation_ids:
        assert CORRELATION_ID.fullmatch(name)
        assert encode_result(Result(name, refusal.status, refusal.content_type, detail=refusal.detail))


def _assert_put_back_is_the_same(runs: Sequence[Run], settings: ModelSettings) -> None:
    """Requests that are put back in another entry are not refused there: their producer sent valid ones."""
    flat = [b"requests", encode_runs(runs), b"arrival", str(runs[0].arrival_us // 1000).encode()]
    _, again = decode_entry(ENTRY_ID.encode(), flat, settings)
    assert all(isinstance(item, Run) for item in again)
    ids = [name for item in again if isinstance(item, Run) for name in item.correlation_ids]
    assert ids == [name for run in runs for name in run.correlation_ids]


def _assert_executed(runs: Sequence[Run], codec: Codec) -> None:
    """Through a batch to results: each request has one, under its ID."""
    fields = [b"runs", encode_batch(Dispatch(list(runs), "idle", ""))]
    batch = decode_batch(b"7-0", fields, 1)
    for run in batch.runs:  # the bodies that are stored elsewhere were lost
        if not isinstance(run.bodies, Rows):
            run.bodies[:] = [b"" if isinstance(body, StoredBody) else body for body in run.bodies]
    execution = _prepared(codec, batch)
    results = finish(codec, execution, echo)
    assert [result.correlation_id for result in results] == [
        name for run in runs for name in run.correlation_ids
    ]
    for result in results:
        assert encode_result(result)
        assert result.body is not None or result.status


def _prepared(codec: Codec, batch: Batch) -> Execution:
    execution = Execution(batch)
    codec.prepare(execution, NOW_US)
    return execution


settings_of_models: Final = st.sampled_from(_SETTINGS)
codecs: Final = st.sampled_from(_CODECS)

# --- a million inputs --------------------------------------------------------------------------------------


def fuzz(inputs: int, seed: int) -> None:
    """Run both targets on that many inputs. A failing one is printed with the seed, which replays it."""
    done, started_s = 0, time.monotonic()
    for at in itertools.count(seed):
        if done >= inputs:
            return
        print(f"seed {at}: {done:,} inputs in {time.monotonic() - started_s:.0f} s", flush=True)
        examples = min(INPUTS_PER_SEED, inputs - done)
        options = hypothesis.settings(
            max_examples=examples, deadline=None, database=None, print_blob=True,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        of_entry = given(FLATS, settings_of_models, codecs)(check_entry)
        hypothesis.seed(at)(options(of_entry))()
        small = hypothesis.settings(options, max_examples=max(1, examples // 50))
        hypothesis.seed(at)(small(given(FLATS)(check_oversized)))()
        done += examples


def main() -> int:
    """Fuzz, as the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1, help="the first one; each is for 5,000 inputs")
    arguments = parser.parse_args()
    fuzz(arguments.inputs, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
