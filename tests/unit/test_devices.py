"""Model processes get the named devices in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from carpool.settings import WorkerSettings, read_settings
from carpool_cli.local.up import UpSettings
from carpool_worker.devices import devices


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
    assert settings.plan().replicas == settings.processes == processes


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
