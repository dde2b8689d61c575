"""From what a user names to a model, and to the name under which it is registered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool_worker.model_process.loader import READY_MADE, find_model, model_name
from carpool_worker.models.onnx import OnnxModel
from carpool_worker.models.square import Square


@pytest.fixture(autouse=True)
def no_traces() -> Iterator[None]:
    """Modules loaded by a test, and where they were looked for, are gone after it."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


# --- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "name", "where"),
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
def test_a_name_and_where_to_find_it(spec: str, name: str, where: str) -> None:
    assert model_name(spec) == (name, where)


@pytest.mark.parametrize("spec", ["", "models:", "a b", "dir/model.py", "a.b:_hidden", "päckchen", "x" * 200])
def test_nothing_that_could_be_a_name(spec: str) -> None:
    with pytest.raises(ValueError, match=r"no name to register it under; write NAME="):
        model_name(spec)


# --- models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(READY_MADE))
def test_every_ready_made_model_is_found(name: str) -> None:
    assert callable(find_model(name).predict)


def test_one_in_a_module_is_found() -> None:
    assert find_model("carpool_worker.models.square:Square") is Square


def test_an_onnx_file_is_a_model_before_it_is_looked_at() -> None:
    model = find_model("onnx:somewhere/resnet.onnx")
    assert isinstance(model, OnnxModel)
    assert model.path == Path("somewhere/resnet.onnx")


def test_one_in_a_file_is_found_with_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carpool_test_neighbour.py").write_text("FACTOR = 3\n")
    file = tmp_path / "carpool_test_model.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from carpool_test_neighbour import FACTOR\n"
        "@dataclass\n"  # which looks its own module up, where annotations are text
        "class Times:\n"
        "    factor: int = FACTOR\n"
        "def triple(batch):\n"
        "    return [Times().factor * x for x in batch]\n"
    )
    assert find_model(f"{file}:triple")([1, 2]) == [3, 6]
    monkeypatch.chdir(tmp_path)
    assert find_model("carpool_test_model.py:Times")().factor == 3


# --- errors for people -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["", "cube", "models.py", ":Name", "module:", ":"])
def test_neither_module_nor_name(where: str) -> None:
    with pytest.raises(ValueError, match=r"write module:Name, path/file\.py:Name, onnx:FILE, square or"):
        find_model(where)


def test_no_such_name_in_a_module_or_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"carpool_worker\.models\.square has no 'Cube'"):
        find_model("carpool_worker.models.square:Cube")
    file = tmp_path / "carpool_test_empty.py"
    file.write_text("")
    with pytest.raises(ValueError, match=r"carpool_test_empty\.py has no 'Cube'"):
        find_model(f"{file}:Cube")


def test_no_such_file_says_from_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.py").mkdir()
    for file in ("missing.py", "folder.py"):
        with pytest.raises(ValueError, match=f"file '{file}' does not exist") as caught:
            find_model(f"{file}:Model")
        assert str(tmp_path) in str(caught.value)


def test_no_such_module() -> None:
    with pytest.raises(ModuleNotFoundError, match="carpool_no_such_module"):
        find_model("carpool_no_such_module:Model")


def test_what_a_file_raises_is_not_hidden(tmp_path: Path) -> None:
    file = tmp_path / "carpool_test_broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        find_model(f"{file}:Model")
