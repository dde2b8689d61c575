"""Parameters of a model: which it declares, how values are read, and what an error says."""

from __future__ import annotations

import enum
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pytest
from pydantic import Field, SecretStr

from carpool.plugins import UnusableError
from carpool_worker.model_process.configuration import HIDDEN, Configuration, Parameter
from carpool_worker.model_process.model import LoadError, SteppingModel, load_configured
from carpool_worker.model_process.parameters import read_parameters
from carpool_worker.served_models import served_models

FOLDER: Final = "/models/a"


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


class Classifier:
    def load(self, device: str, *, weights: Path, threads: Annotated[int, Field(ge=1)] = 4) -> None: ...
    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


def taking(kind: Any, *default: Any) -> type:
    """A class whose `load` has one parameter, `value`, of this type."""

    class Model:
        def load(self, device: str, *, value: Any = None) -> None: ...

    Model.load.__annotations__["value"] = kind
    Model.load.__kwdefaults__ = {"value": default[0]} if default else None
    return Model


def given(**values: Any) -> dict[str, Parameter]:
    return {name: Parameter(value, "--param", FOLDER) for name, value in values.items()}


def refused(model: Any, parameters: Mapping[str, Parameter], location: str = "m.py:M") -> str:
    with pytest.raises(UnusableError) as caught:
        read_parameters(model, location, parameters)
    return str(caught.value)


# --- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (str, "17", "17"),
        (str, "", ""),
        (int, "17", 17),
        (int, 17, 17),
        (float, "1e-3", 1e-3),
        (bool, "no", False),
        (bool, "true", True),
        (Path, "a.pt", Path(FOLDER, "a.pt")),
        (Path, "/b/a.pt", Path("/b/a.pt")),
        (Mode, "exact", Mode.EXACT),
        (Literal["small", "large"], "small", "small"),
        (Literal[1, 2], "2", 2),
        (int | None, "none", None),
        (int | None, "", None),
        (int | None, "3", 3),
        (str | None, "x", "x"),
        (list[int], "1, 2", [1, 2]),
        (list[int], "[1, 2]", [1, 2]),
        (list[int], [1, 2], [1, 2]),
        (list[str], "a", ["a"]),
        (list[str], '["a,b"]', ["a,b"]),
        (list[Path], "a,/b", [Path(FOLDER, "a"), Path("/b")]),
        (list[int] | None, "null", None),
        (dict[str, float], '{"a": 1}', {"a": 1.0}),
        (SecretStr, "s3cret", SecretStr("s3cret")),
    ],
)
def test_value_is_read_as_its_type(kind: Any, value: Any, expected: Any) -> None:
    found = read_parameters(taking(kind), "m.py:M", given(value=value)).of_load
    assert found == {"value": expected}
    assert type(found["value"]) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (int, "two", "value (--param) is 'two': must be a valid integer"),
        (int, 2.5, "value (--param) is 2.5: must be a valid integer"),
        (bool, "maybe", "'maybe': must be a valid boolean"),
        (str, 7, "is 7: must be a valid string"),
        (Mode, "slow", "'slow': must be 'fast' or 'exact'"),
        (Literal["a"], "b", "'b': must be 'a'"),
        (list[int], "1,x", "'1,x': must be a valid integer"),
        (Annotated[int, Field(ge=1)], "0", "'0': must be greater than or equal to 1"),
    ],
)
def test_value_of_another_type_is_refused(kind: Any, value: Any, reason: str) -> None:
    error = refused(taking(kind), given(value=value))
    assert f"the parameter {reason}" in error or reason in error
    assert re.search(r"\. Model takes value: .+$", error)


