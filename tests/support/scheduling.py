"""Which tests run together, where, and in what order, if several processes run them (`pytest -n N`).

*Together*: tests that share a fixture of their module, with the same parameters, are one group, because each
process would set it up again. So are the tests of a file in tests/unit, because they are many and short. Each
other test is a group by itself.

*Where*: most tests with services wait, for leases, deadlines and processes; unit tests and state machines
compute. The first process prefers what computes and the others what waits, so that the processors are in use
from the beginning to the end.

*In what order*: by folder, and in each folder the largest groups first, because what takes long must not
begin last. Among equals the order is random, as pytest-randomly made it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# The folders of tests, by how long their tests take: those that wait, those that compute.
WAITING: Final = ("chaos", "integration", "compose", "clients")
COMPUTING: Final = ("simulation", "contract", "unit")
GROUPED_BY_FILE: Final = ("contract", "unit")
_FIRST_PROCESS: Final = "gw0"
_FILE: Final = "file_of_groups"


class Scheduling:
    """The pytest plugin.

    Only the processes that run tests collect them, and see their fixtures. The first one writes the group of
    each test to a file, whose path it was given, for the process that schedules them.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="carpool-tests-")
        self._file = Path(self._folder.name) / "groups.json"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput[_FILE] = str(self._file)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        groups: dict[str, list[pytest.Item]] = {}
        for item in items:
            groups.setdefault(group_of(item), []).append(item)
        items[:] = [item for group in sorted(groups.values(), key=_place) for item in group]
        ours = getattr(config, "workerinput", {})
        if ours.get("workerid") == _FIRST_PROCESS:
            names = {item.nodeid: name for name, members in groups.items() for item in members}
            Path(ours[_FILE]).write_text(json.dumps(names))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Scheduler:
        return Scheduler(config, log, self._file)

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


class Scheduler(LoadScopeScheduling):
    """Gives each process the first waiting group that it prefers, or else the first one.

    The names of groups are read from `file` once the tests are collected.
    """

    def __init__(self, config: pytest.Config, log: Any, file: Path) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # they are in order
        self._file = file
        self._groups: dict[str, str] = {}

    def schedule(self) -> None:
        self._groups = self._groups or json.loads(self._file.read_text())
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._groups[nodeid]

    def _assign_work_unit(self, node: WorkerController) -> None:
        preferred = COMPUTING if node.gateway.id == _FIRST_PROCESS else WAITING
        found = next((name for name in self.workqueue if folder_of(name) in preferred), None)
        if found is not None:
            self.workqueue.move_to_end(found, last=False)
        super()._assign_work_unit(node)


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
