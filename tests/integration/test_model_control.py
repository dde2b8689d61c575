"""Clients load and unload models of a node through a gateway, as they do with Triton and AMD's server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any, Final, NamedTuple

import grpc
import pytest

from carpool.keys import Keys, NodesKeys
from carpool.wire.nodes import Wanted, decode_snapshot
from support.command import carpool
from support.http import Answer, Connection, call, request
from support.rpc import Rpc
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until

MODEL: Final = """
import time
from pathlib import Path

class Echo:
    def load(self, device: str, *, mark: str = "", gate: str = ""):
        self.mark = mark
        wait_at(gate)

    def predict(self, batch):
        for body in batch:
            if isinstance(body, dict):
                wait_at(body["gate"])
        return [[VERSION, self.mark] for body in batch]

def wait_at(gate):
    if gate:
        Path(gate).with_name("reached").touch()
    while gate and not Path(gate).exists():
        time.sleep(0.01)
"""
BROKEN: Final = """
class Echo:
    def load(self, device: str):
        raise RuntimeError("no weights here")

    def predict(self, batch):
        return batch
"""
# Names that Triton's own tests send, and others that would lead elsewhere.
BAD_NAMES: Final = (
    *("../etc", "a/../b", "../../etc/passwd", "model/..", "..", "/etc/passwd", "model/subdir", "model/"),
    *(" ..", " ", "\t", "echo\0", "...", "a" * 256, "echo "),
)


class Served(NamedTuple):
    stack: Stack
    gateway: Service

    def post(self, path: str, document: Any = None) -> Answer:
        body = b"" if document is None else json.dumps(document).encode()
        return call(self.gateway.url, "POST", path, body)

    def load(self, name: str = "echo", version: str = "", document: Any = None) -> Answer:
        within = f"/versions/{version}" if version else ""
        return self.post(f"/v2/repository/models/{name}{within}/load", document)

    def unload(self, name: str = "echo") -> Answer:
        return self.post(f"/v2/repository/models/{name}/unload")

    def infer(self, name: str = "echo", body: Any = 7) -> Answer:
        return self.post(f"/carpool/v1/models/{name}/infer", body)

    def states(self, *, ready: bool = False) -> dict[str, str]:
        """The states in the index, by names and versions."""
        found = self.post("/v2/repository/index", {"ready": ready}).json
        return {f"{row['name']} {row['version']}": row["state"] for row in found}

    def reason(self, title: str) -> str:
        found = self.post("/v2/repository/index").json
        return next(str(row["reason"]) for row in found if f"{row['name']} {row['version']}" == title)

    def is_ready(self, name: str = "echo") -> bool:
        return call(self.gateway.url, "GET", f"/v2/models/{name}/ready").code == 200

    def wanted(self) -> dict[str, Wanted]:
        """What nodes are to serve, by the name of the model."""
        reply = self.stack.redis.hgetall(NodesKeys().wanted)
        flat = [part for pair in reply.items() for part in pair]
        snapshot = decode_snapshot([(b"0", b"0"), flat, [], [], []])
        return {one.model: one for one in snapshot.wanted}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("control")
    repository = home / "repository"
    versions = [("echo", "1", MODEL), ("echo", "2", MODEL), ("echo", "3", BROKEN), ("plain", "1", MODEL)]
    for name, version, text in versions:
        folder = repository / name / version
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(f'VERSION = "{version}"\n{text}')
        (repository / name / "carpool.toml").write_text('object = "model.py:Echo"\n')
    with Stack(home / "stack") as stack:
        stack.serve("square")
        stack.worker("--repository", str(repository), "--room", "6", ready=False)
        gateway = stack.gateway("--model-control", "--grpc-port", "0")
        served = Served(stack, gateway)
        wait_until(lambda: "echo 3" in served.states(), description="the node has reported its entries")
        assert served.states() == {"echo 3": "UNKNOWN", "plain 1": "UNKNOWN", "square 1": "READY"}
        yield served


@pytest.fixture(autouse=True)
def _unloaded(served: Served) -> Iterator[None]:
    yield
    for name in served.wanted():
        assert served.unload(name).code == 200


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@contextmanager
def meanwhile(ask: Callable[[], Answer]) -> Iterator[list[Answer]]:
    """Requests one after the other while the block runs; their answers are there after it."""
    answers: list[Answer] = []
    stop = Event()

    def repeat() -> None:
        while not stop.is_set():
            answers.append(ask())

    with ThreadPoolExecutor(1) as pool:
        repeating = pool.submit(repeat)
        try:
            wait_until(lambda: answers, description="a request was answered")
            yield answers
        finally:
            stop.set()
        repeating.result()


@contextmanager
def started(ask: Callable[[], Answer]) -> Iterator[Future[Answer]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask)


def test_a_model_is_loaded_replaced_and_unloaded(served: Served) -> None:
    assert not served.is_ready()
    first = served.load(version="1")
    assert (first.code, first.body) == (200, b"")
    assert served.is_ready()
    assert served.infer().json == ["1", ""]
    assert served.states(ready=True) == {"echo 1": "READY", "square 1": "READY"}
    served.stack.redis.hset(Keys("echo").shares, "1", 100)  # of what was served before
    with meanwhile(served.infer) as answers:
        assert served.load(version="2", document={}).code == 200
        assert served.infer().json == ["2", ""]
    assert {answer.code for answer in answers} == {200}
    assert {answer.json[0] for answer in answers} <= {"1", "2"}
    assert not served.stack.redis.exists(Keys("echo").shares)
    (ended, *_) = json.loads(carpool(served.stack.url, "audit", "echo", "--json").stdout)
    assert (ended["action"], ended["via"], ended["details"]) == ("share", "gateway", {"1": "100 -> none"})
    wait_until(
        lambda: call(served.gateway.url, "GET", "/v2/models/echo").json["versions"] == ["2"],
        description="the version that is gone is not registered any more",
    )
    assert call(served.gateway.url, "GET", "/v2/models").json == {"models": ["echo", "square"]}
    with_dependents = {"parameters": {"unload_dependents": True}}
    assert served.post("/v2/repository/models/echo/unload", with_dependents).code == 200
    assert not served.is_ready()
    assert served.states().get("echo 2") == "UNAVAILABLE"
    assert served.reason("echo 2") == "unloaded"
    assert served.unload().code == 200
    assert served.unload("unknown").code == 200


def test_a_load_that_fails_leaves_what_serves(served: Served) -> None:
    assert served.load(version="1").code == 200
    with meanwhile(served.infer) as answers:
        failed = served.load()  # the newest version, 3
    assert failed.code == 500
    assert failed.json["error"].startswith("load failed for model 'echo': ")
    assert "no weights here" in failed.json["error"]
    assert {(answer.code, answer.json[0]) for answer in answers} == {(200, "1")}
    assert (served.states().get("echo 1"), served.is_ready()) == ("READY", True)
    wait_until(
        lambda: served.states().get("echo 3") == "UNAVAILABLE", description="the index tells of the failure"
    )
    assert "no weights here" in served.reason("echo 3")


def test_what_is_not_in_a_repository_is_not_loaded(served: Served) -> None:
    unknown = served.load("unknown")
    assert unknown.code == 404
    assert "failed to load 'unknown', failed to poll from model repository" in unknown.json["error"]
    assert served.load(version="7").code == 404
    refused = served.unload("square")
    assert (refused.code, refused.json["error"]) == (
        400,
        "failed to unload 'square': it is served by workers that no node started; stop these",
    )
    assert served.is_ready("square")
    for path in ("index", "models/echo/load", "models/echo/versions/1/unload"):
        assert served.post(f"/v2/repository/other/{path}").code == 501
    assert served.wanted() == {}


def test_names_that_lead_elsewhere(served: Served) -> None:
    with Rpc(served.gateway) as rpc:
        for name in BAD_NAMES:
            path = "".join(f"%{byte:02x}" for byte in name.encode())
            for action in ("load", "unload"):
                assert served.post(f"/v2/repository/models/{path}/{action}").code == 404, name
                assert served.post(f"/v2/workers/{path}/{action}").code == 404, name
            for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
                with pytest.raises(grpc.RpcError) as error:
                    rpc.call(method, model_name=name)
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
    for path in ("../etc", "%2e%2e", "..", "model..1", ""):
        assert 400 <= served.post(f"/v2/repository/models/{path}/load").code < 500, path
    assert served.load(version="..").code == 404
    assert served.wanted() == {}


def test_calls_of_grpc(served: Served) -> None:
    with Rpc(served.gateway) as rpc:
        assert rpc.call("ServerMetadata").extensions[-1] == "statistics"
        assert "model_repository(unload_dependents)" in rpc.call("ServerMetadata").extensions
        config = {
            "version_policy": {"specific": {"versions": [1]}},
            "instance_group": [{"count": 2}],
            "parameters": {"mark": {"string_value": "a b"}},
            "max_batch_size": 3,
        }
        rpc.call(
            "RepositoryModelLoad", model_name="echo", parameters=parameter(string_param=json.dumps(config))
        )
        assert served.infer().json == ["1", "a b"]
        assert served.wanted()["echo"].replicas == 2
        assert config_of(served)["max_batch_size"] == 3
        index = {f"{row.name} {row.version}": row.state for row in rpc.call("RepositoryIndex").models}
        assert index == served.states()
        for fields, status in (
            ({"model_name": "unknown"}, "NOT_FOUND"),
            ({"model_name": "echo", "repository_name": "r"}, "UNIMPLEMENTED"),
            ({"model_name": "echo", "parameters": parameter(bool_param=True)}, "INVALID_ARGUMENT"),
            (
                {"model_name": "echo", "parameters": parameter("file:1/a", bytes_param=b"x")},
                "INVALID_ARGUMENT",
            ),
        ):
            with pytest.raises(grpc.RpcError) as error:
                rpc.call("RepositoryModelLoad", **fields)
            assert error.value.code().name == status, fields
        rpc.call(
            "RepositoryModelUnload",
            model_name="echo",
            parameters=parameter("unload_dependents", bool_param=True),
        )
        assert not rpc.call("ModelReady", name="echo").ready


def config_of(served: Served) -> Any:
    return call(served.gateway.url, "GET", "/v2/models/echo/config").json


def test_a_configuration_is_changed_and_sent_back(served: Served) -> None:
    assert served.load(version="1").code == 200
    config = config_of(served)
    assert config["max_batch_size"] != 5
    config["max_batch_size"] = 5
    config["dynamic_batching"]["max_queue_delay_microseconds"] = 2000
    sent = served.load(version="2", document={"parameters": {"config": json.dumps(config)}})
    assert (sent.code, sent.body) == (200, b"")
    assert served.infer().json == ["2", ""]
    assert config_of(served)["max_batch_size"] == 5
    assert served.wanted()["echo"].settings["max_queue_delay_ms"] == "2"
    wrong = {"parameters": {"config": json.dumps({**config, "max_batch_size": 0})}}
    assert served.load(version="1", document=wrong).code == 400
    assert served.load(version="2").code == 200
    assert served.wanted()["echo"].settings == {}  # a load says everything


def parameter(name: str = "config", **value: Any) -> dict[str, Any]:
    return {name: value}


def test_who_goes_away_or_waits_too_long_does_not_end_a_load(served: Served, gate: Path) -> None:
    impatient = served.stack.gateway("--model-control", "--grpc-port", "0", "--load-timeout-s", "0.2")
    assert served.load(version="1").code == 200
    load = request(
        "POST", "/v2/repository/models/echo/versions/2/load", json.dumps({"gate": str(gate)}).encode()
    )
    with Connection(served.gateway.url) as connection:
        connection.send(load)
        wait_until(
            lambda: served.states().get("echo 2") == "LOADING", description="version 2 is being loaded"
        )
    with Connection(impatient.url) as connection:
        connection.send(load)  # the same, so it is one load
        late = connection.answer()
    assert (late.code, "The load goes on" in late.json["error"]) == (504, True)
    config = {
        "version_policy": {"specific": {"versions": [2]}},
        "parameters": {"gate": {"string_value": str(gate)}},
    }
    with Rpc(served.gateway) as rpc, pytest.raises(grpc.RpcError) as error:
        of_load = parameter(string_param=json.dumps(config))
        rpc.call("RepositoryModelLoad", timeout=0.2, model_name="echo", parameters=of_load)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.infer().json == ["1", ""]
    gate.touch()
    wait_until(lambda: served.infer().json == ["2", ""], description="version 2 serves")
    impatient.kill()


def test_two_loads_at_once_are_both_answered(served: Served, gate: Path) -> None:
    with started(lambda: served.load(version="1", document={"gate": str(gate)})) as first:
        wait_until(
            lambda: served.states().get("echo 1") == "LOADING", description="version 1 is being loaded"
        )
        assert served.load(version="2").code == 200
        assert first.result(EVENTUALLY_S).code == 200
    assert served.infer().json == ["2", ""]


def test_an_unload_ends_a_load(served: Served, gate: Path) -> None:
    with started(lambda: served.load(version="1", document={"gate": str(gate)})) as load:
        wait_until(
            lambda: served.states().get("echo 1") == "LOADING", description="version 1 is being loaded"
        )
        assert served.unload().code == 200
        assert (load.result(EVENTUALLY_S).code, load.result().json["status"]) == (409, "ABORTED")
    assert not served.is_ready()


def test_requests_that_run_are_answered_before_an_unload(served: Served, gate: Path) -> None:
    assert served.load(version="1").code == 200
    with started(lambda: served.infer(body={"gate": str(gate)})) as infer:
        wait_until(gate.with_name("reached").exists, description="the request runs")
        with started(served.unload) as unload:
            wait_until(
                lambda: served.states().get("echo 1") == "UNLOADING",
                description="version 1 is being unloaded",
            )
            assert not unload.done()
            gate.touch()
            assert infer.result(EVENTUALLY_S).json == ["1", ""]
            assert unload.result(EVENTUALLY_S).code == 200
    assert not served.is_ready()


def test_amds_clients_get_a_name_for_each_set_of_parameters(served: Served) -> None:
    def load(**parameters: Any) -> str:
        answer = served.post("/v2/workers/plain/load", parameters)
        assert answer.code == 200, answer
        return answer.body.decode()

    assert [load(mark="a"), load(mark="a"), load(mark=5), load(mark="a")] == [
        "plain", "plain", "plain-0", "plain",
    ]  # fmt: skip
    assert load(mark=5, share=False) == "plain-0"
    assert served.infer("plain").json == ["1", "a"]
    assert served.infer("plain-0").json == ["1", "5"]
    assert {name: one.replicas for name, one in served.wanted().items()} == {"plain": 1, "plain-0": 2}
    for replicas in (1, None):
        assert served.post("/v2/workers/plain-0/unload").code == 200
        assert getattr(served.wanted().get("plain-0"), "replicas", None) == replicas
    wait_until(lambda: not served.is_ready("plain-0"), description="plain-0 is gone")
    assert call(served.gateway.url, "GET", "/v2/models").json == {"models": ["plain", "square"]}
    refused = served.post("/v2/workers/plain/load", {"nonsense": 1})
    assert refused.code == 500
    assert "nonsense" in refused.json["error"]


def test_a_key_needs_the_scope_load(served: Served, tmp_path: Path) -> None:
    lines = []
    for name, rights in {"user": "", "operator": 'scopes = ["infer", "load"]\nmodels = ["echo"]'}.items():
        lines.append(f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(name.encode()).hexdigest()}"\n{rights}')
    (tmp_path / "keys.toml").write_text("\n".join(lines))
    gateway = served.stack.gateway(
        "--model-control", "--keys", str(tmp_path / "keys.toml"), "--grpc-port", "0"
    )

    def post(path: str, key: str) -> Answer:
        return call(gateway.url, "POST", path, Authorization=f"Bearer {key}")

    load = "/v2/repository/models/echo/versions/1/load"
    assert call(gateway.url, "POST", load).code == 401
    assert "scope load" in post(load, "user").json["error"]
    assert post(load, "user").code == post("/v2/repository/models/square/load", "operator").code == 403
    assert post("/v2/workers/echo/unload", "user").code == 403
    assert post(load, "operator").code == 200
    refused = call(
        gateway.url, "POST", "/v2/workers/echo/load", b'{"mark":"x"}', Authorization="Bearer operator"
    )
    assert (refused.code, "echo-0" in refused.json["error"]) == (403, True)  # it is for the model echo only
    assert {row["name"] for row in post("/v2/repository/index", "operator").json} == {"echo"}
    with Rpc(gateway) as rpc, pytest.raises(grpc.RpcError) as error:
        rpc.call("RepositoryModelUnload", model_name="echo", metadata=[("authorization", "Bearer user")])
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    (action, *_) = json.loads(carpool(served.stack.url, "audit", "--json").stdout)
    assert (action["action"], action["who"], action["via"]) == ("load", "operator", "gateway")
    gateway.kill()


def test_control_is_off_unless_it_is_wanted(served: Served) -> None:
    gateway = served.stack.gateway()
    answer = call(gateway.url, "POST", "/v2/repository/models/echo/load")
    assert (answer.code, "--model-control" in answer.json["error"]) == (501, True)
    assert "model_repository" not in call(gateway.url, "GET", "/v2").json["extensions"]
    assert call(gateway.url, "POST", "/v2/repository/index").code == 200
    gateway.kill()
