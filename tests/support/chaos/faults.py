"""The faults: what is inflicted, how long recovery may take, and whether the promise covers it."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from carpool_worker.batch_sources import RECLAIMS_PER_LEASE
from support.chaos.run import KEYS, LEASE_S, Run
from support.chaos.servers import ServersOf, alone, behind_a_network, in_a_cluster, with_a_sentinel
from support.proxy import Direction, Proxy
from support.redis_client import redis_at
from support.stack import frozen
from support.waiting import Stopwatch, wait_until

BATCHER_S: Final = 3.0
# What a process had when it died is executed one request at a time, to find the one that is the cause. Each
# takes 20 ms, and 5 ms in which Redis notes that it starts, and what became of it. A process has one batch
# that it executes. A worker that dies also has the next one, already fetched, and is missed after its lease.
ALONE_S: Final = 32 * (0.02 + 0.005)
PROCESS_S: Final = 0.5 + ALONE_S
WORKER_S: Final = LEASE_S + LEASE_S / RECLAIMS_PER_LEASE + 2 * ALONE_S
CONNECTION_S: Final = 15.0
FLOOD_SPEED: Final = 10
FLOOD_ENTRIES: Final = 3000
CLOCK: Final = """\
import time
def off(clock, ticks_per_s, seconds={seconds}):
    return lambda: clock() + seconds * ticks_per_s
time.time, time.time_ns = off(time.time, 1), off(time.time_ns, 10**9)
"""


class Fault(NamedTuple):
    """`inflict` inflicts it once and sees to what it broke. `bound_s`: how long recovery may take; None: that
    says nothing here. `is_covered`: whether Carpool promises that no accepted request is lost. `times`: how
    often it is inflicted in a run. `servers`: what the processes of a run connect to."""

    inflict: Callable[[Run], None]
    bound_s: float | None
    is_covered: bool = True
    always_on_disk: bool = False
    times: int = 3
    servers: ServersOf = alone


def kill_batcher(run: Run) -> None:
    victim = run.active_batcher()
    victim.kill()
    run.recovers()
    run.replace(victim)


def freeze_batcher(run: Run) -> None:
    """Until another has taken over, and has answered requests."""
    with frozen(run.active_batcher()):
        run.recovers()
        run.wait_for_load()


def kill_both_batchers(run: Run) -> None:
    for victim in list(run.batchers):
        victim.kill()
    for victim in list(run.batchers):
        run.replace(victim)
    run.recovers()


def kill_worker(run: Run) -> None:
    victim = run.any_worker()
    victim.kill()
    run.settles()
    run.replace(victim)


def freeze_worker(run: Run) -> None:
    """Past its lease, with a batch that another worker then takes over."""
    with frozen(run.any_worker()):
        run.settles()


def terminate_worker(run: Run) -> None:
    victim = run.any_worker()
    victim.terminate(30)
    run.settles()
    run.replace(victim)


def kill_model_process(run: Run) -> None:
    (process,) = run.any_worker().children()
    os.kill(process, signal.SIGKILL)
    run.settles()


def freeze_model_process(run: Run) -> None:
    """It is replaced after `max_execution_ms`."""
    before = len(run.stack.events("settings changed"))
    run.stack.redis.hset(KEYS.overrides, "max_execution_ms", 1000)
    run.stack.redis.xadd(KEYS.settled, {"config": "max_execution_ms", "size": 0})
    if not run.recoveries_s:  # at the first time it changes
        wait_until(
            lambda: len(run.stack.events("settings changed")) > before, description="the setting is in force"
        )
    run.wait_for_load()
    (process,) = run.any_worker().children()
    os.kill(process, signal.SIGSTOP)
    run.settles()


def replace_version(run: Run) -> None:
    """Workers of a new version are started beside those of the old one, which then are terminated."""
    run.begin_version()
    for old in list(run.workers):
        run.replace(old)
        old.terminate(30)
    run.settles()


def kill_producer(run: Run) -> None:
    victim = run.random.choice(run.producers)
    victim.kill()
    victim.start()
    victim.wait_for_more(5)


def flood(run: Run) -> None:
    """A producer at ten times the pace, until the queue is full."""
    run.stack.redis.hset(KEYS.overrides, "max_queue_size", 2000)
    run.stack.redis.xadd(KEYS.settled, {"config": "max_queue_size", "size": 0})
    flooding = run.new_producer("flood", FLOOD_SPEED)
    run.producers.append(flooding)
    flooding.wait_for_more(FLOOD_ENTRIES)
    flooding.kill()


def restart_redis(run: Run) -> None:
    """SIGKILL, and a start from its append-only file."""
    os.kill(run.stack.server.pid, signal.SIGKILL)
    run.stack.server.restart()
    run.recovers()


def freeze_redis(seconds: float) -> Callable[[Run], None]:
    def inflict(run: Run) -> None:
        os.kill(run.stack.server.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(run.stack.server.pid, signal.SIGCONT)
        run.recovers()

    return inflict


def kill_connections(run: Run) -> None:
    run.stack.redis.client_kill_filter(_type="normal", skipme=True)
    run.recovers()


def flush_scripts(run: Run) -> None:
    run.stack.redis.script_flush()
    run.recovers()


def fill_memory(run: Run) -> None:
    """Redis refuses what needs memory for a while. What is accepted is finished all the same."""
    redis = run.stack.redis
    redis.config_set("maxmemory", max(1, redis.info("memory")["used_memory"] - 1))
    wait_until(lambda: redis.xlen(KEYS.requests) == 0, description="what was accepted is dispatched")
    redis.config_set("maxmemory", 0)
    run.recovers()


def revoke_permissions(run: Run) -> None:
    """The user of all services and producers may do nothing for a second."""
    run.stack.redis.execute_command("ACL", "SETUSER", "chaos", "on", "nopass", "~*", "&*", "+@all")
    url = run.stack.url.replace("redis://", "redis://chaos:x@")
    with_permissions = redis_at(url, protocol=2)
    with_permissions.execute_command("ACL", "SETUSER", "default", "-@all")
    time.sleep(1.0)
    with_permissions.execute_command("ACL", "SETUSER", "default", "+@all")
    with_permissions.close()
    run.recovers()


def fill_disk(run: Run) -> None:
    """The append-only file cannot grow for two seconds: Redis refuses writes, and keeps what it accepted."""
    process, folder = run.stack.server.pid, Path(run.stack.redis.config_get("dir")["dir"])
    size = max(file.stat().st_size for file in folder.rglob("*.aof*"))
    _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (size, hard))
    wait_until(
        lambda: run.stack.redis.info("persistence")["aof_last_write_status"] == "err",
        description="Redis cannot write to its disk",
    )
    time.sleep(2.0)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    run.recovers()


def set_clocks(run: Run) -> None:
    """Services are killed. In their place others are started, whose hosts' clocks are an hour off."""
    for victim in (run.active_batcher(), run.any_worker()):
        folder = run.home / f"clock-{run.random.choice((-3600, 3600))}"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(CLOCK.format(seconds=folder.name.removeprefix("clock-")))
        run.stack.packages = folder
        victim.kill()
        run.replace(victim)
    run.stack.packages = None
    run.recovers()


