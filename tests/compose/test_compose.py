"""docker-compose.yml: images are built, services started, used, scaled under load, killed, and removed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote, urlencode

import pytest
from redis import Redis

from carpool.keys import Keys
from compose.project import ROOT, Container, Project, built
from support.checker import Checker, Report
from support.load import Load, decoded
from support.rpc import Rpc
from support.stack import MODELS, Stack, envelope
from support.waiting import wait_until
from support.websocket import Socket
from support.wire import envelopes

pytestmark = pytest.mark.compose

EXAMPLES: Final = ROOT / "ops/docker/examples"
PUBLISHED: Final = "ops/docker/publish.yml"
VOLUMES: Final = {
    "redis": {"redis-data", "redis-acl", "lock-metrics"},
    "batcher": {"lock-batcher"},
    "worker": {"lock-worker"},
    "gateway": {"lock-gateway"},
    "console": {"lock-console", "console-users"},
    "prometheus": {"prometheus-data"},
}
# Appended to tests/support/models/hashing.py. It is slow, so that a worker always executes a batch during a
# `Load`. Batches are small, since those of a worker that died are executed again one request at a time.
# Results are kept until the test reads them.
SLOW: Final = """

class Slow(Hashing):
    max_batch_size = 8
    seconds = 0.04
    result_ttl_ms = 600_000
"""


@pytest.fixture(scope="module")
def images() -> None:
    """Build the images from the working tree."""
    with Project() as project:
        project("build", timeout_s=600)
        project("build", "console", timeout_s=600)  # it has a profile


@pytest.fixture(scope="module")
def stack(images: None) -> Iterator[Project]:
    """The default stack and the operators' page, for tests that do not change it."""
    with Project() as project:
        project.up()
        project.up("--no-recreate", "console")
        yield project


