"""From a model's name on the command line to the model, and to the name under which it is served."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool_worker.model_process.loader import find_model, model_name, registered_names
from carpool_worker.models.onnx import OnnxModel
from carpool_worker.models.square import Square


@pytest.fixture(autouse=True)
def restored_imports() -> Iterator[None]:
    """Remove the modules that a test loaded, and the paths that it added."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


# --- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "name", "location"),
    [
        ("square", "square", "square"),
        ("my.models:Embedder", "Embedder", "my.models:Embedder"),
        ("dir/models.py:embed", "embed", "dir/models.py:embed"),
        ("other=square", "other", "square"),
        ("v2.1_b-c=my.models:Embedder", "v2.1_b-c", "my.models:Embedder"),
        ("onnx:bert/model.onnx", "bert", "onnx:bert/model.onnx"),
        ("small=onnx:bert/model.onnx", "small", "onnx:bert/model.onnx"),
        ("dir=with/models.py:embed", "dir", "with/models.py:embed"),
        ("./a=b/models.py:embed", "embed", "./a=b/models.py:embed"),
    ],
)
def test_spec_is_a_name_and_a_location(spec: str, name: str, location: str) -> None:
    assert model_name(spec) == (name, location)


@pytest.mark.parametrize("spec", ["", "models:", "a b", "dir/model.py", "a.b:_hidden", "päckchen", "x" * 200])
def test_spec_without_a_valid_name_is_rejected(spec: str) -> None:
    with pytest.raises(ValueError, match=r"no valid name to register it under; write NAME="):
        model_name(spec)


# --- models ------------------------------------------------------------------------------------------------


def test_registered_models_are_those_that_the_documents_name() -> None:
    assert registered_names() == ["docsearch", "square", "voice-activity", "writer"]


@pytest.mark.parametrize(
    ("name", "method"),
    [("docsearch", "predict"), ("square", "predict"), ("voice-activity", "predict"), ("writer", "step")],
)
def test_registered_model_is_found_by_its_name(name: str, method: str) -> None:
    assert callable(getattr(find_model(name), method))


def test_another_package_can_register_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carpool_test_plugin.py").write_text("def cube(batch):\n    return [x**3 for x in batch]\n")
    metadata = tmp_path / "carpool_test_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: carpool-test-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[carpool.models]\ncube = carpool_test_plugin:cube\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_model("cube")([2]) == [8]
    with pytest.raises(
        ValueError, match=r"or a registered name \(cube, docsearch, square, voice-activity, writer\)"
    ):
        find_model("sphere")


def test_model_in_a_module_is_found() -> None:
    assert find_model("carpool_worker.models.square:Square") is Square


def test_onnx_model_is_found_without_reading_its_file() -> None:
    model = find_model("onnx:somewhere/resnet.onnx")
    assert isinstance(model, OnnxModel)
    assert model.path == Path("somewhere/resnet.onnx")


def test_model_in_a_file_can_import_modules_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "carpool_test_neighbour.py").write_text("FACTOR = 3\n")
    file = tmp_path / "carpool_test_model.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from carpool_test_neighbour import FACTOR\n"
        "@dataclass\n"  # looks up its module in sys.modules, because the annotations are strings
        "class Times:\n"
        "    factor: int = FACTOR\n"
        "def triple(batch):\n"
        "    return [Times().factor * x for x in batch]\n"
    )
    assert find_model(f"{file}:triple")([1, 2]) == [3, 6]
    monkeypatch.chdir(tmp_path)
    assert find_model("carpool_test_model.py:Times")().factor == 3


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", ["", "cube", "models.py", ":Name", "module:", ":"])
def test_location_of_no_known_form_is_rejected(location: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"write module:Name, .* or a registered name \(docsearch, square, voice-activity, writer\)",
    ):
        find_model(location)


def test_missing_name_in_a_module_or_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"carpool_worker\.models\.square has no 'Cube'"):
        find_model("carpool_worker.models.square:Cube")
    file = tmp_path / "carpool_test_empty.py"
    file.write_text("")
    with pytest.raises(ValueError, match=r"carpool_test_empty\.py has no 'Cube'"):
        find_model(f"{file}:Cube")


def test_missing_file_is_an_error_with_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.py").mkdir()
    for file in ("missing.py", "folder.py"):
        with pytest.raises(ValueError, match=f"file '{file}' does not exist") as caught:
            find_model(f"{file}:Model")
        assert str(tmp_path) in str(caught.value)


def test_missing_module_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="carpool_no_such_module"):
        find_model("carpool_no_such_module:Model")


def test_error_raised_by_a_file_is_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "carpool_test_broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        find_model(f"{file}:Model")


def test_misspelt_registered_name_is_recognised() -> None:
    with pytest.raises(ValueError, match=r"'sqare' does not exist: did you mean 'square'\? Or write module:"):
        find_model("sqare")