@pytest.mark.parametrize("kind", [Path, list[Path], set[Path], dict[str, Path], Path | None])
def test_a_path_from_far_away_stays_in_its_folder(kind: Any, tmp_path: Path) -> None:
    """Also through links. One that nothing confines may be anywhere."""
    entry, outside = tmp_path / "repository" / "entry", tmp_path / "secret"
    entry.mkdir(parents=True)
    outside.touch()
    (entry / "link").symlink_to(outside)

    def read(path: str, within: Path | None = tmp_path / "repository") -> str:
        texts = {list[Path]: f'["{path}"]', set[Path]: f'["{path}"]', dict[str, Path]: f'{{"a": "{path}"}}'}
        parameter = Parameter(texts.get(kind, path), "--param", str(entry), within=str(within or ""))
        values = read_parameters(taking(kind), "model.py:Model", {"value": parameter})
        return str(values.of_load["value"])

    for path in ("weights", "../other/weights", str(entry / "weights")):
        assert "weights" in read(path)
    for path in ("../../secret", "link", "/etc/passwd", str(outside)):
        with pytest.raises(UnusableError, match=r"the parameter value \(--param\) is .*must be a path in "):
            read(path)
        assert path.rpartition("/")[2] in read(path, within=None)


def test_an_error_says_all_that_is_wrong_and_what_the_model_takes() -> None:
    assert refused(Classifier, given(weight="a.pt", threads="0")) == (
        "there is no parameter 'weight' (--param), did you mean weights?; "
        "the parameter weights is missing (--param weights=VALUE); "
        "the parameter threads (--param) is '0': must be greater than or equal to 1. "
        "Classifier takes weights: Path, threads: int = 4"
    )


@pytest.mark.parametrize(
    ("kind", "default", "shown"),
    [
        (str, "a", "value: str = 'a'"),
        (Path, Path("a.pt"), "value: Path = 'a.pt'"),
        (Mode, Mode.FAST, "value: 'fast' | 'exact' = 'fast'"),
        (Literal["a", "b"], "a", "value: 'a' | 'b' = 'a'"),
        (int | None, None, "value: int | None = None"),
        (list[Path], [], "value: list[Path] = []"),
        (SecretStr, SecretStr("s3cret"), f"value: SecretStr = {HIDDEN}"),
        (SecretStr | None, None, "value: SecretStr | None = None"),
    ],
)
def test_types_are_shown_as_they_are_written(kind: Any, default: Any, shown: str) -> None:
    assert refused(taking(kind, default), given(x="1")).endswith(f". Model takes {shown}")


def test_parameters_are_shown_with_defaults_and_without_secrets() -> None:
    class Model:
        def load(
            self, device: str, *, weights: Path, token: str, key: SecretStr, mode: Mode = Mode.FAST,
            sizes: tuple[int, ...] = (1, 2), limit: int | None = None,
        ) -> None: ...  # fmt: skip

    values = read_parameters(
        Model, "m.py:M",
        given(weights="a.pt", key="k3y-k3y")
        | {"token": Parameter("s3cret", "--param-file token=t", FOLDER, is_secret=True)},
    )  # fmt: skip
    assert values.shown == {
        "weights": f"{FOLDER}/a.pt", "token": HIDDEN, "key": HIDDEN, "mode": "fast", "sizes": "[1, 2]",
        "limit": "none",
    }  # fmt: skip
    assert sorted(values.secrets) == ["k3y-k3y", "s3cret"]
    assert values.of_load.keys() == {"weights", "token", "key"}  # the defaults are the model's


@pytest.mark.parametrize("kind", [SecretStr, Annotated[str, Field(pattern="^a$")]])
def test_no_error_has_a_secret(kind: Any) -> None:
    secret = Parameter("s3cret", "--param-file value=t", FOLDER, is_secret=True)
    error = refused(taking(Annotated[kind, Field(max_length=3)]), {"value": secret, "x": secret})
    assert "the parameter value (--param-file value=t) must be of the type" in error
    assert "s3cret" not in error + repr(secret)


# --- which a model declares --------------------------------------------------------------------------------


def test_parameters_are_those_of_load_or_else_of_init() -> None:
    class OfInit:
        def __init__(self, first: int = 1, *, factor: int) -> None: ...
        def load(self, device: str) -> None: ...

    class OfLoad(OfInit):
        def load(self, device: str, *, weights: str) -> None: ...  # type: ignore[override]

    @dataclass(kw_only=True)
    class Data:
        factor: int = 3

    for model in (OfInit, Data):
        values = read_parameters(model, "m.py:M", given(factor="5"))
        assert (values.of_init, values.of_load) == ({"factor": 5}, {})
    values = read_parameters(OfLoad, "m.py:M", given(weights="a"))
    assert (values.of_init, values.of_load) == ({}, {"weights": "a"})
    assert "there is no parameter 'factor'" in refused(OfLoad, given(factor="5", weights="a"))
    assert read_parameters(OfLoad(factor=1), "m.py:m", given(weights="a")).of_load == {"weights": "a"}
    assert "takes no parameters" in refused(OfInit(factor=1), given(factor="1"))


