"""docker-compose.yml, for real: built, brought up, asked, scaled under load, broken, taken down."""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.request
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

import msgpack
import pytest
from redis import Redis

from carpool.keys import Keys
from compose.project import ROOT, Container, Project, built
from support.checker import Checker, Report
from support.load import Load, decoded
from support.stack import MODELS, Stack, envelope
from support.waiting import wait_until

pytestmark = pytest.mark.compose

EXAMPLES: Final = ROOT / "ops/docker/examples"
PUBLISHED: Final = "ops/docker/publish.yml"
VOLUMES: Final = {
    "redis": {"redis-data", "redis-acl", "lock-metrics"},
    "batcher": {"lock-batcher"},
    "worker": {"lock-worker"},
    "prometheus": {"prometheus-data"},
}
# Appended to tests/support/models/hashing.py: slow enough for a worker to have a batch in hand at any moment
# of a `Load`, small batches since those of a worker that died are executed again one request at a time, and
# results that stay until they are looked at.
SLOW: Final = """

class Slow(Hashing):
    max_batch_size = 8
    seconds = 0.04
    result_ttl_ms = 600_000
"""


@pytest.fixture(scope="module")
def images() -> None:
    """The images, built from what is here now."""
    with Project() as project:
        project("build", timeout_s=600)


@pytest.fixture(scope="module")
def stack(images: None) -> Iterator[Project]:
    """The stack as it comes, for tests that only look."""
    with Project() as project:
        project.up()
        yield project


