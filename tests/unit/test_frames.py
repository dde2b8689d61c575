"""Frames over a real socket pair, and what travels in them."""

from __future__ import annotations

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

from carpool.wire.tensors import WIDTHS
from carpool_worker.model_process import frames
from carpool_worker.model_process.frames import FrameReader, ProcessGoneError, send_frame

BUFFER_BYTES = 64 * 1024


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def wire_bytes(*some: tuple[frames.Header, bytes]) -> bytes:
    """What frames look like on the wire."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for header, payload in some:
            send_frame(ours, header, payload)
        ours.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(1 << 20), b""))


class Trickle:
    """A socket that gives away so many bytes at a time, and then the end."""

    def __init__(self, data: bytes, *chunks: int) -> None:
        self.data = data
        self.chunks = list(chunks)
        self.calls = 0

    def recv_into(self, view: memoryview) -> int:
        self.calls += 1
        size = min(len(view), self.chunks.pop(0) if self.chunks else len(self.data), len(self.data))
        view[:size], self.data = self.data[:size], self.data[size:]
        return size


class Reader:
    """A frame reader whose payloads are bytes, as they were sent."""

    def __init__(self, source: Any) -> None:
        self.reader = FrameReader(source)

    def receive(self) -> tuple[frames.Header, bytes]:
        header, payload = self.reader.receive()
        return header, bytes(payload)


# --- frames ------------------------------------------------------------------------------------------------


def test_a_frame_arrives_as_it_was_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    header = {"count": 3, "failures": {1: ("INTERNAL", "no")}, "requests": [("a", "", {"x": b"\x00\xff"})]}
    send_frame(ours, header, b"payload")
    got, payload = Reader(theirs).receive()
    assert got == {
        "count": 3,
        "failures": {1: ["INTERNAL", "no"]},
        "requests": [["a", "", {"x": b"\x00\xff"}]],
    }
    assert payload == b"payload"


def test_many_small_frames_in_one_write_cost_one_read() -> None:
    some = [({"number": number}, b"x" * number) for number in range(200)]
    source = Trickle(wire_bytes(*some))
    reader = Reader(source)
    assert [reader.receive() for _ in some] == some
    assert source.calls == 1


def test_frames_of_all_sizes_around_the_buffers(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    sizes = [0, 1, *(BUFFER_BYTES + more for more in (-20, -1, 0, 1)), 3, 10 * BUFFER_BYTES + 7, 2]
    some = [({"size": size}, bytes(number % 251 for number in range(size))) for size in sizes]

    def send() -> None:
        for header, payload in some:
            send_frame(ours, header, payload)

    sender = threading.Thread(target=send)
    sender.start()
    reader = Reader(theirs)
    for header, payload in some:
        got, data = reader.receive()
        assert got == header
        assert data == payload
    sender.join()


def test_a_header_larger_than_the_buffer() -> None:
    header = {"requests": ["x" * 50_000, "y" * 50_000]}
    reader = Reader(Trickle(wire_bytes((header, b"abc"), ({}, b"next"))))
    assert reader.receive() == (header, b"abc")
    assert reader.receive() == ({}, b"next")


def test_frames_split_at_every_byte() -> None:
    some = [({"number": 1}, b"abc"), ({}, b""), ({"number": 3}, b"defgh")]
    data = wire_bytes(*some)
    for first in range(1, len(data)):
        for second in (1, 2, 3, len(data) - first):
            reader = Reader(Trickle(data, first, second))
            assert [reader.receive() for _ in some] == some, (first, second)


def test_a_payload_larger_than_the_buffer_split_at_every_thousandth_byte() -> None:
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
def test_whatever_comes_with_whatever(sizes: list[int], chunks: list[int]) -> None:
    some = [({"at": at}, bytes([at]) * size) for at, size in enumerate(sizes)]
    reader = Reader(Trickle(wire_bytes_fast(*some), *chunks))
    for header, payload in some:
        assert reader.receive() == (header, payload)
    with pytest.raises(ProcessGoneError):
        reader.receive()


def wire_bytes_fast(*some: tuple[frames.Header, bytes]) -> bytes:
    """As `wire_bytes`, for what does not fit in a socket's buffer."""

    class Sink:
        data = b""

        def sendall(self, data: bytes) -> None:
            self.data += data

    sink = Sink()
    for header, payload in some:
        send_frame(sink, header, payload)  # type: ignore[arg-type]
    return sink.data