def test_arguments_without_an_annotation_have_the_type_of_their_default() -> None:
    class Model:
        def load(self, device, *, text, number=3, flag=False):  # type: ignore[no-untyped-def]
            ...

    values = read_parameters(Model, "m.py:M", given(text="1", number="2", flag="yes"))
    assert values.of_load == {"text": "1", "number": 2, "flag": True}


def test_argument_that_cannot_be_read_is_no_parameter_if_it_has_a_default() -> None:
    class Connection: ...

    assert read_parameters(taking(Connection | None, None), "m.py:M", {}).shown == {}
    assert "no value can be read for the type Connection; use str, int" in refused(taking(Connection), {})


@pytest.mark.parametrize(
    ("model", "location", "reason"),
    [
        (len, "m.py:len", "len is a function, which takes no parameters: write a class"),
        (Classifier.predict, "m.py:f", "predict is a function"),
        (object, "m.py:M", "object takes no parameters: they are the arguments after a `*` of its `load`"),
        (object(), "onnx:m.onnx", "an ONNX file takes no parameters; its constants are declared in the TOML"),
    ],
)
def test_model_without_parameters_says_why(model: Any, location: str, reason: str) -> None:
    assert read_parameters(model, location, {}).of_load == {}
    assert refused(model, given(a="1", b="2"), location).startswith(f"a, b cannot be given: {reason}")


# --- models of files ---------------------------------------------------------------------------------------

MODELS: Final = """
    from __future__ import annotations
    from pathlib import Path
    from pydantic import SecretStr
    loaded = []

    class Classifier:
        max_batch_size = 4
        slots_seen = None
        def __init__(self):
            self.slots_seen = self.max_batch_size
        def load(self, device, *, weights: Path, token: SecretStr | None = None, fail: bool = False):
            loaded.append(weights)
            if fail:
                raise ValueError("not " + token.get_secret_value())
        def predict(self, batch):
            return [self.slots_seen for _ in batch]

    class Grows(Classifier):
        def load(self, device, *, size: int = 3):
            self.max_batch_size = size

    class Steps:
        def __init__(self, *, times: int):
            self.times = times
        def begin(self, requests): ...
        def step(self, requests): ...

    class Forgot:
        def load(self, device, weights): ...
        def predict(self, batch): return batch

    class Typed:
        def load(self, device: Elsewhere, *, weights: Missing): ...
        def predict(self, batch): return batch

    class Untyped(Typed):
        def load(self, device: Elsewhere, *, text: str = "a", net: Missing | None = None): ...

    def double(batch):
        return [2 * body for body in batch]

    double.max_batch_size = 2
"""


@pytest.fixture
def load(tmp_path: Path, restored_imports: None) -> Callable[..., Any]:
    file = tmp_path / "carpool_test_parameters.py"
    file.write_text(textwrap.dedent(MODELS))

    def load(name: str, settings: Mapping[str, str] = {}, **values: Any) -> Any:
        configuration = Configuration(parameters=given(**values), settings=settings)
        return load_configured(f"{file}:{name}", "cpu", Configuration.decode(configuration.encode()))

    return load


@pytest.fixture
def restored_imports() -> Iterator[None]:
    path, modules, argv = list(sys.path), set(sys.modules), sys.argv
    yield
    sys.path[:] = path
    sys.argv = argv
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def test_model_is_loaded_with_its_parameters(load: Callable[..., Any]) -> None:
    model = load("Classifier", weights="a.pt")
    assert model.parameters == {"weights": f"{FOLDER}/a.pt", "token": "none", "fail": "false"}
    steps = load("Steps", times="3")
    assert isinstance(steps, SteppingModel) and steps.parameters == {"times": "3"}