def hold(*directions: Direction) -> Callable[[Run], None]:
    """The network carries nothing these ways for 5 s, and connections stay open."""

    def inflict(run: Run) -> None:
        with network(run).hold(*directions):
            time.sleep(5.0)
        run.recovers()

    return inflict


def slow_down(run: Run) -> None:
    """Each way takes between 150 and 350 ms for 5 s, so that leases run out while they are renewed."""
    network(run).latency_s = (0.15, 0.35)
    run.wait_for_load()
    time.sleep(5.0)
    network(run).latency_s = (0.0, 0.0)
    run.recovers()


def cut_replies(run: Run) -> None:
    network(run).cut()
    run.recovers()


def network(run: Run) -> Proxy:
    assert run.servers.proxy is not None
    return run.servers.proxy


def fail_over(run: Run) -> None:
    """The primary is killed, and a replica takes its place."""
    assert run.servers.fail_over is not None
    watch = Stopwatch()
    run.servers.fail_over()
    run.recovers(watch)


def anything(run: Run) -> None:
    """One of the others that leave Redis's data alone, at random."""
    run.random.choice(MIXED)(run)


MIXED: Final = (
    kill_batcher, freeze_batcher, kill_worker, freeze_worker, kill_model_process, replace_version,
    kill_producer, kill_connections, flush_scripts, fill_memory, fill_disk, set_clocks,
)  # fmt: skip

FAULTS: Final[dict[str, Fault]] = {
    "the active batcher is killed": Fault(kill_batcher, BATCHER_S),
    "both batchers are killed, and started": Fault(kill_both_batchers, BATCHER_S),
    "the active batcher stands still past its lease": Fault(freeze_batcher, BATCHER_S),
    "a worker is killed": Fault(kill_worker, WORKER_S),
    "a worker stands still past its lease": Fault(freeze_worker, WORKER_S),
    "a worker is terminated": Fault(terminate_worker, WORKER_S),
    "a model process is killed": Fault(kill_model_process, PROCESS_S),
    "a model process stands still (max_execution_ms 1000)": Fault(freeze_model_process, 1 + PROCESS_S),
    "a new version of the model takes over": Fault(replace_version, WORKER_S),
    "a producer is killed, and sends again": Fault(kill_producer, None),
    "a producer at ten times the pace": Fault(flood, None),
    "Redis is killed, appendfsync always": Fault(restart_redis, CONNECTION_S, always_on_disk=True),
    "Redis is killed, appendfsync everysec": Fault(restart_redis, CONNECTION_S, is_covered=False),
    "Redis stands still for 5 s": Fault(freeze_redis(5.0), CONNECTION_S),
    "Redis stands still for 30 s": Fault(freeze_redis(30.0), CONNECTION_S),
    "all connections are closed": Fault(kill_connections, BATCHER_S),
    "SCRIPT FLUSH": Fault(flush_scripts, BATCHER_S),
    "the memory of Redis is full": Fault(fill_memory, BATCHER_S),
    "permissions are revoked for a second": Fault(revoke_permissions, BATCHER_S),
    "the disk of Redis is full": Fault(fill_disk, BATCHER_S),
    "the network carries nothing for 5 s": Fault(hold(*Direction), CONNECTION_S, servers=behind_a_network),
    "the network carries no replies for 5 s": Fault(
        hold(Direction.REPLIES), CONNECTION_S, servers=behind_a_network
    ),
    "the network takes 500 ± 200 ms there and back, for 5 s": Fault(
        slow_down, CONNECTION_S, servers=behind_a_network
    ),
    "connections are cut in the middle of a reply": Fault(cut_replies, BATCHER_S, servers=behind_a_network),
    "services are killed, and others have clocks that are an hour off": Fault(set_clocks, BATCHER_S),
    "the primary is killed, with Sentinel": Fault(
        fail_over, CONNECTION_S, is_covered=False, times=1, servers=with_a_sentinel
    ),
    "the primary is killed, in a cluster": Fault(
        fail_over, CONNECTION_S, is_covered=False, times=1, servers=in_a_cluster(KEYS.requests)
    ),
    "any of these that leave the network alone, at random": Fault(anything, CONNECTION_S, times=12),
}
