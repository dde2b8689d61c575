"""From the words of a command line and files of models to the models that are served."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from carpool.settings import ModelOptions, WorkerSettings, read_settings
from carpool_worker.served_models import ServedModel, served_models


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(textwrap.dedent(text))


def served(*specs: str, **options: list[str]) -> dict[str, ServedModel]:
    return {model.name: model for model in served_models(specs, ModelOptions(**options))}


def values(model: ServedModel) -> dict[str, Any]:
    return {name: parameter.value for name, parameter in model.configuration.parameters.items()}


def refused(*specs: str, **options: list[str]) -> str:
    with pytest.raises(ValueError) as caught:
        served(*specs, **options)
    return str(caught.value)


# --- a command line ----------------------------------------------------------------------------------------


def test_of_one_model_its_name_may_be_left_out(folder: Path) -> None:
    model = served("small=m.py:M", param=["a=x=1", "small.b="], set=["max_batch_size=8"])["small"]
    assert (model.location, model.spec, model.devices) == ("m.py:M", "small=m.py:M", ["cpu"])
    assert values(model) == {"a": "x=1", "b": ""}
    assert model.configuration.parameters["a"].folder == str(folder)
    assert model.configuration.settings == {"max_batch_size": "8"}
    assert model.options == ModelOptions(["a=x=1", "b="], (), ["max_batch_size=8"])


def test_of_several_models_each_has_its_own(folder: Path) -> None:
    models = served("a=m.py:M", "v2.1=m.py:M", param=["a.x=1", "v2.1.x=2"], set=["v2.1.max_batch_size=8"])
    assert [values(model) for model in models.values()] == [{"x": "1"}, {"x": "2"}]
    assert [model.configuration.settings for model in models.values()] == [{}, {"max_batch_size": "8"}]
    assert [model.options.param for model in models.values()] == [["x=1"], ["x=2"]]


def test_parameters_come_from_files_and_are_secret(folder: Path) -> None:
    write("token", "s3cret\n")
    write("all/of.toml", "x = [1, 2]\nwhen = 2026-11-27\n")
    one = served("m.py:M", param=["y=1"], param_file=["token=token", "all/of.toml"])["M"]
    assert values(one).items() >= {"token": "s3cret", "x": [1, 2]}.items()
    assert {name: given.is_secret for name, given in one.configuration.parameters.items()} == {
        "y": False, "token": True, "x": True, "when": True,
    }  # fmt: skip
    assert one.configuration.parameters["x"].folder == str(folder / "all")
    assert "s3cret" not in repr(one)
    assert b'"2026-11-27"' in one.configuration.encode()
    two = served("a=m.py:M", "b=m.py:M", param_file=["a.token=token", "b=all/of.toml"])
    assert [sorted(values(model)) for model in two.values()] == [["token"], ["when", "x"]]


@pytest.mark.parametrize(
    ("specs", "options", "reason"),
    [
        (["square"], {"param": ["weights"]}, "--param: 'weights' is not NAME=VALUE"),
        (["square"], {"param": ["=1"]}, "--param: '=1' is not NAME=VALUE"),
        (["square"], {"param": ["x=1", "x=2"]}, "the parameter x is given twice, by --param and --param"),
        (["square"], {"param": ["cube.x=1"]}, "--param cube.x: there is no model 'cube'; there are square"),
        (["square", "a=square"], {"set": ["max_batch_size=1"]},
         "--set max_batch_size: there are several models; say which one: square.max_batch_size or "
         "a.max_batch_size"),
        (["square", "a=square"], {"param_file": ["f.toml"]}, "say which one: square=FILE or a=FILE"),
        (["square"], {"param_file": ["x=missing"]}, "missing cannot be read: No such file or directory"),
        (["square"], {"set": ["max_batchsize=8"]},
         "--set max_batchsize: unknown setting; did you mean max_batch_size?"),
        (["square"], {"set": ["max_batch_size=0"]},
         "--set max_batch_size is '0': must be a whole number of at least 1"),
        (["square", "square"], {}, "two models are named square; write NAME=MODEL to rename one"),
        (["missing.toml"], {}, "missing.toml cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused(specs: list[str], options: dict[str, list[str]], reason: str) -> None:
    assert reason in refused(*specs, **options)


def test_flags_may_be_repeated_and_variables_have_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["square", "--param", "sizes=1,2", "--param", 'x={"a": [1, "b"]}', "--set", "max_batch_size=8"]
    settings = read_settings(WorkerSettings, flags, "worker")
    assert settings.options == ModelOptions(["sizes=1,2", 'x={"a": [1, "b"]}'], [], ["max_batch_size=8"])
    assert (settings.given("replicas"), settings.given("device")) == (None, None)
    monkeypatch.setenv("CARPOOL_REPLICAS", "2")
    monkeypatch.setenv("CARPOOL_PARAM", "\n sizes=1,2\n\n x=y z\n")
    monkeypatch.setenv("CARPOOL_SET", "")
    settings = read_settings(WorkerSettings, ["square", "--param-file", "x=y"], "worker")
    assert settings.options == ModelOptions(["sizes=1,2", "x=y z"], ["x=y"], [])
    assert settings.given("replicas") == 2
    for name, text in ModelOptions(["a=1,\n2", "b=[]"]).environment.items():
        monkeypatch.setenv(name, text)
    assert read_settings(WorkerSettings, ["square"], "worker").options == ModelOptions(
        ["a=1,\n2", "b=[]"], [], []
    )


# --- files of models ---------------------------------------------------------------------------------------

TWO = """
    [models.small]
    object = "model.py:Classifier"
    replicas = 2
    device = ["cuda:0", "cuda:1"]

    [models.small.parameters]
    weights = "small.pt"
    sizes = [1, 2]

    [models.small.parameter_files]
    token = "token"

    [models.small.settings]
    max_batch_size = 16
    tenant_weights = { gold = 4 }

    [models.large]
    object = "package.module:Classifier"
