"""The batcher service: one loop over all registered models.

    leases      twice a second, of all models: which are registered, which leases this batcher holds;
                and the script with which producers enqueue is loaded, in case Redis has lost it
    compare     four times a second, each busy model: with a snapshot of its state in Redis; of the idle
                ones a few at a time, so that each is compared every 3 s; an entry of `settled`, as
                `carpool config` writes one, makes a model busy at once
    read        wait for entries of any model, or until one is due
    turn        each model for which something arrived, or that is due: decide and act

A turn that takes longer than SLICE_S goes on in later iterations, one such turn in each: so what one producer
sends to a model delays the requests of others by about two slices, or by the longest piece of a turn if that
takes longer; and leases are renewed in time.

A model that is idle costs its share of the leases and the comparisons, and nothing else. Four connections
are used: three of the reader, and one for everything else, which is never blocked.

An error that concerns one model ends its session, and it is tried again after a pause. An error of a
connection ends all sessions.

Why: docs/decisions/0010.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from threading import Event
from typing import Any, Final

import structlog

from carpool.clock import RedisClock
from carpool.keys import Keys
from carpool.lifecycle import Loop
from carpool.store.batcher import NotActiveError, PausedError, ProcessLeftError
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.detail import DETAIL_TTL_MS
from carpool.store.directory import ModelSnapshot
from carpool.store.kept import KEEP
from carpool.store.link_errors import reason_of
from carpool.store.reader import ReadSizes, StreamReader, Subscription
from carpool.store.upkeep import Upkeep
from carpool_batcher.custom_policies import Policies
from carpool_batcher.meter import BatcherMetrics, Meter
from carpool_batcher.model_batcher import ModelBatcher
from carpool_batcher.session import VersionLeftError

LEASE_MS: Final = 2000
LEASES_INTERVAL_S: Final = 0.5
SLICE_S: Final = 0.005  # of a turn, before other models have theirs
COMPARE_INTERVAL_S: Final = 0.25
IDLE_ROUNDS: Final = 6  # of leases, in which every idle model is compared once
REPORT_TTL_MS: Final = 5000
EVICTION_INTERVAL_S: Final = 60.0  # how often it is looked whether Redis may discard requests
DISCOVERY_AGE_MAX_S: Final = 5.0  # reconnecting takes less
STOP_S_MAX: Final = 5.0
LOOP_SILENCE_MAX_S: Final = 30.0  # an iteration waits for 0.5 s, and Redis's timeout is 5 s
# What a session may learn, before the next snapshot has it, from a dispatch that was not carried out.
_CHANGED_SINCE: Final[Mapping[type[Exception], str]] = {
    PausedError: "model was paused",
    ProcessLeftError: "model process left",
    VersionLeftError: "version has no workers any more",
}


@dataclass(slots=True)
class HashSlot:
    """A hash slot of a cluster: one of its keys, and the names of the models that were registered last."""

    key: str
    models: Set[str]


class BatcherService:
    """Serves every registered model; no list is configured. `run_once` is one iteration of the loop.

    `slot`: of a cluster, only the models of this hash slot: see `cluster`.
    A model that is no longer registered is served until it has no more requests, and then forgotten.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        name: str,
        metrics: BatcherMetrics,
        policies: Policies,
        slot: HashSlot | None = None,
    ) -> None:
        self._url = url
        self._slot = slot
        self._key = "" if slot is None else slot.key
        self._prefix = prefix
        self._name = name
        self._metrics = metrics
        self._policies = policies
        self._clock = RedisClock()
        self._link = Link(url, name=f"{name}:moves", key=self._key)
        self._upkeep = Upkeep(self._link, prefix, name, self._clock)
        self._read_sizes = ReadSizes()
        self._reader = StreamReader(url, name, key=self._key, sizes=self._read_sizes)
        self._models: dict[str, ModelBatcher] = {}
        self._subscribed: dict[Subscription, ModelBatcher] = {}  # those whose lease this batcher holds
        self._busy: dict[ModelBatcher, None] = {}
        self._long_turns: dict[ModelBatcher, None] = {}  # those with more to do; each goes on in its turn
        self._idle: list[ModelBatcher] = []  # to be compared in this round
        self._leases_at_s = 0.0
        self._compare_at_s = 0.0
        self._invalid_names: set[str] = set()
        self._discovered_s = float("-inf")  # when discovery succeeded last
        self._discovery_error = ""
        self._eviction_at_s = 0.0
        self._eviction_warning = ""
        self._script_warning = ""
        self._rules_warning = ""
        self._current = ""  # the model whose turn it is
        self._stopping = Event()
        self._loop = Loop("batcher", self.run_once, self._report_error)
        self._log = structlog.get_logger()

    def start(self) -> None:
        """Start the loop."""
        self._loop.start()

    def run_once(self) -> None:
        """Keep up what is due, then wait for something to happen, and give turns."""
        try:
            self._keep_up()
            self._take_turns()
        except BaseException:
            self._start_over()
            raise

    # --- keeping up: leases and comparisons ----------------------------------------------------------------

    def _keep_up(self) -> None:
        now_s = time.monotonic()
        due = [model for model in self._busy if model.session.needs_snapshot and model.turn is None]
        if now_s >= self._compare_at_s:
            self._compare_at_s = now_s + COMPARE_INTERVAL_S
            due = list(self._busy)
        if now_s >= self._leases_at_s:
            self._hold_leases(now_s)
            due += self._next_idle_models()
        if due:
            self._compare(due)

    def _hold_leases(self, now_s: float) -> None:
        """Find the registered models; become or stay the active batcher of each of them, if possible."""
        late_us = int((now_s - self._leases_at_s) * 1e6) if self._leases_at_s else 0
        self._leases_at_s = now_s + LEASES_INTERVAL_S
        self._discover()
        self._load_script()
        if now_s >= self._eviction_at_s:
            self._eviction_at_s = now_s + EVICTION_INTERVAL_S
            self._look_for_eviction()
        models = [model for model in self._models.values() if model.retry_at_s <= now_s]
        acquired: list[ModelBatcher] = []
        for model, held in zip(models, self._upkeep.hold_leases(_keys_of(models), LEASE_MS), strict=True):
            if isinstance(held, CommandError):
                self._fail(model, held)
            elif held and not model.active:
                acquired.append(model)
            else:
                model.recover()
                if held:
                    model.meter.renewed(late_us)
                elif model.active:
                    model.log_lost_lease()
                    self._end(model)
        if acquired:
            self._begin(acquired)

    def _begin(self, acquired: Sequence[ModelBatcher]) -> None:
        """This batcher has taken these leases: serve the models."""
        snapshots = self._upkeep.snapshots(_keys_of(acquired))
        self._look_for_old_rules(snapshots)
        for model, snapshot in zip(acquired, snapshots, strict=True):
            if isinstance(snapshot, CommandError):
                self._fail(model, snapshot)
            elif self._attempt(model, model.begin, snapshot, self._reader):
                self._subscribed[model.session.subscription] = model
                self._busy[model] = None

    def _next_idle_models(self) -> list[ModelBatcher]:
        """A share of the idle models, so that IDLE_ROUNDS calls return all of them."""
        if not self._idle:
            self._idle = [model for model in self._subscribed.values() if model not in self._busy]
        share = -(-len(self._subscribed) // IDLE_ROUNDS)
        models, self._idle = self._idle[:share], self._idle[share:]
        return [model for model in models if model.active and model not in self._busy]

    def _compare(self, models: Sequence[ModelBatcher]) -> None:
        """Compare models with Redis, and publish the reports that are due."""
        models = [model for model in models if model.active]
        for model in models:
            model.session.needs_snapshot = True  # those in a turn are compared after it
        models = [model for model in models if model.turn is None]
        self._upkeep.set_clock()
        snapshots = self._upkeep.snapshots(_keys_of(models))
        self._look_for_old_rules(snapshots)
        for model, snapshot in zip(models, snapshots, strict=True):
            if isinstance(snapshot, CommandError):
                self._fail(model, snapshot)
            elif self._attempt(model, model.session.compare, snapshot):
                self._set_busy(model, not model.session.is_idle())
        now_us = self._clock.now_us()
        self._publish_reports(
            [model for model in models if model.active and model.session.report_at_us <= now_us]
        )
        self._publish_details([model for model in models if model.active and model.session.is_detail_due])

    def _publish_reports(self, models: Sequence[ModelBatcher]) -> None:
        if not models:
            return
        reports = [(model.keys, model.session.report()) for model in models]
        for model, error in zip(models, self._upkeep.publish_reports(reports, REPORT_TTL_MS), strict=True):
            if error is not None:
                model.session.report_refused(error)

    def _publish_details(self, models: Sequence[ModelBatcher]) -> None:
        """Publish the details of models at which somebody looks."""
        details: list[tuple[ModelBatcher, str]] = []
        for model in models:
            self._attempt(model, lambda one=model: details.append((one, one.session.detail())))
        texts = [(model.keys, text) for model, text in details]
        replies = self._upkeep.publish_details(texts, DETAIL_TTL_MS) if texts else []
        for (model, _), error in zip(details, replies, strict=True):
            if error is not None:
                model.session.detail_refused(error)

    # --- turns ---------------------------------------------------------------------------------------------

    def _take_turns(self) -> None:
        """Wait until something arrives or a model is due. Each such model has a turn, or the beginning of
        one; and one turn that was begun before goes on."""
        wait_s, reads_in_s = self._wait_s(), self._reads_in_s()
        if reads_in_s > 0:  # until then no request matters
            arrived, failed = self._reader.read(min(wait_s, reads_in_s), awaits_requests=False)
        else:
            arrived, failed = self._reader.read(wait_s)
        for subscription, error in failed.items():
            self._fail(self._subscribed[subscription], error)
        for subscription, entries in arrived.items():
            model = self._subscribed.get(subscription)
            if model is not None:
                if model not in self._busy:
                    self._set_busy(model, True)
                    model.session.needs_snapshot = True  # after this turn: its last one is old
                model.session.receive(entries)
        long_turn = next(iter(self._long_turns), None)
        now_us = self._clock.now_us()
        due = [
            model for model in self._busy if model not in self._long_turns and model.session.is_due(now_us)
        ]
        for model in due:
            self._attempt(model, self._give_slice, model)
            if time.monotonic() >= self._leases_at_s:
                break
        if long_turn is not None:
            self._attempt(long_turn, self._give_slice, long_turn)

    def _give_slice(self, model: ModelBatcher) -> None:
        """Let a model begin its turn, or go on with it, for SLICE_S or a piece."""
        self._long_turns.pop(model, None)
        turn = model.turn = model.turn or model.session.turn()
        ends_s = time.monotonic() + SLICE_S
        for _ in turn:
            if time.monotonic() >= ends_s:
                self._long_turns[model] = None
                return
        model.turn = None
        if model.session.backlog:
            self._long_turns[model] = None

    def _wait_s(self) -> float:
        """How long to wait for entries."""
        if self._long_turns:
            return 0.0
        until_s = min(self._leases_at_s, self._compare_at_s) if self._busy else self._leases_at_s
        wait_s = until_s - time.monotonic()
        due_us = [wake_us for model in self._busy if (wake_us := model.session.wake_at_us) is not None]
        return min(wait_s, (min(due_us) - self._clock.now_us()) / 1e6) if due_us else wait_s

    def _reads_in_s(self) -> float:
        """For how long no busy model needs a turn for requests that arrive; at most 0 if one does now."""
        if not self._busy or self._long_turns:
            return 0.0
        reads_at_us = min([model.session.reads_at_us for model in self._busy])
        return (reads_at_us - self._clock.now_us()) / 1e6

    def _set_busy(self, model: ModelBatcher, busy: bool) -> None:
        self._reader.set_busy(model.session.subscription, busy)
        if busy:
            self._busy[model] = None
        else:
            self._busy.pop(model, None)

    # --- models --------------------------------------------------------------------------------------------

    def _discover(self) -> None:
        """Know the registered models. If that fails, those known are served all the same."""
        self._upkeep.set_clock()
        try:
            registered = self._upkeep.models() if self._slot is None else self._slot.models
        except CommandError as error:
            self._discovery_error = reason_of(error, "batcher")
            self._metrics.error(error)
            self._log.warning("model discovery failed, retrying", reason=str(error), kind=error.code)
            return
        for name in registered - self._models.keys() - self._invalid_names:
            self._add(name)
        ended = [self._models[name] for name in self._models.keys() - registered]
        self._remove([model for model in ended if not model.has_requests()])
        self._discovery_error, self._discovered_s = "", time.monotonic()

    def _load_script(self) -> None:
        """Load the script with which producers enqueue; warn if that fails, once for each reason."""
        error = self._upkeep.load_script(KEEP)
        warning = "" if error is None else reason_of(error, "batcher")
        if warning and warning != self._script_warning:
            self._log.warning("producers cannot enqueue", reason=warning)
        self._script_warning = warning

    def _look_for_eviction(self) -> None:
        """Warn if Redis may discard requests, once for each reason."""
        warning = self._upkeep.eviction_warning()
        if warning and warning != self._eviction_warning:
            self._log.warning("Redis may lose requests", reason=warning)
        self._eviction_warning = warning

    def _look_for_old_rules(self, snapshots: Sequence[ModelSnapshot | CommandError]) -> None:
        """Warn, once for each reason, if Redis's rules are of before models could be paused or watched."""
        read = [snapshot for snapshot in snapshots if not isinstance(snapshot, CommandError)]
        if not read:
            return
        denied = next((snapshot.denied for snapshot in read if snapshot.denied is not None), None)
        warning = "" if denied is None else reason_of(denied, "batcher")
        if warning and warning != self._rules_warning:
            self._log.warning("models cannot be paused or watched", reason=warning)
        self._rules_warning = warning

    def _add(self, name: str) -> None:
        try:
            keys = Keys(name, self._prefix)
        except ValueError as error:
            self._invalid_names.add(name)
            self._log.error("registered model ignored", reason=str(error))
            return
        meter = Meter(self._metrics, name)
        self._models[name] = ModelBatcher(self._link, keys, self._name, self._clock, meter, self._policies)

    def _remove(self, models: Sequence[ModelBatcher]) -> None:
        """These models are not registered any more."""
        self._give_back_leases(models)
        for model in models:
            self._end(model)
            model.meter.forget()
            del self._models[model.keys.model]
            self._log.info("model forgotten", model=model.keys.model)

    def _give_back_leases(self, models: Sequence[ModelBatcher]) -> None:
        held = [model for model in models if model.active]
        if held:
            self._upkeep.hold_leases(_keys_of(held), 0)

    # --- errors --------------------------------------------------------------------------------------------

    def _attempt(self, model: ModelBatcher, act: Callable[..., object], *args: Any) -> bool:
        """Do something for one model. Whether it succeeded: if not, only this model is affected."""
        self._current = model.keys.model
        try:
            act(*args)
        except LinkError:
            raise
        except NotActiveError:
            model.log_lost_lease()
            self._end(model)
            return False
        except tuple(_CHANGED_SINCE) as error:  # rare. Redis tells what follows from that
            self._log.info(f"{_CHANGED_SINCE[type(error)]}, starting over", model=self._current)
            self._end(model)
            self._leases_at_s = time.monotonic()
            return False
        except (Exception, SystemExit) as error:
            self._fail(model, error)
            return False
        finally:
            self._current = ""
        return True

    def _fail(self, model: ModelBatcher, error: BaseException) -> None:
        """End the session of a model, and try again after a pause."""
        self._end(model)
        model.fail(reason_of(error, "batcher"))
        self._leases_at_s = min(self._leases_at_s, model.retry_at_s)
        self._metrics.error(error)
        self._log.warning(
            "batcher failed, starting over",
            model=model.keys.model,
            reason=model.failing,
            kind=type(error).__name__,
        )

    def _end(self, model: ModelBatcher) -> None:
        if model.active:
            self._subscribed.pop(model.session.subscription, None)
        self._busy.pop(model, None)
        self._long_turns.pop(model, None)
        model.end()

    def _start_over(self) -> None:
        """Drop everything that was read, and the connections."""
        for model in self._models.values():
            self._end(model)
        self._link.close()
        self._reader.close()
        self._reader = StreamReader(self._url, self._name, key=self._key, sizes=self._read_sizes)
        self._leases_at_s = 0.0

    def _report_error(self, error: Exception) -> None:
        self._metrics.error(error)
        self._log.warning(
            "batcher failed, starting over",
            reason=reason_of(error, "batcher"),
            kind=type(error).__name__,
        )

    # --- health --------------------------------------------------------------------------------------------

    def unhealthy(self) -> list[str]:
        """What only a restart would mend: the loop ended or hangs."""
        loop, current = self._loop, self._current
        if not loop.alive:
            return [f"{loop.name}: its thread ended"]
        if loop.silent_s > LOOP_SILENCE_MAX_S:
            model = f", with the model {current}" if current else ""
            return [f"{loop.name}: has been hanging for {loop.silent_s:.0f} s{model}"]
        return []

    def unready(self) -> list[str]:
        """Why no model is batched now.

        A batcher on standby is ready to take over. One that fails for some models still serves the others.
        """
        if self._stopping.is_set():
            return ["stopping"]
        models = dict(self._models)
        failing = [f"batcher {name}: {model.failing}" for name, model in models.items() if model.failing]
        if models and len(failing) == len(models):
            return failing
        if time.monotonic() - self._discovered_s < DISCOVERY_AGE_MAX_S:
            return []
        error = self._loop.failing
        why = self._discovery_error if error is None else reason_of(error, "batcher")
        return [f"{self._loop.name}: {why}" if why else "starting"]

    def warnings(self) -> list[str]:
        """What a person should mend, although models are batched."""
        found = (self._eviction_warning, self._script_warning, self._rules_warning)
        return [warning for warning in found if warning]

    @property
    def serves_models(self) -> bool:
        """Whether it serves any model now."""
        return bool(self._models)

    # --- stopping ------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the loop, and give the leases back, so that another batcher takes over at once."""
        self._stopping.set()
        self._loop.stop()
        if not self._loop.join(STOP_S_MAX):
            return
        try:
            self._give_back_leases(list(self._models.values()))
        except LinkError as error:
            self._log.warning("leases not given back", reason=str(error))
        self._start_over()


def _keys_of(models: Sequence[ModelBatcher]) -> list[Keys]:
    return [model.keys for model in models]
