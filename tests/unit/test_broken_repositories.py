"""Repositories with one mistake each: `carpool check --repository` tells each in one sentence."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest

from carpool_cli.check import command
from carpool_worker.repository.repository import Repository

PYTHON = """
    class TritonPythonModel:
        def execute(self, requests):
            return []
"""
TENSORS = """
    input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
MODEL = "def shout(batch):\n    return batch\n"


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """The command is a process of its own: it sets variables for its model processes."""
    with mock.patch.dict(os.environ):
        yield


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def triton(config: str, **files: str) -> dict[str, str]:
    return {"m/config.pbtxt": config, "m/1/model.py": PYTHON, **files}


BROKEN = {
    "no version": ({"m/carpool.toml": ""}, "REPO/m has no version: put the files of the model into REPO/m/1"),
    "an empty version": (
        {"m/1/weights.pt": ""},
        "REPO/m/1 has neither model.onnx nor model.py: put one there, or name the model in "
        "REPO/m/carpool.toml, "
        'as in object = "classifier.py:Classifier"',
    ),
    "two models": (
        {"m/1/model.py": MODEL + "class Other: ..."},
        "REPO/m/1/model.py has shout, Other: name the model in REPO/m/carpool.toml, as in object = "
        '"model.py:shout"',
    ),
    "a name of a version": (
        {"m/1/model.py": MODEL, "m/02/model.py": MODEL},
        "REPO/m/02 is no version: rename it to a number from 1 on of at most 18 digits, without zeros in "
        "front",
    ),
    "a name of a model": (
        {"my model/1/model.py": MODEL},
        "REPO/my model: its name is no valid name of a model: rename it, with letters, digits and . _ - "
        "only, the first one a letter or a digit",
    ),
    "no TOML": (
        {"m/carpool.toml": "object", "m/1/model.py": MODEL},
        "REPO/m/carpool.toml is not a TOML file: Expected '=' after a key in a key/value pair (at end of "
        "document)",
    ),
    "an unknown key": (
        {"m/carpool.toml": "replica = 2", "m/1/model.py": MODEL},
        "REPO/m/carpool.toml: replica: unknown key; did you mean replicas?",
    ),
    "a wrong setting": (
        {"m/carpool.toml": "[settings]\nmax_batch_size = 0", "m/1/model.py": MODEL},
        "REPO/m/carpool.toml: settings.max_batch_size is 0: must be a whole number of at least 1",
    ),
    "no file": (
        {"m/carpool.toml": 'object = "other.py:M"', "m/1/model.py": MODEL},
        "REPO/m/carpool.toml: object: there is no file REPO/m/1/other.py",
    ),
    "a path that leads out": (
        {"m/carpool.toml": 'object = "../../n/1/model.py:shout"', "m/1/w": "", "n/1/model.py": MODEL},
        "REPO/m/carpool.toml: object: REPO/m/1/../../n/1/model.py leads out of REPO/m: copy what it leads to "
        "into that folder",
    ),
    "two declarations": (
        triton("", **{"m/carpool.toml": ""}),
        "REPO/m has carpool.toml and config.pbtxt: remove one of them",
    ),
    "a declaration of the other form": (
        {"m/carpool.toml": "", "m/1/model.py": PYTHON},
        "REPO/m/1/model.py has a TritonPythonModel: declare it in a config.pbtxt in place of "
        "REPO/m/carpool.toml",
    ),
    "no text format": (
        triton('name: "m"\nbackend = "python"'),
        "REPO/m/config.pbtxt, line 2: '= \"python\"' is not valid here",
    ),
    "a misspelt field": (
        triton('backend: "python"\nmax_batch_sice: 8'),
        "REPO/m/config.pbtxt, line 2: max_batch_sice: unknown field; did you mean max_batch_size?",
    ),
    "another name": (
        triton(f'name: "other" backend: "python" {TENSORS}'),
        "REPO/m/config.pbtxt: name: 'other' must be that of the folder, 'm'; remove it",
    ),
    "another backend": (
        triton('backend: "tensorrt"'),
        "REPO/m/config.pbtxt: backend: tensorrt has no counterpart: export the model to ONNX, or load it in "
        "a Python model",
    ),
    "an ensemble": (
        triton('platform: "ensemble" ensemble_scheduling { step [ { model_name: "a" } ] }'),
        "REPO/m/config.pbtxt: ensemble_scheduling: has no counterpart: write a Python model in place of the "
        "ensemble, that calls the others (docs/composition.md)",
    ),
    "a version that there is not": (
        triton(f'backend: "python" {TENSORS} version_policy {{ specific {{ versions: [ 1, 7 ] }} }}'),
        "REPO/m/config.pbtxt: version_policy.specific: there is no version 7; there are 1",
    ),
    "no labels": (
        triton(
            'backend: "python" max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: 1 } output '
            '{ name: "y" data_type: TYPE_FP32 dims: 1 label_filename: "l.txt" }'
        ),
        "REPO/m/config.pbtxt: output y: label_filename: there is no file REPO/m/l.txt",
    ),
    "no file of the model": (
        triton(f'backend: "onnxruntime" max_batch_size: 2 {TENSORS}'),
        "REPO/m/config.pbtxt: model file: there is no file REPO/m/1/model.onnx",
    ),
    "a wrong group": (
        triton(f'backend: "python" {TENSORS} instance_group {{ kind: KIND_CPU gpus: [ 0 ] }}'),
        "REPO/m/config.pbtxt: instance_group 0: gpus: KIND_CPU has none; remove them, or write KIND_GPU",
    ),
    "a field without a counterpart": (
        triton(f'backend: "python" {TENSORS} model_metrics {{ metric_control {{ }} }}'),
        "REPO/m/config.pbtxt: model_metrics: has no counterpart: the buckets of Carpool's histograms are "
        "fixed; remove it",
    ),
}


@pytest.mark.parametrize(("files", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_mistake_is_one_sentence(files: dict[str, str], sentence: str, tmp_path: Path) -> None:
    write(tmp_path, files)
    (found,) = Repository(tmp_path).problems().values()
    assert [text.replace(str(tmp_path), "REPO") for text in found] == [sentence]


def test_problems_of_all_models_are_told_and_others_are_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"good/1/model.py": MODEL, "none/carpool.toml": ""})
    write(tmp_path, {"raises/1/model.py": "raise OSError('no weights')\nclass M: ..."})
    write(tmp_path, triton('backend: "python" platform: "x" '))
    assert command.main(["--repository", str(tmp_path), "--device", "cpu"]) == 1
    printed = capfd.readouterr().out.replace(str(tmp_path), "REPO").splitlines()
    assert printed == [
        "good: version 1 loaded on cpu",
        "m: REPO/m/config.pbtxt: platform: x does not go with backend python; remove it",
        "none: REPO/none has no version: put the files of the model into REPO/none/1",
        "raises: version 1 cannot be loaded: OSError: no weights",
        "4 models, 3 problems",
    ]


def test_nothing_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"good/1/model.py": MODEL})
    assert command.main(["--repository", str(tmp_path), "--device", "cpu"]) == 0
    assert capfd.readouterr().out == "good: version 1 loaded on cpu\n1 model, 0 problems\n"


def test_a_folder_without_models(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--repository", str(tmp_path)]) == 1
    assert "has no models: each is a folder" in capfd.readouterr().out
    assert command.main(["--repository", str(tmp_path / "absent")]) == 1
    assert "absent is no folder" in capfd.readouterr().err