@pytest.fixture(scope="module")
def slow(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with the slow model, built as in the example `shout`."""
    context = tmp_path_factory.mktemp("slow")
    shutil.copy(EXAMPLES / "shout/Dockerfile", context)
    (context / "model.py").write_text((MODELS / "hashing.py").read_text() + SLOW)
    with built("carpool-test-slow", context) as image:
        yield image


# --- the default stack


def test_request_is_answered(stack: Project) -> None:
    assert stack("run", "--rm", "tools", "infer", "square", "7").split()[-1] == "49"
    url = f"http://{stack.address('gateway', 8000)}/carpool/v1/models/square/infer"
    with urllib.request.urlopen(url, data=b"7", timeout=30) as answer:
        assert answer.read() == b"49"


def test_result_is_read_by_its_id_from_another_container(stack: Project) -> None:
    request_id = stack("run", "--rm", "tools", "infer", "square", "8", "--enqueue").split()[-1]
    assert request_id.startswith("square/")
    assert stack("run", "--rm", "operator", "result", request_id).split()[-1] == "64"


def test_operator_reads_and_changes_what_a_producer_may_not(stack: Project) -> None:
    def operate(*command: str) -> str:
        return stack("run", "--rm", "operator", *command)

    assert operate("infer", "square", "7").split()[-1] == "49"
    assert "square" in operate("models")
    assert "square" in operate("top", "--once")
    assert "77" in operate("config", "square", "max_queue_size=77")
    assert "max_queue_size" in operate("config", "square", "max_queue_size=")
    assert "Measured" in operate("tune", "square", "7", "--latency-ms", "50", "--rounds", "1", "--plot", "")
    assert "no dead letters found" in operate("dead", "list")


def test_producer_is_told_which_service_may(stack: Project) -> None:
    with pytest.raises(AssertionError, match=r"(?s)PERMISSION_DENIED.*docker compose run --rm operator"):
        stack("run", "--rm", "tools", "models")


def test_prometheus_scrapes_all_services_and_loads_the_alerts(stack: Project) -> None:
    def get(path: str) -> Any:
        url = f"http://{stack.address('prometheus', 9090)}/api/v1/{path}"
        with urllib.request.urlopen(url, timeout=5) as reply:
            return json.load(reply)["data"]

    def is_complete() -> bool:
        series = get(f"query?query={quote('sum by (job) (up)')}")["result"]
        return {each["metric"]["job"]: each["value"][1] for each in series} == {
            "batcher": "2", "worker": "1", "gateway": "1", "console": "1",
        }  # fmt: skip

    wait_until(is_complete, description="Prometheus has scraped all services", timeout_s=30)
    assert get("rules")["groups"]


def test_gateway_speaks_websocket_and_grpc(stack: Project) -> None:
    with Socket(f"http://{stack.address('gateway', 8000)}", "/carpool/v1/models/square/stream") as socket:
        socket.send({"id": "1", "body": 7})
        assert socket.until_end()[0] == {"id": "1", "chunk": 49}
    with Rpc(stack.address("gateway", 8001)) as rpc:
        assert rpc.check() == "SERVING"


def test_operators_page_shows_the_models_to_who_has_the_password_of_its_log(stack: Project) -> None:
    """The password is printed once; a drained console ends with 0, and starts again with the same users."""
    (container,) = stack.containers("console")
    (printed,) = re.findall(r"Sign in as (\w+) with the password (\S+)", stack.log(container))
    assert "square" in first_page(stack.address("console", 8800), *printed)
    stack("stop", "console")
    assert stack.exit_codes("console") == [0]
    stack.up("--no-recreate", "console")
    (container,) = stack.containers("console")
    assert stack.log(container).count(printed[1]) == 1
    assert "square" in first_page(stack.address("console", 8800), *printed)


def first_page(address: str, name: str, password: str) -> str:
    """The page that one sees who has signed in."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    form = urlencode({"name": name, "password": password, "next": "/"}).encode()
    request = urllib.request.Request(f"http://{address}/sign-in", form, {"Origin": f"http://{address}"})
    with opener.open(request, timeout=30) as answer:
        page: bytes = answer.read()
    return page.decode()


@pytest.mark.parametrize("service", ["redis", "batcher", "worker", "gateway", "console", "prometheus"])
def test_container_has_minimal_privileges(stack: Project, service: str) -> None:
    for container in stack.containers(service):
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
        assert all(host[limit] > 0 for limit in ("Memory", "NanoCpus", "PidsLimit"))
        assert volumes_of(stack, container) == VOLUMES[service]
        status = stack.inside(container, "cat", "/proc/1/status")
        fields = dict(line.split(":", 1) for line in status.splitlines())
        assert fields["Uid"].split() == fields["Gid"].split() == ["10001"] * 4
        assert {int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert fields["NoNewPrivs"].strip() == "1"


def test_only_three_services_have_a_port_and_only_on_loopback(stack: Project) -> None:
    published = {
        (container["Config"]["Labels"]["com.docker.compose.service"], port, address["HostIp"])
        for container in stack.containers()
        for port, addresses in container["NetworkSettings"]["Ports"].items()
        for address in addresses or ()
    }
    assert published == {
        ("gateway", "8000/tcp", "127.0.0.1"),
        ("gateway", "8001/tcp", "127.0.0.1"),
        ("console", "8800/tcp", "127.0.0.1"),
        ("prometheus", "9090/tcp", "127.0.0.1"),
    }


def test_prometheus_cannot_reach_redis(stack: Project) -> None:
    (redis,), (prometheus,) = stack.containers("redis"), stack.containers("prometheus")
    networks = [set(container["NetworkSettings"]["Networks"]) for container in (redis, prometheus)]
    assert networks == [{f"{stack.name}_redis"}, {f"{stack.name}_metrics", f"{stack.name}_published"}]


def test_redis_requires_a_password_that_no_container_description_shows(stack: Project) -> None:
    (redis,) = stack.containers("redis")
    assert "NOAUTH" in stack.inside(redis, "redis-cli", "ping")
    passwords = [
        stack.password(role)
        for role in ("producer", "batcher", "worker", "gateway", "metrics", "console", "admin")
    ]
    assert len(set(passwords)) == 7
    description = json.dumps(stack.containers())
    assert not [password for password in passwords if password in description]


def volumes_of(project: Project, container: Container) -> set[str]:
    mounts = (mount for mount in container["Mounts"] if mount["Type"] == "volume")
    return {mount["Name"].removeprefix(f"{project.name}_") for mount in mounts}


# --- up and down


def test_own_model_takes_two_lines_and_down_removes_everything(images: None) -> None:
    example = EXAMPLES / "shout"
    lines = [line for line in (example / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    with (
        built("carpool-test-shout", example) as image,
        Project(
            CARPOOL_WORKER_IMAGE=image,
            MODEL="model.py:shout",
            CARPOOL_SET="max_batch_size=8\nresult_ttl_ms=30s",
        ) as project,
    ):
        project.up()
        assert project("run", "--rm", "tools", "infer", "shout", "hello").split()[-1] == '"HELLO"'
        settings = project("run", "--rm", "operator", "config", "shout")
        assert re.search(r"^max_batch_size +8 ", settings, re.MULTILINE)
        assert re.search(r"^result_ttl_ms +30000 ", settings, re.MULTILINE)
        project("stop")
        exit_codes = {each["Name"]: each["State"]["ExitCode"] for each in project.containers()}
        assert set(exit_codes.values()) == {0}, exit_codes
        project("down", "--volumes")
        assert project.left_over() == []


# --- under load


def test_scaling_workers_under_load_loses_and_redelivers_nothing(slow: str) -> None:
    with Project(PUBLISHED, CARPOOL_WORKER_IMAGE=slow, MODEL="model.py:Slow") as project:
        project.up()
        checker = Checker()
        with Producer(project, "Slow") as producer:
            with Load(producer, "Slow", checker) as load:
                for workers in (4, 2):
                    project.up("--no-recreate", "--scale", f"worker={workers}")
                    load.wait_for_more(1000)
            report = producer.final_report(checker)
        assert report.faultless, report
        assert report.ok == report.accepted
        assert project.exit_codes("worker") == [0, 0]
        assert project.events("worker", "batch reclaimed") == []
        assert len({event["worker"].partition("/")[0] for event in project.events("worker", "batches")}) == 2


def test_killed_worker_is_restarted_and_nothing_is_lost(slow: str) -> None:
    with Project(PUBLISHED, CARPOOL_WORKER_IMAGE=slow, MODEL="model.py:Slow") as project:
        project.up("--scale", "worker=2")
        checker = Checker()
        with Producer(project, "Slow") as producer:
            with Load(producer, "Slow", checker) as load:
                victim = project.containers("worker")[0]
                kill(project, victim)
                load.wait_for_more(1000)
            report = producer.final_report(checker)
        assert report.faultless, report
        assert report.ok == report.accepted
        assert project.events("worker", "batch reclaimed"), (
            "the worker was not killed during an execution, so this test has shown nothing"
        )
        project.wait_until_healthy()
        restarts = {each["Id"]: each["RestartCount"] for each in project.containers("worker")}
        assert restarts.pop(victim["Id"]) == 1
        assert list(restarts.values()) == [0]


KILL: Final = """
import os, signal
worker = int(open("/proc/1/task/1/children").read().split()[0])
os.kill(worker, signal.SIGKILL)
"""


def kill(project: Project, worker: Container) -> None:
    """SIGKILL from inside the container. After `docker kill` the engine would not restart the container."""
    with contextlib.suppress(AssertionError):  # the command may end together with its container
        project.inside(worker, "python", "-c", KILL)


class Producer(Stack):
    """Replaces the Stack of a `Load`: Redis runs in the project, and roles have only their permissions."""

    def __init__(self, project: Project, model: str) -> None:
        address = project.address("redis", 6379)
        self._keys = Keys(model)
        self._url = f"redis://producer:{project.password('producer')}@{address}/0"
        self._producer: Any = Redis.from_url(self._url, protocol=2, socket_timeout=30)
        # The role `metrics` may read the lengths of streams, which a producer may not.
        self.redis = Redis.from_url(
            f"redis://metrics:{project.password('metrics')}@{address}/0", protocol=2, socket_timeout=30
        )

    @property
    def url(self) -> str:
        return self._url

    def stop(self) -> None:
        self._producer.close()
        self.redis.close()

    def replies(self, model: str, name: str) -> list[dict[str, Any]]:
        streams = self._producer.xread({Keys(model).replies(name): 0})
        fields = (entry for _, entries in streams for _, entry in entries)
        return [reply for entry in fields for reply in envelopes(entry)]

    def final_report(self, checker: Checker) -> Report:
        """The report on a `Load` with the default name, once the model is idle."""
        self.wait_until_idle(self._keys.model, timeout_s=60)
        for kind in ("many", "raw", "json"):
            name = f"load-{kind}"
            for reply in self.replies(self._keys.model, name):
                checker.envelope(reply["correlation_id"], decoded(reply))
        without_result = checker.unsettled()
        for start in range(0, len(without_result), 100):
            keys = [self._keys.result(name) for name in without_result[start : start + 100]]
            while found := self._producer.blpop(keys, timeout=0.001):
                correlation_id = found[0].decode().removeprefix(self._keys.result(""))
                checker.envelope(correlation_id, decoded(envelope(found[1])))
        report = checker.report()
        print(report)
        return report
