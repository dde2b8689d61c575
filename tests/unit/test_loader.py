"""From a model's name on the command line to the model, and to the name under which it is served."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from carpool.plugins import UnusableError, reason_of
from carpool_worker.model_process.loader import find_model, model_name, registered_names
from carpool_worker.models.onnx import OnnxModel
from carpool_worker.models.square import Square


@pytest.fixture(autouse=True)
def restored_imports() -> Iterator[None]:
    """Remove the modules that a test loaded, and the paths that it added; give back the command line."""
    path, modules, argv = list(sys.path), set(sys.modules), sys.argv
    yield
    sys.path[:] = path
    sys.argv = argv
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
        ("hf:Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct", "hf:Qwen/Qwen2.5-0.5B-Instruct"),
        ("chat=hf:models/tiny", "chat", "hf:models/tiny"),
        ("st:models/all-MiniLM-L6-v2/", "all-MiniLM-L6-v2", "st:models/all-MiniLM-L6-v2/"),
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


# --- names of modules, and what they find -------------------------------------------------------------------

PACKAGE: Final = (
    "from .carpool_test_factor import FACTOR\ndef times(batch): return [x * FACTOR for x in batch]\n"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the working directory, whose module `model` imports relatively."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "carpool_test_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "carpool_test_factor.py").write_text("FACTOR = 3\n")
    (folder / "model.py").write_text(PACKAGE)
    return folder


@pytest.mark.usefixtures("package")
def test_module_of_the_working_directory_is_found() -> None:
    assert find_model("carpool_test_package.model:times")([1, 2]) == [3, 6]


def test_file_that_imports_relatively_is_told_the_name_of_its_module(package: Path) -> None:
    with pytest.raises(UnusableError, match=r"name it carpool_test_package\.model:times, with") as caught:
        find_model("carpool_test_package/model.py:times")
    assert str(package.parent) in str(caught.value)


def test_file_beside_a_model_hides_neither_the_standard_library_nor_what_is_imported(tmp_path: Path) -> None:
    for name in ("colorsys", "numpy", "redis", "carpool"):  # the first is not imported before
        (tmp_path / f"{name}.py").write_text("raise AssertionError('a file of the user was imported')")
    (tmp_path / "carpool_test_hidden.py").write_text(
        "import colorsys, numpy, redis, carpool\nfrom carpool import TensorSpec, Client\n"
        "def names(batch): return [colorsys.rgb_to_hsv, numpy.asarray, redis.Redis]\n"
    )
    assert len(find_model(f"{tmp_path / 'carpool_test_hidden.py'}:names")([])) == 3


def test_file_beside_a_model_is_found_before_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, value in (("installed", "a package"), ("models", "the user")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "carpool_test_utils.py").write_text(f"OF = {value!r}\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])
    file = tmp_path / "models" / "carpool_test_user.py"
    file.write_text("import carpool_test_utils\ndef of(batch): return carpool_test_utils.OF\n")
    assert find_model(f"{file}:of")([]) == "the user"


@pytest.mark.parametrize("library", ["queue", "numpy", "colorsys", "installed_framework"])
def test_model_in_a_file_named_like_a_library_may_import_that(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "installed_framework.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])
    file = tmp_path / f"{library}.py"
    file.write_text(f"import {library}\ndef library(batch): return {library}.__file__\n")
    assert find_model(f"{file}:library")([]) != str(file)
    assert find_model(f"{file}:library").__module__ != library


def test_model_sees_no_arguments_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", "17", "5", "file.py:Model", "cpu"])
    file = tmp_path / "carpool_test_arguments.py"
    file.write_text(
        "import sys\nseen = list(sys.argv)\ndef arguments(batch): return [seen, list(sys.argv)]\n"
    )
    assert find_model(f"{file}:arguments")([]) == [[str(file)], [str(file)]]
    find_model("square")
    assert sys.argv == ["square"]


def test_file_that_requires_arguments_is_told_that_it_gets_none(tmp_path: Path) -> None:
    file = tmp_path / "carpool_test_required.py"
    file.write_text("import argparse\np = argparse.ArgumentParser()\np.add_argument('w')\np.parse_args()\n")
    with pytest.raises(SystemExit) as caught:
        find_model(f"{file}:Model")
    assert "It gets no arguments" in reason_of(caught.value)


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


def test_missing_module_is_an_error_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnusableError, match="no module 'carpool_no_such_module'") as caught:
        find_model("carpool_no_such_module:Model")
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "carpool_test_times.py").touch()
    with pytest.raises(UnusableError, match=r"did you mean models/carpool_test_times.py:Model\?"):
        find_model("models/carpool_test_times:Model")


def test_module_that_is_missing_in_a_model_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "carpool_test_needs.py").write_text("import carpool_no_such_module")
    with pytest.raises(ModuleNotFoundError, match="No module named 'carpool_no_such_module'"):
        find_model("carpool_test_needs:Model")


def test_error_raised_by_a_file_is_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "carpool_test_broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        find_model(f"{file}:Model")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            "import os\n1 / 0\nclass Edge: ...\ndef single(body): ...\n_x = 1\ndef _y(): ...",
            "it has Edge, single; write {}:Edge",
        ),
        ("import os", "name an object of it, as in {}:Name"),
        ("def (", "name an object of it, as in {}:Name"),
    ],
)
def test_file_without_a_name_is_told_its_objects(tmp_path: Path, text: str, advice: str) -> None:
    file = tmp_path / "edge.py"
    file.write_text(text)
    with pytest.raises(UnusableError) as raised:
        find_model(str(file))
    assert str(raised.value) == f"model '{file}' is a whole file: {advice.format(file)}"


def test_misspelt_registered_name_is_recognised() -> None:
    with pytest.raises(ValueError, match=r"'sqare' does not exist: did you mean 'square'\? Or write module:"):
        find_model("sqare")
