"""Requests to load and unload models, as clients of Triton and of AMD's inference server write them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from carpool.model_settings import ModelKind
from carpool.wire.nodes import NodeReport, Seat, SeatName, SeatState, Snapshot, Wanted
from carpool.wire.tensors import TensorSpec
from carpool_gateway.oip.control import check_unload, decode_flat, decode_load, endpoint_for
from carpool_gateway.oip.documents import READY as IS_READY
from carpool_gateway.oip.documents import UNAVAILABLE, IndexEntry, model_config
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.index import index_of
from carpool_gateway.oip.load_config import LoadRequest
from support.oip import offered

MODEL = offered([TensorSpec("x", "FP32", (4,))], [TensorSpec("y", "FP32", (4,))])


def with_config(config: Any, **more: Any) -> bytes:
    text = config if isinstance(config, str) else json.dumps(config)
    return json.dumps({"parameters": {"config": text, **more}}).encode()


def load(config: Any, version: str | None = None) -> LoadRequest:
    return decode_load(with_config(config), "m", version, MODEL)


@pytest.mark.parametrize(
    "body", [b"", b" ", b"{}", b"null", b'{"parameters":{}}', b'{"parameters":{},"x":[]}']
)
def test_a_load_without_parameters(body: bytes) -> None:
    assert decode_load(body, "m", None, None) == LoadRequest()
    assert decode_load(body, "m", "2", None) == LoadRequest("2")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, LoadRequest()),
        ({"name": "m", "platform": "onnxruntime_onnx", "backend": ""}, LoadRequest()),
        ({"version_policy": {"latest": {"num_versions": 1}}}, LoadRequest()),
        ({"version_policy": {"specific": {"versions": [2]}}}, LoadRequest("2")),
        ({"instance_group": [{"count": 2}, {"kind": "KIND_AUTO"}]}, LoadRequest(replicas=3)),
        ({"parameters": {"path": {"string_value": "a b"}}}, LoadRequest(parameters={"path": "a b"})),
        ({"max_batch_size": 8}, LoadRequest(settings={"max_batch_size": "8"})),
        ({"response_cache": {"enable": False}}, LoadRequest()),
        (
            {"sequence_batching": {"max_sequence_idle_microseconds": "5000000"}},
            LoadRequest(settings={"max_sequence_idle_ms": "5000"}),
        ),
        (
            {
                "dynamic_batching": {
                    "preferred_batch_size": [4, 8],
                    "max_queue_delay_microseconds": 1500,
                    "preserve_ordering": True,
                    "default_queue_policy": {
                        "timeout_action": "DELAY",
                        "default_timeout_microseconds": 2000,
                        "allow_timeout_override": False,
                        "max_queue_size": 7,
                    },
                }
            },
            LoadRequest(
                settings={
                    "preferred_batch_sizes": "4,8",
                    "max_queue_delay_ms": "1.5",
                    "preserve_ordering": "true",
                    "expiration_action": "delay",
                    "default_expiration_ms": "2",
                    "allow_expiration_override": "false",
                    "max_queue_size": "7",
                }
            ),
        ),
    ],
)
def test_what_of_a_configuration_has_a_counterpart(config: Any, expected: LoadRequest) -> None:
    assert load(config) == expected


@pytest.mark.parametrize("kind", [ModelKind.PLAIN, ModelKind.STATEFUL])
def test_a_configuration_can_be_sent_back(kind: ModelKind) -> None:
    model = offered(MODEL.inputs, MODEL.outputs, kind, max_batch_size="7")
    request = decode_load(with_config(model_config(model).decode()), "m", None, model)
    assert request.settings["max_batch_size"] == "7"
    assert (request.version, request.replicas, request.parameters) == (None, None, {})


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("{", "config: not JSON"),
        ("[]", "config: must be a JSON object"),
        ({"optimization": {}}, "config.optimization: has no counterpart"),
        ({"name": "other"}, "config.name: must be 'm'"),
        ({"backend": "tensorrt"}, "config.backend: has no counterpart"),
        ({"max_batch_size": 0}, "config.max_batch_size: must be a whole number of at least 1"),
        ({"max_batch_size": True}, "config.max_batch_size"),
        ({"version_policy": {"all": {}}}, "config.version_policy: has no counterpart"),
        ({"version_policy": {"specific": {"versions": [1, 2]}}}, "config.version_policy: has no counterpart"),
        ({"version_policy": {"specific": []}}, "config.version_policy"),
        ({"instance_group": [{"gpus": [0]}]}, "config.instance_group[0].gpus: has no counterpart"),
        ({"instance_group": [{"kind": "KIND_GPU"}]}, "config.instance_group[0].kind: has no counterpart"),
        ({"instance_group": [{"count": 300}]}, "config.instance_group: has 300 instances"),
        ({"dynamic_batching": {"priority_levels": 3}}, "config.dynamic_batching.priority_levels: has no"),
        (
            {"dynamic_batching": {"preserve_ordering": 1}},
            "config.dynamic_batching.preserve_ordering: must be",
        ),
        ({"sequence_batching": {"direct": {}}}, "config.sequence_batching.direct: has no counterpart"),
        ({"parameters": {"a": "b"}}, 'config.parameters.a: must be {"string_value": "TEXT"}'),
        ({"input": []}, "config.input: has no counterpart here: the model declares it"),
        ({"response_cache": {"enable": True}}, "config.response_cache: has no counterpart"),
    ],
)
def test_all_else_is_refused_by_its_name(config: Any, names: str) -> None:
    with pytest.raises(ProtocolError) as error:
        load(config)
    assert error.value.detail.startswith(f"failed to load 'm': {names}")


ODD_VALUES: list[Any] = [None, [], {}, 1, "x", True, -1, 1.5, [None], [[]], {"a": None}, {"versions": [[]]}]
PLACES = (
    *((name,) for name in ("name", "backend", "version_policy", "max_batch_size", "input", "response_cache")),
    *(
        ("version_policy", "specific"),
        ("parameters",),
        ("parameters", "x"),
        ("parameters", "x", "string_value"),
    ),
    *(
        ("instance_group",),
        ("instance_group", 0),
        ("instance_group", 0, "count"),
        ("instance_group", 0, "kind"),
    ),
    *(
        ("dynamic_batching", name)
        for name in ("preferred_batch_size", "preserve_ordering", "priority_levels")
    ),
    *(
        ("dynamic_batching", "default_queue_policy"),
        ("dynamic_batching", "default_queue_policy", "timeout_action"),
    ),
    ("sequence_batching",),
)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_odd_values_are_read_or_refused(place: tuple[Any, ...]) -> None:
    for odd in ODD_VALUES:
        config = odd
        for step in reversed(place):
            config = [config] if step == 0 else {step: config}
        with suppress(ProtocolError):
            load(config)


def test_a_version_is_named_once() -> None:
    assert load({"version_policy": {"specific": {"versions": [2]}}}, "2").version == "2"
    with pytest.raises(ProtocolError, match=r"version_policy: is version 2, but the path says 1"):
        load({"version_policy": {"specific": {"versions": [2]}}}, "1")


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"[]", "the request: must be a JSON object"),
        (b'{"parameters":{"config":{}}}', "config: must be a text"),
        (with_config("{}", **{"file:1/model.onnx": "AAAA"}), "file:1/model.onnx: the gateway takes no files"),
        (b'{"parameters":{"weights":"a"}}', "weights: there is no such parameter of a load"),
        (b'{"threads":[1]}', "threads: must be a text, a number, true or false"),
        (b'{"share":1}', "share: must be true or false"),
        (json.dumps({"x": "y" * 65_536}).encode(), "the parameters of the model have 65537 bytes"),
        (
            with_config({"parameters": {"x": {"string_value": "y" * 65_536}}}),
            "the parameters of the model have 65537 bytes",
        ),
    ],
)
def test_what_is_no_request(body: bytes, names: str) -> None:
    with pytest.raises(ProtocolError) as error:
        decode_load(body, "m", None, None)
    assert error.value.detail.startswith(f"failed to load 'm': {names}")


def test_parameters_of_amd() -> None:
    body = b'{"model":"echo","threads":2,"rate":0.5,"verbose":true,"share":false}'
    expected = {"model": "echo", "threads": "2", "rate": "0.5", "verbose": "true"}
    assert decode_flat(body, "m") == LoadRequest(adds_replica=True, parameters=expected)
    assert decode_load(body, "m", None, None) == decode_flat(body, "m")
    assert decode_flat(b'{"share":true}', "m") == decode_flat(b"", "m") == LoadRequest()


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b'{"parameters":{"unload_dependents":true}}'])
def test_an_unload(body: bytes) -> None:
    check_unload(body)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"parameters":[]}', "parameters: must be a JSON object"),
        (b'{"parameters":{"unload_dependents":1}}', "unload_dependents: must be true or false"),
        (b'{"parameters":{"now":true}}', "now: there is no such parameter of an unload"),
    ],
)
def test_what_is_no_unload(body: bytes, names: str) -> None:
    with pytest.raises(ProtocolError) as error:
        check_unload(body)
    assert error.value.detail.startswith(names)


def wanted(model: str, generation: int, version: str = "1", **more: Any) -> Wanted:
    fields: dict[str, Any] = {"parameters": {}, "replicas": 1, "share": None, "entry": model, **more}
    return Wanted(model=model, generation=generation, version=version, **fields)


def test_each_set_of_parameters_has_an_endpoint() -> None:
    fast, exact = {"mode": "fast"}, {"mode": "exact"}
    assert endpoint_for("m", fast, []) == "m"
    loaded = [wanted("m", 1, parameters=fast)]
    assert endpoint_for("m", fast, loaded) == "m"
    assert endpoint_for("m", exact, loaded) == "m-0"
    loaded.append(wanted("m-0", 2, parameters=exact, entry="m"))
    assert [endpoint_for("m", one, loaded) for one in (fast, exact, {})] == ["m", "m-0", "m-1"]
    assert endpoint_for("m", fast, loaded[1:]) == "m"
    assert endpoint_for("m", {}, [wanted("m", 3, parameters=fast, entry="other")]) == "m-0"


def states(registered: list[IndexEntry], snapshot: Snapshot) -> dict[tuple[str, str], tuple[str, str]]:
    rows = index_of(registered, snapshot)
    found = {(row.name, row.version): (row.state, row.reason) for row in rows}
    assert len(found) == len(rows)
    assert [*found] == sorted(found, key=lambda key: (key[0], int(key[1])))
    return found


SERVED = {1: ("m", "2"), 2: ("m", "2"), 3: ("m-0", "1")}  # by generation, what its processes serve


def snapshot_of(
    loaded: list[Wanted], seats: dict[SeatName, SeatState], reasons: dict[str, str] | None = None
) -> Snapshot:
    """One node, whose repository has `m` in the versions 1, 2 and 10, and `n` in 1."""
    held = {name: Seat(name, state, "node") for name, state in seats.items()}
    entries = {"m": ["1", "2", "10"], "n": ["1"]}
    serves = {str(name): served for name in seats if (served := SERVED.get(name.generation))}
    node = NodeReport("node", 4, entries, reasons or {}, [*held.values()], serves)
    return Snapshot(loaded, held, [node])


def test_index_of_what_was_never_loaded() -> None:
    found = states([IndexEntry("square", IS_READY)], snapshot_of([], {}))
    assert {key: state for key, (state, _) in found.items()} == {
        ("m", "10"): "UNKNOWN",
        ("n", "1"): "UNKNOWN",
        ("square", "1"): "READY",
    }


def test_index_while_a_version_replaces_another() -> None:
    loaded = [wanted("m", 1, "1", is_settled=True, is_leaving=True), wanted("m", 2, "2")]
    seats = {SeatName(1, 0): SeatState.SERVING, SeatName(2, 0): SeatState.LOADING}
    found = states([IndexEntry("m", IS_READY, version="1")], snapshot_of(loaded, seats))
    assert found["m", "1"] == ("READY", "")
    assert found["m", "2"][0] == "LOADING"
    assert "0 of 1 processes" in found["m", "2"][1]
    assert ("m", "10") not in found


def test_index_of_what_could_not_be_loaded() -> None:
    reasons = {"m version 2": "ValueError: no such file"}
    seats = {SeatName(1, 0): SeatState.SERVING}
    found = states([], snapshot_of([wanted("m", 1, is_settled=True)], seats, reasons))
    assert found["m", "1"] == ("READY", "")
    assert found["m", "2"] == ("UNAVAILABLE", "ValueError: no such file")
    assert [*found] == [("m", "1"), ("m", "2"), ("n", "1")]
    assert states([], snapshot_of([wanted("n", 1)], {}))["n", "1"][0] == "LOADING"


def test_index_of_what_was_unloaded() -> None:
    served = [IndexEntry("m", IS_READY, version="2"), IndexEntry("square", IS_READY)]
    found = states(served, snapshot_of([], {SeatName(1, 0): SeatState.DRAINING}))
    assert found["m", "2"][0] == "UNLOADING"
    assert found["square", "1"] == ("READY", "")
    loaded = [wanted("m", 9, "10", is_settled=True)]
    replaced = states(served[1:], snapshot_of(loaded, {SeatName(1, 0): SeatState.DRAINING}))
    assert replaced["m", "2"][0] == "UNLOADING"
    endpoint = states([IndexEntry("m-0", IS_READY)], snapshot_of([], {SeatName(3, 0): SeatState.DRAINING}))
    assert endpoint["m-0", "1"][0] == "UNLOADING"
    gone = [IndexEntry("m", UNAVAILABLE, "no worker serves it now", "2")]
    assert states(gone, snapshot_of([], {}))["m", "2"] == ("UNAVAILABLE", "unloaded")