def test_a_frame_received_is_not_touched_by_the_next() -> None:
    reader = Reader(Trickle(wire_bytes(({}, b"first"), ({}, b"other"))))
    _, first = reader.reader.receive()
    reader.reader.receive()
    assert first == b"first"


def test_a_hang_up_at_every_byte_is_a_process_gone() -> None:
    data = wire_bytes(({"number": 1}, b"abc"))
    for length in range(len(data)):
        with pytest.raises(ProcessGoneError, match="hung up"):
            Reader(Trickle(data[:length])).receive()


def test_a_hang_up_within_a_large_payload() -> None:
    data = wire_bytes_fast(({}, bytes(200_000)))
    with pytest.raises(ProcessGoneError, match="hung up"):
        Reader(Trickle(data[:-1])).receive()


def test_what_came_before_the_hang_up_is_still_received(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    send_frame(ours, {"last": True}, b"words")
    ours.close()
    reader = Reader(theirs)
    assert reader.receive() == ({"last": True}, b"words")
    with pytest.raises(ProcessGoneError):
        reader.receive()


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_sending_to_who_hung_up_is_a_process_gone(
    pair: tuple[socket.socket, socket.socket], size: int
) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(ProcessGoneError):
        send_frame(ours, {}, bytes(size))


def test_a_closed_socket_is_a_process_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    reader = Reader(ours)
    ours.close()
    with pytest.raises(ProcessGoneError):
        reader.receive()


def test_what_an_exception_said_travels_whatever_it_was(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    send_frame(ours, {"failures": {0: ("INTERNAL", "half a pair: \ud800!")}})
    header, _ = Reader(theirs).receive()
    assert header == {"failures": {0: ["INTERNAL", "half a pair: ?!"]}}


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
def test_values_come_back_as_they_went(value: Any) -> None:
    assert frames.unpack_values(frames.pack_values(value)) == value


@given(numbers)
@settings(deadline=None)
def test_arrays_come_back_as_they_went(array: Any) -> None:
    got = frames.unpack_values(frames.pack_values([array, {"x": array}]))
    for one in (got[0], got[1]["x"]):
        assert one.dtype == array.dtype.newbyteorder("<") and one.shape == array.shape
        np.testing.assert_array_equal(one, array)


def test_arrays_that_lie_anyhow_in_memory() -> None:
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
def test_numpys_scalars_become_pythons(scalar: Any, plain: Any) -> None:
    got = frames.unpack_values(frames.pack_values([scalar, {"x": (scalar,)}]))
    assert got == [plain, {"x": [plain]}]
    assert type(got[0]) is type(plain)


def test_nan_and_infinity_travel() -> None:
    nan, infinity = frames.unpack_values(frames.pack_values([math.nan, -math.inf]))
    assert math.isnan(nan) and infinity == -math.inf


@pytest.mark.parametrize("dtype", ["<U3", "S3", object])
def test_arrays_of_text_become_what_they_are_in_a_body(dtype: Any) -> None:
    array = np.array([["a", "bc"], ["", "def"]]).astype(dtype)
    assert frames.unpack_values(frames.pack_values(array)) == {
        "datatype": "BYTES",
        "shape": [2, 2],
        "data": ["a", "bc", "", "def"],
    }


def test_texts_of_objects_keep_the_zeros_at_their_end() -> None:
    got = frames.unpack_values(frames.pack_values(np.array(["a\0", "b"], object)))
    assert got["data"] == ["a\0", "b"]


class Tensor:
    """As torch's."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, *_: Any, **__: Any) -> Any:
        if isinstance(self.array, Exception):
            raise self.array
        return self.array


def test_what_can_become_an_array_does() -> None:
    got = frames.unpack_values(frames.pack_values([Tensor(np.array([1.5, 2]))]))
    np.testing.assert_array_equal(got[0], [1.5, 2])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "a object cannot be sent"),
        ({1, 2}, "a set cannot be sent"),
        (2**64, "beyond 64 bits"),
        ("\ud800", "surrogates"),
        (np.array([1j]), "dtype complex128 cannot be sent"),
        (np.array([object()]), "dtype object cannot be sent"),
        (np.datetime64("2020-01-01"), "datetime.date"),
        (Tensor(RuntimeError("it requires a gradient")), "a Tensor cannot be sent: it requires a gradient"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_says_so(value: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError), match=said):
        frames.pack_values([value])


def test_each_value_on_its_own_where_one_cannot_be_read() -> None:
    good = [1, "two", [3.0, {"x": np.arange(3)}], None]
    data = frames.pack_values([*good[:2], {("a", "tuple"): 1}, *good[2:], msgpack.ExtType(1, b"no tensor")])
    with pytest.raises(TypeError, match="unhashable"):
        frames.unpack_values(data)
    first, second, third, fourth, fifth, sixth = frames.unpack_each(bytearray(data))
    assert (first, second, fifth) == (1, "two", None)
    np.testing.assert_array_equal(fourth[1]["x"], [0, 1, 2])
    assert isinstance(third, TypeError) and isinstance(sixth, Exception)


# --- stacked tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", sorted(WIDTHS))
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 1, 2)])
def test_stacked_arrays_come_back_as_they_went(datatype: str, shape: tuple[int, ...]) -> None:
    kind = {"BOOL": "bool", "FP16": "f2", "FP32": "f4", "FP64": "f8", "BF16": "f4"}.get(
        datatype, datatype.lower()
    )
    array = np.arange(4 * math.prod(shape)).reshape((4, *shape)).astype(kind)
    parts, data = frames.stack({"x": array, "n": np.arange(4)}, {"x": datatype})
    assert parts == [("x", datatype, shape), ("n", "INT64", ())]
    assert len(data) == frames.part_bytes(parts[0], 4) + frames.part_bytes(parts[1], 4)
    got = frames.unstack(parts, 4, bytearray(data))
    assert got["x"].dtype == array.dtype and got["x"].shape == array.shape
    np.testing.assert_array_equal(got["x"], array)
    np.testing.assert_array_equal(got["n"], [0, 1, 2, 3])


def test_what_is_declared_wins_over_what_was_returned() -> None:
    parts, data = frames.stack({"y": np.array([0.5, 2.0])}, {"y": "FP32"})
    assert parts == [("y", "FP32", ())]
    assert data == np.array([0.5, 2.0], "<f4").tobytes()


def test_texts_unstack_as_objects_beside_numbers() -> None:
    texts = frames.pack_values(["a\0", "", "é", "long" * 100]) + frames.pack_values(["x", "y", "z", ""])
    parts: list[frames.Part] = [("t", "BYTES", (2, 2)), ("n", "INT16", ()), ("u", "BYTES", ())]
    data = texts + np.array([7, 8], "<i2").tobytes() + frames.pack_values(["1"]) + frames.pack_values(["2"])
    got = frames.unstack(parts, 2, bytearray(data))
    assert got["t"].tolist() == [[["a\0", ""], ["é", "long" * 100]], [["x", "y"], ["z", ""]]]
    assert got["n"].tolist() == [7, 8]
    assert got["u"].tolist() == ["1", "2"]


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j]), np.array([object()])])
def test_what_does_not_stack_is_refused(array: Any) -> None:
    with pytest.raises(ValueError, match=r"do not stack|cannot be sent"):
        frames.stack({"y": array}, {})
