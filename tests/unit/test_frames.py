"""Messages between worker and model process over a real socket pair, and the values in their payloads."""

from __future__ import annotations

import itertools
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import array_shapes, arrays

from carpool.spoken import Spoken
from carpool.wire.tensors import WIDTHS, TensorSpec
from carpool_worker.model_process import frames
from carpool_worker.model_process.frames import (
    LoadFailed,
    MessageReader,
    ProcessGoneError,
    Ready,
    StrayBytesError,
    send_message,
)
from support.executions import receive_load_result

BUFFER_BYTES = 64 * 1024


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def wire_bytes(*messages: tuple[Any, bytes]) -> bytes:
    """The bytes of these messages on the wire."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for header, payload in messages:
            send_message(ours, header, payload)
        ours.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(1 << 20), b""))


class Trickle:
    """A socket that returns at most `chunks` bytes per call, then the rest, then the end of the stream."""

    def __init__(self, data: bytes, *chunks: int) -> None:
        self.data = data
        self.chunks = list(chunks)
        self.calls = 0

    def recv_into(self, view: memoryview, _size: int = 0, _flags: int = 0) -> int:
        self.calls += 1
        size = min(len(view), self.chunks.pop(0) if self.chunks else len(self.data), len(self.data))
        view[:size], self.data = self.data[:size], self.data[size:]
        return size


class Reader:
    """A message reader whose payloads are bytes, to compare them with what was sent."""

    def __init__(self, source: Any) -> None:
        self.reader = MessageReader(source)

    def receive(self) -> tuple[Any, bytes]:
        header, payload = self.reader.receive()
        return header, bytes(payload)


# --- messages ----------------------------------------------------------------------------------------------


def test_message_arrives_as_it_was_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    header = {"count": 3, "failures": {1: ("INTERNAL", "no")}, "requests": [("a", "", {"x": b"\x00\xff"})]}
    send_message(ours, header, b"payload")
    got, payload = Reader(theirs).receive()
    assert got == {
        "count": 3,
        "failures": {1: ["INTERNAL", "no"]},
        "requests": [["a", "", {"x": b"\x00\xff"}]],
    }
    assert payload == b"payload"


def test_many_small_messages_cost_one_system_call() -> None:
    messages = [({"number": number}, b"x" * number) for number in range(200)]
    source = Trickle(wire_bytes(*messages))
    reader = Reader(source)
    assert [reader.receive() for _ in messages] == messages
    assert source.calls == 1


def test_payloads_of_all_sizes_around_the_buffer_size(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    sizes = [0, 1, *(BUFFER_BYTES + more for more in (-20, -1, 0, 1)), 3, 10 * BUFFER_BYTES + 7, 2]
    messages = [({"size": size}, bytes(number % 251 for number in range(size))) for size in sizes]

    def send() -> None:
        for header, payload in messages:
            send_message(ours, header, payload)

    sender = threading.Thread(target=send)
    sender.start()
    reader = Reader(theirs)
    for header, payload in messages:
        got, data = reader.receive()
        assert got == header
        assert data == payload
    sender.join()


def test_header_larger_than_the_buffer() -> None:
    header = {"requests": ["x" * 50_000, "y" * 50_000]}
    reader = Reader(Trickle(wire_bytes((header, b"abc"), ({}, b"next"))))
    assert reader.receive() == (header, b"abc")
    assert reader.receive() == ({}, b"next")


def test_messages_split_at_every_byte() -> None:
    messages = [({"number": 1}, b"abc"), ({}, b""), ({"number": 3}, b"defgh")]
    data = wire_bytes(*messages)
    for first in range(1, len(data)):
        for second in (1, 2, 3, len(data) - first):
            reader = Reader(Trickle(data, first, second))
            assert [reader.receive() for _ in messages] == messages, (first, second)


def test_large_payload_split_at_every_thousandth_byte() -> None:
    payload = bytes(range(256)) * 300
    data = wire_bytes(({"n": 1}, payload), ({"n": 2}, b"next"))
    for first in range(1, len(data), 997):
        reader = Reader(Trickle(data, first, 1, 5000))
        assert reader.receive() == ({"n": 1}, payload)
        assert reader.receive() == ({"n": 2}, b"next")


@given(
    sizes=st.lists(st.sampled_from((0, 1, 5, 1000, 65_000, 65_536, 70_000)), min_size=1, max_size=6),
    chunks=st.lists(st.integers(1, 70_000), max_size=30),
)
@settings(max_examples=50, deadline=None)
def test_any_sizes_in_any_chunks(sizes: list[int], chunks: list[int]) -> None:
    messages = [({"at": at}, bytes([at]) * size) for at, size in enumerate(sizes)]
    reader = Reader(Trickle(large_wire_bytes(*messages), *chunks))
    for header, payload in messages:
        assert reader.receive() == (header, payload)
    with pytest.raises(ProcessGoneError):
        reader.receive()


def large_wire_bytes(*messages: tuple[Any, bytes]) -> bytes:
    """As `wire_bytes`, for messages larger than a socket's buffer."""

    class Sink:
        data = b""

        def sendall(self, data: bytes) -> None:
            self.data += data

    sink = Sink()
    for header, payload in messages:
        send_message(sink, header, payload)  # type: ignore[arg-type]
    return sink.data