def test_nothing_is_loaded_if_a_parameter_is_wrong(load: Callable[..., Any]) -> None:
    with pytest.raises(UnusableError, match="must be a valid boolean"):
        load("Classifier", weights="a.pt", fail="perhaps")
    assert sys.modules["carpool_test_parameters"].loaded == []


@pytest.mark.usefixtures("load")
def test_an_error_in_a_file_names_the_file_and_the_table(tmp_path: Path) -> None:
    table, file = "[models.m.parameters]", tmp_path / "carpool.toml"
    model = "[models.m]\nobject = 'carpool_test_parameters.py:Classifier'"
    file.write_text(f"{model}\n{table}\nwieghts = 'a.pt'\nfail = 7\n")
    (served,) = served_models([str(file)], device="cpu")
    with pytest.raises(UnusableError) as caught:
        load_configured(served.location, "cpu", Configuration.decode(served.configuration.encode()))
    assert str(caught.value).startswith(
        f"there is no parameter 'wieghts' ({file}: {table}), did you mean weights?; "
        f"the parameter weights is missing ({file}: {table}, or --param weights=VALUE); "
        f"the parameter fail ({file}: {table}) is 7: must be a valid boolean"
    )


def test_what_load_raises_has_no_secret(load: Callable[..., Any]) -> None:
    with pytest.raises(LoadError, match=re.escape(f"ValueError: not {HIDDEN}")) as caught:
        load("Classifier", weights="a.pt", fail="yes", token="s3cret")  # noqa: S106
    assert "in load" in caught.value.trace and "s3cret" not in caught.value.trace


def test_positional_argument_is_told_to_be_behind_the_star(load: Callable[..., Any]) -> None:
    with pytest.raises(UnusableError, match=re.escape("`load(self, device, *, weights)`")):
        load("Forgot")
    with pytest.raises(UnusableError, match=r"'weights' of 'load' cannot be a parameter: .* 'Missing'"):
        load("Typed")
    assert load("Untyped").parameters == {"text": "a"}


def test_settings_from_outside_replace_those_of_the_model(load: Callable[..., Any]) -> None:
    model = load("Classifier", {"max_batch_size": "16", "tenant_weights": "gold:4"}, weights="a")
    assert model.settings.max_batch_size == 16
    assert model.settings.tenant_weights == {"gold": 4}
    assert model.run([1], []) == [16]  # `__init__` saw it
    assert load("Grows", {"max_batch_size": "16"}, size=3).settings.max_batch_size == 16
    assert load("double", {"max_batch_size": "16"}).settings.max_batch_size == 16
    with pytest.raises(UnusableError, match="policy: a stepping model takes a request as soon as"):
        load("Steps", {"policy": "deferred"}, times="3")
    with pytest.raises(UnusableError, match="max_batch_size cannot be set: len takes no attributes"):
        load_configured("builtins:len", "cpu", Configuration(settings={"max_batch_size": "2"}))


def test_a_model_without_parameters_imports_no_pydantic(tmp_path: Path) -> None:
    """Which takes a model process 0.1 s and some megabytes."""
    (tmp_path / "m.py").write_text(textwrap.dedent(MODELS).replace("from pydantic import SecretStr", ""))
    program = (
        "import sys\n"
        "from carpool_worker.model_process.main import load_configured\n"
        "load_configured('m.py:double', 'cpu')\n"
        "assert 'pydantic' not in sys.modules\n"
        "load_configured('m.py:Grows', 'cpu')\n"
        "assert 'pydantic' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, check=True)


def test_configuration_arrives_as_it_was_sent() -> None:
    sent = Configuration(
        parameters={"a": Parameter([1, "x", {"y": 2.5}], "carpool.toml", "/m", is_secret=True)},
        settings={"max_batch_size": "4"},
        folder=Path("/m"),
        parameters_in="carpool.toml: [parameters]",
        settings_from={"max_batch_size": "file"},
    )
    assert Configuration.decode(memoryview(sent.encode())) == sent
    assert Configuration.decode(Configuration().encode()) == Configuration()
    assert json.loads(sent.encode())[2] == "/m"
