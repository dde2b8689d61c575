"""A repository: names, versions, and what a worker serves for an entry."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from carpool_worker.model_process.configuration import Configuration
from carpool_worker.model_process.model import LoadedModel, load_configured
from carpool_worker.repository.repository import Repository
from carpool_worker.served_models import served_models

ECHO = """
    class Echo:
        version = "own"
        def load(self, device, *, word: str = "one"):
            self.word = word
        def predict(self, batch):
            return [self.word for body in batch]
"""


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "echo" / "1" / "model.py", ECHO)
    write(tmp_path / "echo" / "2" / "model.py", ECHO)
    write(tmp_path / "echo" / "10" / "model.py", ECHO)
    return tmp_path


@pytest.fixture
def repository(folder: Path) -> Repository:
    return Repository(folder)


def refused(repository: Repository, name: str, version: str | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        repository.served_model(name, version, {})
    return str(caught.value).replace(str(repository.folder), "REPO")


def test_entries_are_folders_with_a_valid_name_and_a_version_or_a_declaration(folder: Path) -> None:
    write(folder / "declared" / "carpool.toml")
    write(folder / "of_triton" / "config.pbtxt")
    write(folder / "notes" / "readme.md")
    write(folder / "no name" / "1" / "model.py")
    write(folder / ".git" / "1" / "model.py")
    write(folder / "file")
    repository = Repository(folder)
    assert repository.names() == ["declared", "echo", "of_triton"]
    assert repository.listing() == {name: repository.versions(name) for name in repository.names()}


def test_versions_are_numbers_in_ascending_order(repository: Repository, folder: Path) -> None:
    write(folder / "echo" / "03" / "model.py")
    write(folder / "echo" / "latest" / "model.py")
    write(folder / "echo" / "4")
    assert repository.versions("echo") == ["1", "2", "10"]


def test_a_version_of_an_entry_is_served_with_its_parameters(repository: Repository, folder: Path) -> None:
    toml = """
        object = "model.py:Echo"
        device = "cpu"
        [parameters]
        word = "two"
        [settings]
        max_batch_size = 4
    """
    write(folder / "echo" / "carpool.toml", toml)
    served = repository.served_model("echo", "2", {"word": "three"}, as_name="shout")
    assert (served.name, served.devices) == ("shout", ["cpu"])
    assert served.spec == f"shout=repository:{folder}/echo/2"
    assert served.location == f"{folder}/echo/2/model.py:Echo"
    assert served.configuration.settings == {"max_batch_size": "4"}
    sent = Configuration.decode(served.configuration.encode())
    model = load_configured(served.location, "cpu", sent)
    assert isinstance(model, LoadedModel)
    assert (model.version, model.parameters, model.run(["a"], [])) == ("2", {"word": "three"}, ["three"])


def test_without_a_version_it_is_the_newest(repository: Repository) -> None:
    served = repository.served_model("echo", None, {})
    assert (served.name, served.configuration.version) == ("echo", "10")


def test_an_entry_needs_no_declaration_where_what_it_has_is_clear(
    repository: Repository, folder: Path
) -> None:
    write(folder / "shout" / "1" / "model.py", "def _helper(): ...\ndef shout(batch): return batch")
    write(folder / "net" / "1" / "model.onnx")
    assert repository.served_model("shout", None, {}).location == f"{folder}/shout/1/model.py:shout"
    assert repository.served_model("net", None, {}).location == f"onnx:{folder}/net/1/model.onnx"


def test_paths_of_a_declaration_start_in_the_folder_of_the_version(
    repository: Repository, folder: Path
) -> None:
    write(folder / "echo" / "carpool.toml", '[parameters]\nweights = "w.pt"\n')
    served = repository.served_model("echo", "2", {"word": "x"})
    assert {one.folder for one in served.configuration.parameters.values()} == {f"{folder}/echo/2"}
    assert served.configuration.folder == folder / "echo" / "2"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../echo", "echo/1", "/etc", "model.py:Echo", "square", "e\n"]
)
def test_only_names_of_entries_are_served(repository: Repository, name: str) -> None:
    assert refused(repository, name) == f"there is no model {name!r} in REPO; there are echo"


def test_only_versions_of_an_entry_are_served(repository: Repository) -> None:
    assert refused(repository, "echo", "../2") == "echo has no version '../2' in REPO; it has 1, 2, 10"


def test_links_that_lead_out_are_refused(
    repository: Repository, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    file = write(outside / "1" / "model.py", ECHO)
    (folder / "linked").symlink_to(outside)
    (folder / "echo" / "11").symlink_to(outside / "1")
    (folder / "within").symlink_to(folder / "echo")
    write(folder / "files" / "1" / "model.py").unlink()
    (folder / "files" / "1" / "model.py").symlink_to(file)
    write(folder / "dots" / "carpool.toml", f'object = "{file}:Echo"')
    write(folder / "dots" / "1" / "weights")
    assert refused(repository, "linked").startswith("REPO/linked leads out of REPO: ")
    assert refused(repository, "echo", "11").startswith("REPO/echo/11 leads out of REPO/echo: ")
    assert "REPO/files/1/model.py leads out of REPO/files: " in refused(repository, "files")
    assert " leads out of REPO/dots: " in refused(repository, "dots")
    assert repository.served_model("within", "1", {}).name == "within"
    (folder / "echo" / "carpool.toml").symlink_to(write(outside / "carpool.toml", "replicas = 2"))
    assert refused(repository, "echo", "2").startswith("REPO/echo/carpool.toml leads out of REPO/echo: ")


@pytest.mark.parametrize(
    ("spec", "name", "version"),
    [
        ("repository:REPO/echo", "echo", "10"),
        ("repository:REPO/echo/2", "echo", "2"),
        ("shout=repository:REPO/echo/1", "shout", "1"),
    ],
)
def test_a_command_line_names_an_entry(folder: Path, spec: str, name: str, version: str) -> None:
    (served,) = served_models([spec.replace("REPO", str(folder))], device="cpu")
    assert (served.name, served.configuration.version) == (name, version)
    assert served.location == f"{folder}/echo/{version}/model.py:Echo"


def test_a_repository_is_a_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match="is no folder: name that of a repository"):
        Repository(folder / "echo" / "1" / "model.py")