@pytest.mark.parametrize("stray", [b"\0", b"\xff", b"\xc1", b"a line of a log\n", bytes(70_000)])
@pytest.mark.parametrize("payload_bytes", [3, 100_000])
def test_bytes_that_were_written_into_a_message_are_noticed(stray: bytes, payload_bytes: int) -> None:
    """Wherever they are, no message with other contents is read."""
    message = ({"number": 1}, bytes(range(1, 251)) * (payload_bytes // 250) or b"abc")
    data, other = large_wire_bytes(message), large_wire_bytes(({"number": 2}, b"next"))
    step = 1 if payload_bytes < 100 else 997
    for at in (*range(0, len(data), step), len(data) - 1, len(data)):
        written = data[:at] + stray + data[at:]
        reader, got = Reader(Trickle(written + other)), []
        with pytest.raises(StrayBytesError):
            while True:
                got.append(reader.receive())
        assert got == ([message] if written.startswith(data) else []), at


def test_what_has_arrived_is_received_without_waiting_for_the_rest(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.settimeout(0)  # else a wait would never end
    messages = [({"number": 1}, b"abc"), ({}, bytes(range(250)) * 300), ({"number": 3}, b"")]
    data = large_wire_bytes(*messages)
    reader, got = MessageReader(theirs), []
    cuts = [*range(60), *range(60, len(data), 991), len(data)]
    for start, end in itertools.pairwise(cuts):
        ours.sendall(data[start:end])
        while (message := reader.receive_arrived()) is not None:
            got.append((message[0], bytes(message[1])))
            assert end >= len(large_wire_bytes(*messages[: len(got)]))
        assert not reader.has_buffered
    assert got == messages
    ours.close()
    with pytest.raises(ProcessGoneError, match="closed the connection"):
        reader.receive_arrived()


def test_payloads_of_any_size_are_aligned(pair: tuple[socket.socket, socket.socket]) -> None:
    """As a model's tensors have to be."""
    ours, theirs = pair
    for name in ("", "a", "abc", "some longer name"):
        sender = threading.Thread(target=send_message, args=(ours, {"name": name}, bytes(800_000)))
        sender.start()
        _, payload = MessageReader(theirs).receive()
        sender.join()
        assert np.frombuffer(payload, np.float64).flags.aligned


def test_received_payload_is_not_overwritten_by_the_next() -> None:
    reader = Reader(Trickle(wire_bytes(({}, b"first"), ({}, b"other"))))
    _, first = reader.reader.receive()
    reader.reader.receive()
    assert first == b"first"


def test_connection_closed_at_any_byte_is_process_gone() -> None:
    data = wire_bytes(({"number": 1}, b"abc"))
    for length in range(len(data)):
        with pytest.raises(ProcessGoneError, match="closed the connection"):
            Reader(Trickle(data[:length])).receive()


def test_connection_closed_within_a_large_payload_is_process_gone() -> None:
    data = large_wire_bytes(({}, bytes(200_000)))
    with pytest.raises(ProcessGoneError, match="closed the connection"):
        Reader(Trickle(data[:-1])).receive()


def test_message_sent_before_the_connection_closed_is_received(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    send_message(ours, {"last": True}, b"payload")
    ours.close()
    reader = Reader(theirs)
    assert reader.receive() == ({"last": True}, b"payload")
    with pytest.raises(ProcessGoneError):
        reader.receive()


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_sending_to_a_closed_connection_is_process_gone(
    pair: tuple[socket.socket, socket.socket], size: int
) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(ProcessGoneError):
        send_message(ours, {}, bytes(size))


def test_receiving_from_a_closed_socket_is_process_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    reader = Reader(ours)
    ours.close()
    with pytest.raises(ProcessGoneError):
        reader.receive()


def test_lone_surrogate_in_a_header_is_replaced(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    send_message(ours, {"failures": {0: ("INTERNAL", "lone: \ud800!")}})
    header, _ = Reader(theirs).receive()
    assert header == {"failures": {0: ["INTERNAL", "lone: ?!"]}}


# --- the result of loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [
        Ready(
            {"max_batch_size": "8"},
            (TensorSpec("x", "FP32", (-1, 3)), TensorSpec("t", "BYTES", (), text=True)),
            (TensorSpec("y", "INT8", (2,), labels=("no", "yes")),),
            True,
            {"max_batch_sise": "max_batch_size"},
            version="2",
            has_cost=True,
            spoken=Spoken(("completions", "chat"), ("tools",)),
        ),
        Ready({}, (), (), False, {}),
        LoadFailed("RuntimeError: no weights", "Traceback ..."),
        LoadFailed("no such file", ""),
    ],
)
def test_load_result_arrives_as_it_was_sent(
    pair: tuple[socket.socket, socket.socket], result: Ready | LoadFailed
) -> None:
    ours, theirs = pair
    frames.send_load_result(ours, result)
    received = receive_load_result(MessageReader(theirs))
    assert received == result and type(received) is type(result)


# --- values ------------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(-5, 5), inner, max_size=4)
    ),
    max_leaves=20,
)
numbers = arrays(
    st.sampled_from(["?", "i1", "<i8", "u1", "<u2", "<u8", "<f2", "<f4", "<f8", ">f4", ">i4"]),
    array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    elements={"allow_nan": False},
)


@given(values)
@settings(deadline=None)
def test_values_are_preserved(value: Any) -> None:
    assert frames.unpack_values(frames.pack_values(value)) == value


@given(numbers)
@settings(deadline=None)
def test_arrays_are_preserved(array: Any) -> None:
    got = frames.unpack_values(frames.pack_values([array, {"x": array}]))
    for unpacked in (got[0], got[1]["x"]):
        assert unpacked.dtype == array.dtype.newbyteorder("<") and unpacked.shape == array.shape
        np.testing.assert_array_equal(unpacked, array)


def test_non_contiguous_array_is_preserved() -> None:
    array = np.arange(24).reshape(4, 6)[::-2, ::3].T
    np.testing.assert_array_equal(frames.unpack_values(frames.pack_values(array)), array)


@pytest.mark.parametrize(
    ("scalar", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(-7), -7),
        (np.uint8(255), 255),
        (np.bool_(True), True),
        (np.str_("é"), "é"),
    ],
)
def test_numpy_scalars_become_python_scalars(scalar: Any, plain: Any) -> None:
    got = frames.unpack_values(frames.pack_values([scalar, {"x": (scalar,)}]))
    assert got == [plain, {"x": [plain]}]
    assert type(got[0]) is type(plain)


