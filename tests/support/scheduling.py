"""Which tests run together, where, and in what order, if several processes run them (`pytest -n N`).

*Together*: tests that share a fixture of their module, with the same parameters, are one group, because each
process would set it up again. So are the tests of a file in tests/unit, because they are many and short. Each
other test is a group by itself.

*Where*: most tests with services wait, for leases, deadlines and processes; unit tests and state machines
compute. The first process prefers what computes and the others what waits, so that the processors are in use
from the beginning to the end. Only the first two can run both. The others do not even collect what computes:
that is three quarters of all tests, and to collect them takes each process seconds.

*In what order*: by folder, and in each folder the largest groups first, because what takes long must not
begin last. Among equals the order is random, as pytest-randomly made it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# The folders of tests, by how long their tests take: those that wait, those that compute.
WAITING: Final = ("chaos", "integration", "compose", "clients")
COMPUTING: Final = ("simulation", "contract", "unit")
GROUPED_BY_FILE: Final = ("contract", "unit")
FOR_ALL: Final = ("gw0", "gw1")  # the processes that collect and run all tests
_FILE: Final = "file_of_groups"


class Scheduling:
    """The pytest plugin.

    Only the processes that run tests collect them, and see their fixtures. The first one writes the group of
    each test to a file, whose path it was given, in order, for the process that schedules them.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="carpool-tests-")
        self._file = Path(self._folder.name) / "groups.json"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput[_FILE] = str(self._file)

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        ours = getattr(config, "workerinput", None)
        if ours is None or ours["workerid"] in FOR_ALL or collection_path.parent.name != "tests":
            return None
        return True if collection_path.name in COMPUTING else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        groups: dict[str, list[pytest.Item]] = {}
        for item in items:
            groups.setdefault(group_of(item), []).append(item)
        ordered = sorted(groups.items(), key=lambda group: _place(group[1]))
        items[:] = [item for _, members in ordered for item in members]
        ours = getattr(config, "workerinput", {})
        if ours.get("workerid") == FOR_ALL[0]:
            names = {item.nodeid: name for name, members in ordered for item in members}
            Path(ours[_FILE]).write_text(json.dumps(names))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Scheduler:
        return Scheduler(config, log, self._file)

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


class Scheduler(LoadScopeScheduling):
    """Gives each process the first waiting group that it prefers, or else the first one that it can run.

    The groups of all tests are read from `file` once the tests are collected.
    """

    def __init__(self, config: pytest.Config, log: Any, file: Path) -> None:
        super().__init__(config, log)
        self._file = file
        self.collection: list[str] | None = None
        self._groups: dict[str, str] = {}
        self._places: dict[WorkerController, dict[str, int]] = {}  # of each test, among those it collected

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        self.registered_collections[node] = list(collection)
        self._places[node] = {test: place for place, test in enumerate(collection)}

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        test = self.registered_collections[node][item_index]
        groups, group = self.assigned_work[node], self._groups[test]
        groups[group][test] = True
        if all(groups[group].values()):
            del groups[group]
        self._reschedule(node)

    def schedule(self) -> None:
        if self.collection is None:
            if not self._file.exists():
                raise pytest.UsageError("no test was collected; with -n 0 pytest says why")
            self._groups = json.loads(self._file.read_text())
            self.collection = list(self._groups)
            for test, group in self._groups.items():
                self.workqueue.setdefault(group, {})[test] = False
            self._check_collections()
        for _ in range(2):  # so that none waits for its next group
            for node in self.nodes:
                self._reschedule(node)

    def _check_collections(self) -> None:
        for node, collection in self.registered_collections.items():
            # Files that are named on the command line are collected by all processes.
            expected = {test for test in self._groups if _can_run(node, test)}
            if different := (expected - {*collection}) | ({*collection} - self._groups.keys()):
                raise RuntimeError(f"{node.gateway.id} has not collected the same tests: {sorted(different)}")

    def _reschedule(self, node: WorkerController) -> None:
        """Give the process another group if it has nearly nothing left."""
        if node.shutting_down or self._pending_of(self.assigned_work[node]) > 2:
            return
        group = self._next_of(node)
        if group is None:
            node.shutdown()  # once it has run what it has
            return
        self.assigned_work[node][group] = tests = self.workqueue.pop(group)
        places = self._places[node]
        node.send_runtest_some([places[test] for test, is_complete in tests.items() if not is_complete])

    def _next_of(self, node: WorkerController) -> str | None:
        """The group that the process gets next; None if it can run none that is left."""
        preferred = COMPUTING if node.gateway.id == FOR_ALL[0] else WAITING
        found = next((group for group in self.workqueue if folder_of(group) in preferred), None)
        return found or next((group for group in self.workqueue if _can_run(node, group)), None)


def _can_run(node: WorkerController, name: str) -> bool:
    return node.gateway.id in FOR_ALL or folder_of(name) in WAITING


def group_of(item: pytest.Item) -> str:
    """The name of the test's group. It begins with the path of the test's file."""
    file, _, _ = item.nodeid.partition("::")
    if folder_of(item.nodeid) in GROUPED_BY_FILE:
        return file
    shared = sorted(_shared_fixtures(item))
    if not shared:
        return item.nodeid
    parameters = item.callspec.indices if hasattr(item, "callspec") else {}
    varying = [f"{name} {parameters[name]}" for name in [*shared, "server"] if name in parameters]
    return " ".join([file, *(varying or shared)])


def folder_of(name: str) -> str:
    """The folder below tests/ of a test or group."""
    return name.split("/")[1]


def _shared_fixtures(item: pytest.Item) -> Iterator[str]:
    """The test's fixtures that live longer than it and are of this project."""
    definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    for name, (*_, definition) in definitions.items():
        if definition.scope != "function" and definition.baseid.startswith("tests"):
            yield name


def _place(group: list[pytest.Item]) -> tuple[int, int]:
    return (*WAITING, *COMPUTING).index(folder_of(group[0].nodeid)), -len(group)