"""


def test_file_has_all_that_a_machine_serves(folder: Path) -> None:
    write("here/carpool.toml", TWO)
    write("here/token", "s3cret\n")
    small, large = served("here/carpool.toml").values()
    assert (small.name, small.location) == ("small", f"{folder}/here/model.py:Classifier")
    assert small.devices == ["cuda:0", "cuda:1"]
    assert values(small) == {"weights": "small.pt", "sizes": [1, 2], "token": "s3cret"}
    secrets = [name for name, given in small.configuration.parameters.items() if given.is_secret]
    assert secrets == ["token"]
    assert small.configuration.parameters["weights"].folder == f"{folder}/here"
    assert small.configuration.settings == {"max_batch_size": "16", "tenant_weights": "gold:4"}
    assert (large.location, large.configuration.folder) == ("package.module:Classifier", folder / "here")
    assert large.devices == ["cpu"]
    for model in (small, large):  # what a command is given for one of them
        (same,) = served(model.spec).values()
        assert (same.name, same.configuration) == (model.name, model.configuration)
    assert list(served("other=here/carpool.toml:small", "here/carpool.toml:large")) == ["other", "large"]


def test_command_line_replaces_what_a_file_declares() -> None:
    write("carpool.toml", TWO)
    write("token", "x")
    options = ModelOptions(
        ["small.weights=b.pt"], (), ["small.max_batch_size=4", "large.max_queue_delay_ms=5ms"]
    )
    small, large = served_models(["carpool.toml"], options, replicas=1, device="cpu")
    assert values(small)["weights"] == "b.pt"
    assert small.configuration.settings == {"max_batch_size": "4", "tenant_weights": "gold:4"}
    assert small.configuration.settings_from == {"max_batch_size": "--set", "tenant_weights": "file"}
    assert large.configuration.settings == {"max_queue_delay_ms": "5"}
    assert small.devices == ["cpu"]


def test_file_of_one_model_is_named_like_its_folder(folder: Path) -> None:
    text = 'object = "onnx:net.onnx"\n[settings]\nmax_batch_size = 4\n'
    write("echo/carpool.toml", text)
    write("echo/other.toml", text)
    assert list(served("echo/carpool.toml", "echo/other.toml")) == ["echo", "other"]
    model = served("new=echo/carpool.toml")["new"]
    assert (model.location, model.spec) == (f"onnx:{folder}/echo/net.onnx", "new=echo/carpool.toml:echo")


def test_folder_of_transformers_is_beside_the_file_or_on_the_hub(folder: Path) -> None:
    (folder / "here/tiny").mkdir(parents=True)
    write("here/carpool.toml", "[models.a]\nobject = 'hf:tiny'\n[models.b]\nobject = 'st:somebody/else'")
    found = served("here/carpool.toml")
    assert [found["a"].location, found["b"].location] == [f"hf:{folder}/here/tiny", "st:somebody/else"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x", "carpool.toml is not a TOML file: "),
        ("", "carpool.toml: object must be the model, as in object = \"model.py:Name\""),
        ("[models]", "carpool.toml: models: there are none"),
        ("[model.a]\nobject = 'square'", "carpool.toml: model: unknown key; there are object, parameters, "),
        ("[models.a]\nobject = 'square'\n[b]", "carpool.toml: b: unknown key; there are models"),
        ("[models.a]\nobjekt = 'square'", "models.a.objekt: unknown key; did you mean object?"),
        ("[models.a]\nobject = 3", "models.a.object must be the model"),
        ("[models.a]\nobject = 'square'\nsettings = 3", "models.a.settings is 3: it must be a table"),
        ("[models.a]\nobject = 'square'\ndevices = 'cpu'", "unknown key; did you mean device?"),
        ("[models.a]\nobject = 'square'\ndevice = 'gpu'", "models.a.device is 'gpu': 'gpu' names no device"),
        ("[models.a]\nobject = 'square'\nreplicas = 0", "models.a.replicas is 0: must be greater than"),
        ("[models.a]\nobject = 'square'\n[models.a.settings]\nmax_batchsize = 1",
         "models.a.settings.max_batchsize: unknown setting; did you mean max_batch_size?"),
        ("[models.a]\nobject = 'square'\n[models.a.settings]\nmax_batch_size = 'x'",
         "models.a.settings.max_batch_size is 'x': must be a whole number"),
        ("[models.a]\nobject = 'square'\n[models.a.parameter_files]\nx = 'gone'", "gone cannot be read"),
        ("[models.'a b']\nobject = 'square'", "'a b' is no valid name of a model; write NAME=carpool.toml"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(text: str, reason: str) -> None:
    write("carpool.toml", text)
    assert reason in refused("carpool.toml")


def test_model_that_a_file_does_not_have_is_refused() -> None:
    write("carpool.toml", TWO)
    write("token", "x")
    assert "has no model 'medium'; it has small, large" in refused("carpool.toml:medium")
    assert "write x=carpool.toml:MODEL with one of small, large" in refused("x=carpool.toml")
