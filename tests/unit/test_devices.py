"""Model processes get the named devices in turn, those that CUDA shows, and as many threads as CPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from carpool.settings import WorkerSettings, read_settings
from carpool_cli.local.up import UpSettings
from carpool_worker.devices import THREAD_VARIABLES, devices, usable_cpus, visible_gpus, with_threads
from carpool_worker.process_handle import ModelLoadError, ProcessHandle
from carpool_worker.served_models import served_models


@pytest.mark.parametrize("name", ["gpu", "gpu:0", "GPU", "cuda0", "cuda:", "0", "cpu,gpu", "auto,cpu"])
@pytest.mark.parametrize("kind", [WorkerSettings, UpSettings])
def test_name_that_is_no_device_is_refused(
    name: str, kind: type[WorkerSettings | UpSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(kind, ["square", "--device", name], "carpool")
    assert "names no device; write auto, cpu, or cuda:0,cuda:1,... for GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["auto", "cpu", "cuda", "cuda:0,cuda:1", " cuda:2 , cpu", "mps", "xpu:0", ""]
)
def test_names_of_devices(name: str) -> None:
    assert read_settings(WorkerSettings, ["square", "--device", name], "carpool").device == name


@pytest.mark.parametrize(("device", "replicas", "processes"), [("cuda:0,cuda:1", "auto", 2), ("cpu", "3", 3)])
def test_replicas_of_a_whole_stack_may_be_one_for_each_device(
    device: str, replicas: str, processes: int
) -> None:
    settings = read_settings(UpSettings, ["square", "--device", device, "--replicas", replicas], "carpool up")
    plan = settings.plan()
    (model,) = served_models(plan.models, plan.options, replicas=plan.replicas, device=plan.device)
    assert len(model.devices) == processes


@pytest.mark.parametrize(
    ("names", "replicas", "expected"),
    [
        ("cpu", 3, ["cpu", "cpu", "cpu"]),
        ("cuda:0,cuda:1", 3, ["cuda:0", "cuda:1", "cuda:0"]),
        (" cuda:2 , cpu", 1, ["cuda:2"]),
        ("", 1, ["cpu"]),
        ("cuda:0,cuda:1", "auto", ["cuda:0", "cuda:1"]),
        ("", "auto", ["cpu"]),
    ],
)
def test_each_model_process_gets_a_device_in_turn(
    names: str, replicas: int | Literal["auto"], expected: Sequence[str]
) -> None:
    assert devices(names, replicas) == expected


# --- the GPUs of `auto` ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,3", 2),
        (" 3 , 1 ", 2),
        ("0,-1,2", 1),
        ("0,4,1", 1),
        ("4", 0),
        (",0", 0),
        ("0,", 1),
        ("1,1", 1),
        ("1,2,1,3", 2),
        ("1,01", 1),
        ("1gpu,2", 2),
        ("NoDevFiles", 0),
        ("all", 0),
        ("GPU-8f3c,GPU-11ab", 2),
        ("GPU-8f3c, GPU-11ab", 2),
        ("GPU-8f3c,GPU-8f3c", 1),
        ("GPU-8f3c,1", 1),
        ("1,GPU-8f3c", 1),
        ("GPU-1,GPU-2,GPU-3,GPU-4,GPU-5", 4),
        ("MIG-1111", 1),
        ("MIG-GPU-8f3c/1/0,MIG-GPU-8f3c/2/0", 2),
        ("MIG-1,MIG-2,MIG-3,MIG-4,MIG-5", 5),
        ("MIG-1111,0", 1),
    ],
)
def test_cuda_shows_the_listed_gpus_before_the_first_invalid_one(listed: str | None, gpus: int) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(environment, 4) == gpus


@pytest.mark.parametrize(("value", "gpus"), [("none", 0), ("void", 2), ("all", 2), ("0,1", 2)])
def test_container_has_the_gpus_of_its_dev_unless_it_shall_have_none(value: str, gpus: int) -> None:
    """With void, too: that is also in containers that have GPUs by the Container Device Interface."""
    assert visible_gpus({"NVIDIA_VISIBLE_DEVICES": value}, 2) == gpus


def test_no_list_makes_gpus_that_the_machine_does_not_have() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8f3c"}, 0) == 0


# --- threads -----------------------------------------------------------------------------------------------

OURS = len(os.sched_getaffinity(0))


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def cpus(cgroups: Path, own: str, files: dict[str, str]) -> int:
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    line = cgroups.parent / "own"
    line.write_text(own)
    return usable_cpus(cgroups, line)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/", {}, OURS),
        ("0::/", {"cpu.max": "max 100000"}, OURS),
        ("0::/", {"cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "10000 100000"}, 1),  # a tenth of one
        ("0::/", {"cpuset.cpus.effective": "3"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 1),  # of the one around it
        ("0::/host/path", {"cpu.max": "100000 100000"}, 1),  # a container does not see its path
        ("4:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "9", "cpu,cpuacct/cpu.cfs_period_us": "10"}, 1),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, OURS),
        ("3:cpuset:/", {"cpuset/cpuset.cpus": "0"}, 1),
        ("7:memory:/", {"memory/cpu.max": "1 100000"}, OURS),
        ("", {}, OURS),
    ],
)  # fmt: skip
def test_cpus_are_those_of_the_control_groups(
    cgroups: Path, own: str, files: dict[str, str], expected: int
) -> None:
    assert cpus(cgroups, own, files) == expected


def test_cpus_of_sets_and_quotas_are_counted(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cpus(cgroups, "0::/", {"cpuset.cpus.effective": "0-3,8,10-11"}) == 7
    assert cpus(cgroups, "0::/", {"cpu.max": "250000 100000"}) == 3


def test_processes_share_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool_worker.devices.usable_cpus", lambda: 16)
    assert with_threads({"A": "b"}, 1) == {
        "A": "b",
        "OMP_NUM_THREADS": "16",
        "MKL_NUM_THREADS": "16",
        "OPENBLAS_NUM_THREADS": "16",
        "NUMEXPR_NUM_THREADS": "16",
        "VECLIB_MAXIMUM_THREADS": "16",
    }
    assert with_threads({}, 5)["OMP_NUM_THREADS"] == "3"
    assert with_threads({}, 40)["OMP_NUM_THREADS"] == "1"


def test_threads_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool_worker.devices.usable_cpus", lambda: 16)
    assert with_threads({"OMP_NUM_THREADS": "2"}, 1) == {"OMP_NUM_THREADS": "2"}
    set_for_one = with_threads({"MKL_NUM_THREADS": "2"}, 1)
    assert (set_for_one["MKL_NUM_THREADS"], set_for_one["OMP_NUM_THREADS"]) == ("2", "16")


@pytest.mark.parametrize("value", ["2", " 2 ", "4,2"])
def test_number_of_threads_stays(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr("carpool_worker.devices.usable_cpus", lambda: 16)
    assert with_threads({"OMP_NUM_THREADS": value}, 1) == {"OMP_NUM_THREADS": value}


@pytest.mark.parametrize("value", ["", " ", "0", "-1", "auto", ",4", "²"])
def test_what_is_no_number_of_threads_is_not_set(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """As of a file for containers, in which a variable is empty unless its reader has a value for it."""
    monkeypatch.setattr("carpool_worker.devices.usable_cpus", lambda: 16)
    shared = with_threads(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), value), 4)
    assert (shared["OMP_NUM_THREADS"], shared["MKL_NUM_THREADS"]) == ("4", "4")
    assert with_threads({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": value}, 4)["MKL_NUM_THREADS"] == value


@pytest.mark.parametrize(("processes", "threads"), [(1, 6), (2, 3), (8, 1)])
def test_model_process_has_its_share_of_the_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: int, threads: int
) -> None:
    """A process that is really started, with a model that tells what it has."""
    monkeypatch.setattr("carpool_worker.devices.usable_cpus", lambda: 6)
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "told.py").write_text(
        "import os\n"
        "class Told:\n"
        "    def load(self, device):\n"
        f"        raise ValueError([os.environ[name] for name in {THREAD_VARIABLES}])\n"
        "    def predict(self, batch): ...\n"
    )
    process = ProcessHandle(f"{tmp_path / 'told.py'}:Told", "cpu", processes=processes)
    try:
        with pytest.raises(ModelLoadError) as caught:
            process.start()
    finally:
        process.close(wait_s=0)
    assert str(caught.value) == f"ValueError: {[str(threads)] * len(THREAD_VARIABLES)}"