def test_nan_and_infinity_are_preserved() -> None:
    nan, infinity = frames.unpack_values(frames.pack_values([math.nan, -math.inf]))
    assert math.isnan(nan) and infinity == -math.inf


@pytest.mark.parametrize("dtype", ["<U3", object])
def test_array_of_strings_becomes_a_bytes_tensor_map(dtype: Any) -> None:
    array = np.array([["a", "bc"], ["", "def"]]).astype(dtype)
    assert frames.unpack_values(frames.pack_values(array)) == {
        "datatype": "BYTES",
        "shape": [2, 2],
        "data": ["a", "bc", "", "def"],
    }


def test_arrays_of_bytes_are_lists_of_bytes_and_a_text_without_dimensions_a_text() -> None:
    arrays = [np.array([[b"ab", b"\xff"]]), np.array(b"c"), np.array("de"), np.array("f", object)]
    assert frames.unpack_values(frames.pack_values(arrays)) == [[[b"ab", b"\xff"]], b"c", "de", "f"]
    with pytest.raises(ValueError, match=r"an array of bytes of shape \[0, 3\] cannot be sent"):
        frames.pack_values(np.empty((0, 3), "S1"))


def test_strings_in_an_object_array_keep_trailing_zeros() -> None:
    got = frames.unpack_values(frames.pack_values(np.array(["a\0", "b"], object)))
    assert got["data"] == ["a\0", "b"]


