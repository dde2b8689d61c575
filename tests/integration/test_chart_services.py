"""What the Helm chart tells its services: with it they start, answer its probes, serve, and end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from carpool.keys import Keys
from carpool_console.users import hash_of
from support import chart
from support.http import Connection
from support.repository import make_repository
from support.stack import Service, Stack
from support.waiting import wait_until

chart.needs_tools()
import yaml  # noqa: E402

PARTS: Final = ("gateway", "batcher", "worker", "node", "console")
# Ports are fixed in a pod, and free ones here.
FREE: Final = {"8000": "0", "8001": "0", "8800": "0"}

Object = dict[str, Any]


def values(url: str) -> Object:
    model = {"name": "small.Hashing", "module": "hashing.py:Hashing"}
    return {
        "redis": {"url": url, "prefix": "acme"},
        "listenAddress": "127.0.0.1",
        "gateway": {"anonymous": True, "modelControl": True},
        "models": [{**model, "settings": {"max_batch_size": 8}, "workerSettings": {"lease_ms": "2s"}}],
        "nodes": {"enabled": True, "room": 1, "volume": {"emptyDir": {}}},
        "console": {"enabled": True, "users": {"existingSecret": "users"}},
    }


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("chart"), append_only=False) as stack:
        yield stack


@pytest.fixture(scope="module")
def started(stack: Stack) -> Iterator[dict[str, tuple[Service, Object]]]:
    """Each part's process and its container. At the end each is to end by itself."""
    (rendered,), _ = chart.render_all([values(stack.url)])
    assert not rendered.error, rendered.error
    containers = [
        container
        for text in rendered.texts.values()
        for each in (yaml.load_all(text, yaml.CSafeLoader) if "kind: Deployment" in text else ())
        if each and each["kind"] == "Deployment"
        for container in each["spec"]["template"]["spec"]["containers"]
    ]
    assert sorted(each["name"] for each in containers) == sorted(PARTS)
    users = stack.home / "users"
    users.write_text(f'[[users]]\nname = "ann"\nrole = "operator"\npassword = "{hash_of("word")}"\n')
    repository = make_repository(stack.home / "models", versions=1)
    replaced = {"/models": str(repository), "/var/lib/carpool/users": str(users), **FREE}
    parts = {each["name"]: (start(stack, each, replaced), each) for each in containers}
    yield parts
    for part in ("console", "gateway", "node", "worker", "batcher"):  # so nothing waits for another
        assert parts[part][0].terminate() == 0, parts[part][0].end_of_log()


def start(stack: Stack, container: Object, replaced: Mapping[str, str]) -> Service:
    """The process of a container, with its arguments and variables, but for paths and ports."""
    role, *arguments = [replaced.get(each, each) for each in container["args"]]
    variables = {each["name"]: each["value"] for each in container["env"]}
    stack.environment = {role: {**variables, "CARPOOL_HTTP_PORT": "0"}}
    start_part: Any = getattr(stack, role)
    service: Service = start_part(*arguments, ready=False)
    return service


def is_answered(service: Service, path: str) -> bool:
    with Connection(service.status_url) as connection:
        return connection.request("GET", path).code == 200


@pytest.mark.parametrize("part", PARTS)
def test_probes_are_answered(started: dict[str, tuple[Service, Object]], part: str) -> None:
    service, container = started[part]
    probed = {container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert probed == {"/healthz", "/readyz"}
    for path in (*probed, "/metrics"):
        wait_until(lambda: is_answered(service, path), description=f"{part} answers {path}")  # noqa: B023


def test_a_request_is_answered_with_the_settings_of_the_values(
    started: dict[str, tuple[Service, Object]], stack: Stack
) -> None:
    gateway, container = started["gateway"]
    assert [each["name"] for each in container["ports"]] == ["http", "grpc", "metrics"]
    assert gateway.wait_for("gateway started")["grpc"]
    started["worker"][0].wait_for("worker ready")
    with Connection(gateway.url) as connection:
        answer = connection.request("POST", "/carpool/v1/models/small.Hashing/infer", b'"a"')
        assert answer.code == 200, answer.body
    keys = Keys("small.Hashing", "acme")
    assert stack.redis.hget(keys.registration, "max_batch_size") == b"8"


def test_clients_load_a_model_of_the_nodes(started: dict[str, tuple[Service, Object]]) -> None:
    started["node"][0].wait_for("node started")
    with Connection(started["gateway"][0].url) as connection:
        loaded = connection.request("POST", "/v2/repository/models/echo/load", b"{}")
        assert loaded.code == 200, loaded.body
        answer = connection.request("POST", "/carpool/v1/models/echo/infer", b'"a"')
        assert answer.body == b'"1:a"'