@pytest.fixture(scope="module")
def slow(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with a model of its own, made as an example says."""
    context = tmp_path_factory.mktemp("slow")
    shutil.copy(EXAMPLES / "shout/Dockerfile", context)
    (context / "model.py").write_text((MODELS / "hashing.py").read_text() + SLOW)
    with built("carpool-test-slow", context) as image:
        yield image


# --- As it comes


def test_it_answers(stack: Project) -> None:
    assert stack("run", "--rm", "tools", "infer", "square", "7").split()[-1] == "49"


def test_prometheus_finds_every_batcher_and_worker_and_the_alerts(stack: Project) -> None:
    def asked(path: str) -> Any:
        url = f"http://{stack.address('prometheus', 9090)}/api/v1/{path}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]

    def found() -> bool:
        results = asked(f"query?query={quote('sum by (job) (up)')}")["result"]
        return {one["metric"]["job"]: one["value"][1] for one in results} == {"batcher": "2", "worker": "1"}

    wait_until(found, description="Prometheus has scraped two batchers and a worker", timeout_s=30)
    assert asked("rules")["groups"]


@pytest.mark.parametrize("service", ["redis", "batcher", "worker", "prometheus"])
def test_a_container_may_do_nothing_that_it_need_not(stack: Project, service: str) -> None:
    for container in stack.containers(service):
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
        assert all(host[limit] > 0 for limit in ("Memory", "NanoCpus", "PidsLimit"))
        assert volumes_of(stack, container) == VOLUMES[service]
        status = stack.inside(container, "cat", "/proc/1/status")
        about = dict(line.split(":", 1) for line in status.splitlines())
        assert about["Uid"].split() == about["Gid"].split() == ["10001"] * 4
        assert {int(about[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert about["NoNewPrivs"].strip() == "1"


def test_only_prometheus_has_a_port_and_only_on_loopback(stack: Project) -> None:
    published = {
        (container["Config"]["Labels"]["com.docker.compose.service"], port, where["HostIp"])
        for container in stack.containers()
        for port, places in container["NetworkSettings"]["Ports"].items()
        for where in places or ()
    }
    assert published == {("prometheus", "9090/tcp", "127.0.0.1")}


def test_prometheus_cannot_reach_redis(stack: Project) -> None:
    (redis,), (prometheus,) = stack.containers("redis"), stack.containers("prometheus")
    networks = [set(one["NetworkSettings"]["Networks"]) for one in (redis, prometheus)]
    assert networks == [{f"{stack.name}_redis"}, {f"{stack.name}_metrics", f"{stack.name}_published"}]


def test_redis_wants_a_password_and_no_container_has_it_in_its_environment(stack: Project) -> None:
    (redis,) = stack.containers("redis")
    assert "NOAUTH" in stack.inside(redis, "redis-cli", "ping")
    passwords = [stack.password(role) for role in ("producer", "batcher", "worker", "metrics", "admin")]
    assert len(set(passwords)) == 5
    described = json.dumps(stack.containers())
    assert not [password for password in passwords if password in described]


def volumes_of(project: Project, container: Container) -> set[str]:
    mounts = (mount for mount in container["Mounts"] if mount["Type"] == "volume")
    return {mount["Name"].removeprefix(f"{project.name}_") for mount in mounts}


# --- From up to down


def test_a_model_of_ones_own_takes_two_lines_and_down_leaves_nothing(images: None) -> None:
    example = EXAMPLES / "shout"
    lines = [line for line in (example / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    with (
        built("carpool-test-shout", example) as image,
        Project(CARPOOL_WORKER_IMAGE=image, MODEL="model.py:shout") as project,
    ):
        project.up()
        assert project("run", "--rm", "tools", "infer", "shout", "hello").split()[-1] == '"HELLO"'
        project("stop")
        ended = {one["Name"]: one["State"]["ExitCode"] for one in project.containers()}
        assert set(ended.values()) == {0}, ended
        project("down", "--volumes")
        assert project.left_over() == []


# --- Under load


def test_workers_come_and_go_under_load_and_nothing_is_lost_or_redelivered(slow: str) -> None:
    with Project(PUBLISHED, CARPOOL_WORKER_IMAGE=slow, MODEL="model.py:Slow") as project:
        project.up()
        checker = Checker()
        with Producer(project, "Slow") as producer:
            with Load(producer, "Slow", checker) as load:
                for workers in (4, 2):
                    project.up("--no-recreate", "--scale", f"worker={workers}")
                    load.wait_for_more(1000)
            report = producer.settled(checker)
        assert report.faultless, report
        assert report.ok == report.accepted
        assert project.exit_codes("worker") == [0, 0]
        assert project.events("worker", "batch reclaimed") == []
        assert len({event["worker"].partition("/")[0] for event in project.events("worker", "batch")}) == 2


def test_a_killed_worker_is_started_again_and_nothing_is_lost(slow: str) -> None:
    with Project(PUBLISHED, CARPOOL_WORKER_IMAGE=slow, MODEL="model.py:Slow") as project:
        project.up("--scale", "worker=2")
        checker = Checker()
        with Producer(project, "Slow") as producer:
            with Load(producer, "Slow", checker) as load:
                victim = project.containers("worker")[0]
                kill(project, victim)
                load.wait_for_more(1000)
            report = producer.settled(checker)
        assert report.faultless, report
        assert report.ok == report.accepted
        assert project.events("worker", "batch reclaimed"), "it died with nothing in hand: nothing was shown"
        project.wait_until_healthy()
        restarts = {one["Id"]: one["RestartCount"] for one in project.containers("worker")}
        assert restarts.pop(victim["Id"]) == 1
        assert list(restarts.values()) == [0]


KILL: Final = """
import os, signal
worker = int(open("/proc/1/task/1/children").read().split()[0])
os.kill(worker, signal.SIGKILL)
"""


def kill(project: Project, worker: Container) -> None:
    """SIGKILL from within. One by `docker kill` counts as a wish, after which nothing is started again."""
    with contextlib.suppress(AssertionError):  # its container ends, and this with it, or a moment before it
        project.inside(worker, "python", "-c", KILL)


class Producer(Stack):
    """A Stack's place for a `Load`, where Redis runs already and lets each role do only its own."""

    def __init__(self, project: Project, model: str) -> None:
        where = project.address("redis", 6379)
        self._keys = Keys(model)
        self._url = f"redis://producer:{project.password('producer')}@{where}/0"
        self._own: Any = Redis.from_url(self._url, protocol=2, socket_timeout=30)
        # To look at lengths, which a producer may not.
        self.redis = Redis.from_url(
            f"redis://metrics:{project.password('metrics')}@{where}/0", protocol=2, socket_timeout=30
        )

    @property
    def url(self) -> str:
        return self._url

    def stop(self) -> None:
        self._own.close()
        self.redis.close()

    def replies(self, model: str, name: str) -> list[dict[str, Any]]:
        streams = self._own.xread({Keys(model).replies(name): 0})
        fields = (entry for _, entries in streams for _, entry in entries)
        return [one for entry in fields for one in msgpack.unpackb(entry[b"results"])]

    def settled(self, checker: Checker) -> Report:
        """The verdict on a `Load` of the default name, once nothing waits or is in flight any more."""
        self.wait_until_idle(self._keys.model, timeout_s=60)
        for kind in ("many", "raw", "json"):
            name = f"load-{kind}"
            for one in self.replies(self._keys.model, name):
                checker.envelope(one["correlation_id"], decoded(one))
        lists = checker.unsettled()
        for start in range(0, len(lists), 100):
            keys = [self._keys.result(name) for name in lists[start : start + 100]]
            while found := self._own.blpop(keys, timeout=0.001):
                correlation_id = found[0].decode().removeprefix(self._keys.result(""))
                checker.envelope(correlation_id, decoded(envelope(found[1])))
        report = checker.report()
        print(report)
        return report