class Tensor:
    """Like torch's: numpy can convert it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, *_: Any, **__: Any) -> Any:
        if isinstance(self.array, Exception):
            raise self.array
        return self.array


def test_convertible_object_becomes_an_array() -> None:
    got = frames.unpack_values(frames.pack_values([Tensor(np.array([1.5, 2]))]))
    np.testing.assert_array_equal(got[0], [1.5, 2])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (object(), "its type is object"),
        ({1, 2}, "its type is set"),
        (2**64, "contains an integer of more than 64 bits"),
        ("\ud800", "surrogates"),
        (np.array([1j]), "dtype complex128 cannot be sent"),
        (np.array([object()]), "dtype object cannot be sent"),
        (np.datetime64("2020-01-01"), "dtype datetime64"),
        (
            Tensor(RuntimeError("it requires a gradient")),
            "its type is Tensor, which cannot be converted .it requires a gradient.",
        ),
    ],
)
def test_value_that_cannot_be_sent_is_rejected(value: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError), match=error):
        frames.pack_values([value])


def test_unpack_each_isolates_values_that_cannot_be_unpacked() -> None:
    good = [1, "two", [3.0, {"x": np.arange(3)}], None]
    data = frames.pack_values([*good[:2], {("a", "tuple"): 1}, *good[2:], msgpack.ExtType(1, b"no tensor")])
    with pytest.raises(TypeError, match="a key in a dict is a tuple: use text"):
        frames.unpack_values(data)
    first, second, third, fourth, fifth, sixth = frames.unpack_each(bytearray(data))
    assert (first, second, fifth) == (1, "two", None)
    np.testing.assert_array_equal(fourth[1]["x"], [0, 1, 2])
    assert isinstance(third, TypeError) and isinstance(sixth, Exception)


# --- stacked tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", sorted(WIDTHS))
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 1, 2)])
def test_stacked_arrays_are_preserved(datatype: str, shape: tuple[int, ...]) -> None:
    kind = {"BOOL": "bool", "FP16": "f2", "FP32": "f4", "FP64": "f8", "BF16": "f4"}.get(
        datatype, datatype.lower()
    )
    array = np.arange(4 * math.prod(shape)).reshape((4, *shape)).astype(kind)
    parts, data = frames.stack({"x": array, "n": np.arange(4)}, {"x": datatype})
    assert parts == [("x", datatype, shape), ("n", "INT64", ())]
    assert len(data) == frames.stacked_bytes(parts[0], 4) + frames.stacked_bytes(parts[1], 4)
    got = frames.unstack(parts, 4, bytearray(data))
    assert got["x"].dtype == array.dtype and got["x"].shape == array.shape
    np.testing.assert_array_equal(got["x"], array)
    np.testing.assert_array_equal(got["n"], [0, 1, 2, 3])


def test_declared_datatype_replaces_the_arrays_own() -> None:
    parts, data = frames.stack({"y": np.array([0.5, 2.0])}, {"y": "FP32"})
    assert parts == [("y", "FP32", ())]
    assert data == np.array([0.5, 2.0], "<f4").tobytes()


def test_strings_unstack_as_objects_beside_numbers() -> None:
    texts = frames.pack_values(["a\0", "", "é", "long" * 100]) + frames.pack_values([b"x", b"\xff", b"", ""])
    parts: list[frames.Layout] = [("t", "BYTES", (2, 2)), ("n", "INT16", ()), ("u", "BYTES", ())]
    data = texts + np.array([7, 8], "<i2").tobytes() + frames.pack_values(["1"]) + frames.pack_values(["2"])
    got = frames.unstack(parts, 2, bytearray(data))
    assert got["t"].tolist() == [[["a\0", ""], ["é", "long" * 100]], [[b"x", b"\xff"], [b"", ""]]]
    assert got["n"].tolist() == [7, 8]
    assert got["u"].tolist() == ["1", "2"]


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j]), np.array([object()])])
def test_array_that_cannot_be_sent_stacked_is_rejected(array: Any) -> None:
    with pytest.raises(ValueError, match=r"strings cannot be sent stacked|cannot be sent"):
        frames.stack({"y": array}, {})
