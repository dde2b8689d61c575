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

from collections.abc import Iterator
from typing import Any, Final

import pytest
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

# The folders of tests, by how long their tests take: those that wait, those that compute.
WAITING: Final = ("chaos", "integration", "compose", "clients")
COMPUTING: Final = ("simulation", "contract", "unit")
GROUPED_BY_FILE: Final = ("contract", "unit")
_FIRST_PROCESS: Final = "gw0"


class Scheduling:
    """The pytest plugin."""

    @pytest.hookimpl(tryfirst=True)  # after pytest-randomly, which is a wrapper, and before pytest-xdist
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark groups, for pytest-xdist, and sort them."""
        groups: dict[str, list[pytest.Item]] = {}
        for item in items:
            groups.setdefault(group_of(item), []).append(item)
        for name, members in groups.items():
            if len(members) > 1:
                for item in members:
                    item.add_marker(pytest.mark.xdist_group(name))
        items[:] = [item for group in sorted(groups.values(), key=_place) for item in group]

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Scheduler:
        return Scheduler(config, log)


class Scheduler(LoadGroupScheduling):
    """Gives each process the first waiting group that it prefers, or else the first one."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # groups are in order

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
