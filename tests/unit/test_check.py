"""`carpool check`: what it finds in models with the usual mistakes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest

from carpool_cli.check import command, comparing
from carpool_cli.check.resuming import CUTS_MAX, cuts_of
from carpool_worker.devices import THREAD_VARIABLES, usable_cpus

MODELS: Final = """
import numpy as np
from carpool import StateSpec, TensorSpec, Unhealthy

def shout(batch):
    return [text.upper() for text in batch]

def shares(batch):
    return [value / sum(batch) for value in batch]

def inverse(batch):
    return [1 / value for value in batch]

def twice(body):
    return body * 2

def missing(batch):
    return batch[:-1]

def countdown(body):
    yield from range(body, 0, -1)

def endless(body):
    while True:
        yield body

def length(batch):
    return [len(body) for body in batch]

def first(batch):
    return [body[:3] for body in batch]

class Greeting:
    def predict(self, batch, requests):
        languages = [request.fields.get("language", b"").decode() for request in requests]
        return [f"{language} {name}" for language, name in zip(languages, batch)]

def spell(body):
    yield from [{"text": letter} for letter in body["prompt"]]
    yield {"finish_reason": "length", "prompt_tokens": 1, "completion_tokens": len(body["prompt"])}
spell.speaks = "completions"

def count(body):
    yield from range(int(body["prompt"]))
count.speaks = "completions"

class Vectors:
    speaks = ("chat", "embeddings")
    def predict(self, batch):
        return [np.array([1.0, len(body["input"])]) if body["input"] else "none" for body in batch]

def named(request):
    yield request

def ill(batch):
    raise Unhealthy("the card is gone")

class Scaled:
    max_batch_size = 8
    inputs = [TensorSpec("x", "FP32", (3,))]
    def predict(self, batch):
        return np.cumsum(batch * np.float32(1.0001), axis=1)

class Tensors:
    # Rounds a little differently in batches; or depends on them.
    max_batch_size = 8
    inputs = [TensorSpec("x", "FP32", (3,))]
    by = 1e-6
    def predict(self, batch):
        return batch * np.float32(1 + self.by * len(batch))

class Declared(Tensors):
    outputs = [TensorSpec("y", "BF16", (3,))]

class Mixed(Tensors):
    by = 0.1

class Total:
    max_batch_size = 8
    states = [StateSpec("sum", "FP64", (-1,))]
    def predict(self, batch, states):
        sums = states["sum"] + np.array(batch)
        return sums.tolist(), {"sum": sums}

class Picky:
    max_batch_szie = 4
    def validate(self, body):
        if body > 3:
            raise ValueError("is above 3")
    def predict(self, batch):
        return batch

class Buggy:
    def validate(self, body):
        body["x"]
    def predict(self, batch):
        return batch

class Counted:
    def predict(self, batch):
        return [1]

class Nested:
    def predict(self, batch):
        return [self.one(body) for body in batch]
    def one(self, body):
        if body == 0:
            raise OSError(f"cannot identify {object()}")
        return body

class Asking:
    def predict(self, batch, clients):
        return [client.infer("shout", body) for body, client in zip(batch, clients)]

class Bound:
    binds_sequences = True
    max_batch_size = 2
    def predict(self, batch):
        return batch

class Tokens:
    # Bytes as tokens: a character that is cut in two goes on as another one.
    max_batch_size = 4
    made_of = staticmethod(lambda chunks: list("".join(chunks).encode()))
    def begin(self, requests):
        for request in requests:
            request.state = self.made_of(request.chunks)
    def step(self, requests):
        for request in requests:
            request.state.append(200 + len(request.state) % 2)
            request.emit(bytes(request.state[-1:]).decode("latin-1"))
            if len(request.state) >= request.body:
                request.finish()

class Characters(Tokens):
    made_of = staticmethod(lambda chunks: list("".join(chunks).encode("latin-1")))

class Aborting(Tokens):
    continues = False

class Dice(Characters):
    def begin(self, requests):
        import random
        for request in requests:
            request.state = []
            request.emit(random.random())

class Writing(Scaled):
    def predict(self, batch):
        batch *= np.float32(2)
        return batch.copy()

class Large:
    max_batch_size = 4
    def predict(self, batch):
        return [int(np.ones(16 * 2**20, np.uint8).sum()) for body in batch]

class Unloadable:
    def load(self, device):
        raise OSError("weights.bin is missing")
    def predict(self, batch):
        return batch
"""

# What README's model uses of torch, as strict as that: a network takes no array, and what it returns from its
# weights becomes none if gradients are kept for it.
TORCH: Final = """
import contextlib
import numpy as np
keeps_gradients = True
class Tensor:
    def __init__(self, array, requires_grad):
        self.array, self.requires_grad = array, requires_grad
    def to(self, device):
        assert device == "cpu"
        return self
    def cpu(self):
        return self
    def numpy(self):
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        return self.array
def from_numpy(array):
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        raise TypeError("expected a writable np.ndarray")
    return Tensor(array, False)
@contextlib.contextmanager
def inference_mode():
    global keeps_gradients
    keeps_gradients = False
    try:
        yield
    finally:
        keeps_gradients = True
class Module:
    def to(self, device):
        assert device == "cpu"
        return self
    def __call__(self, tensor):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"input must be Tensor, not {type(tensor).__name__}")
        return self.forward(tensor)
class Flatten(Module):
    def forward(self, tensor):
        return Tensor(tensor.array.reshape(len(tensor.array), -1), tensor.requires_grad)
class Linear(Module):
    def __init__(self, taken, returned):
        self.weights = np.full((taken, returned), 1 / taken, np.float32)
    def forward(self, tensor):
        return Tensor(tensor.array @ self.weights, keeps_gradients)
class Sequential(Module):
    def __init__(self, *modules):
        self.modules = modules
    def forward(self, tensor):
        for module in self.modules:
            tensor = module(tensor)
        return tensor
class nn:
    Flatten, Linear, Sequential = Flatten, Linear, Sequential
"""

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks a model, and returns the exit status and what was printed."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "TIMED_S", 0.0)

    def run(model: str, *arguments: str) -> tuple[int, str]:
        status = command.main([f"models.py:{model}", *arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


@pytest.mark.parametrize(
    ("model", "body", "result", "largest"),
    [
        ("shout", "hello", '"HELLO"', 32),
        ("shout", "null null", '"NULL NULL"', 32),
        ("Scaled", "[1, 2, 3]", "[1.000", 8),
        ("Total", "5", "5.0", 8),
        ("countdown", "3", "[3,2,1]", 32),
        ("Picky", "3", "3", 32),
    ],
)
def test_good_model(checked: Check, model: str, body: str, result: str, largest: int) -> None:
    status, printed = checked(model, body)
    assert status == 0, printed
    assert "body 1: " in printed
    assert result in printed
    assert f"All results are the same in batches of 1, 2, {largest}." in printed


def test_content_type_and_fields_reach_the_model(checked: Check) -> None:
    Path("image.png").write_bytes(b"\x89PNG")
    status, printed = checked("length", "@image.png", "--content-type", "IMAGE/PNG")
    assert (status, "body 1: 4\n" in printed) == (0, True)
    status, printed = checked("first", "@image.png", "--content-type", "image/png", "--accept", "image/png")
    assert (status, "body 1: 3 bytes of image/png" in printed) == (0, True)
    status, printed = checked("named", "@image.png", "--content-type", "image/png", "--accept", "text/plain")
    assert (status, "body 1: 4 bytes of text/plain" in printed) == (0, True)
    for content_type in ("application/json; charset=utf-8", "Application/JSON"):
        status, printed = checked("shout", "hello", "--content-type", content_type)
        assert (status, 'body 1: "HELLO"' in printed) == (0, True)
    status, printed = checked("Greeting", "Ada", "--field", "language=fr")
    assert (status, 'body 1: "fr Ada"' in printed) == (0, True)
    status, printed = checked("Greeting", "Ada", "--field", "other=1", "--field", "language=fr,de")
    assert (status, 'body 1: "fr,de Ada"' in printed) == (0, True)


@pytest.mark.parametrize(("model", "status"), [("Tensors", 0), ("Declared", 0), ("Mixed", 1)])
def test_tensors_in_octet_stream_are_compared_as_numbers(checked: Check, model: str, status: int) -> None:
    Path("numbers").write_bytes(np.array([0.1, 2.3, 4.5], np.float32).tobytes())
    found, printed = checked(model, "@numbers", "--content-type", "application/octet-stream")
    assert found == status, printed


def test_model_of_the_readme_runs_with_torch(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in, if there is no torch."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"\n    # embedder\.py\n((?:    .*\n|\n)+)", text)
    Path("models.py").write_text(textwrap.dedent(program), encoding="utf-8")
    Path("pixels").write_bytes(np.ones((3, 224, 224), np.float32).tobytes())
    if importlib.util.find_spec("torch") is None:
        torch = ModuleType("torch")
        exec(TORCH, vars(torch))  # noqa: S102
        monkeypatch.setitem(sys.modules, "torch", torch)
    types = ("--content-type", "application/octet-stream", "--accept", "application/json")
    status, printed = checked("Embedder", "@pixels", *types)
    assert status == 0, printed
    assert '"datatype":"FP32","shape":[128]' in printed


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (("--content-type", "html"), "--content-type: 'html' is no content type"),
        (("--accept", "html"), "--accept: 'html' is no content type"),
        (("--content-type", "application/json; charset=latin-1"), "charset latin-1, but JSON is UTF-8"),
        (("--field", "language"), "--field: 'language' is not NAME=VALUE"),
    ],
)
def test_options_of_the_body_are_checked(checked: Check, option: tuple[str, str], error: str) -> None:
    status, printed = checked("Greeting", "Ada", *option)
    assert (status, error in printed) == (1, True), printed


def test_model_that_mixes_its_rows(checked: Check) -> None:
    status, printed = checked("shares", "5")
    assert status == 1
    assert "Request 1 of a batch of 2 is answered\n    0.5\nand alone\n    1.0" in printed
    assert "Results depend on the batch" in printed


def test_bug_in_validate_is_shown_with_its_traceback(checked: Check) -> None:
    status, printed = checked("Buggy", "3")
    assert status == 1
    assert "INVALID_ARGUMENT: the model rejected this body: TypeError: 'int' object is not sub" in printed
    assert 'body["x"]' in printed
    assert "All results are the same" not in printed, "there are none"
    assert "Traceback" not in checked("Picky", "4")[1], "ValueError is how it refuses a body"


def test_wrong_number_of_results_is_not_called_a_mixture(checked: Check) -> None:
    status, printed = checked("Counted", "3")
    assert status == 1
    assert "the model returned 1 results for 2 requests" in printed
    assert "Requests fail, or their results differ, depending on the batch" in printed
    assert "mixes its rows" not in printed


def test_failing_body_of_several_is_shown_with_its_traceback(checked: Check) -> None:
    Path("bodies.jsonl").write_text("1\n\n2\n0\n")
    status, printed = checked("inverse", "@bodies.jsonl")
    assert status == 1
    assert "body 2: 0.5" in printed
    assert "body 3: INTERNAL: the model failed on this request: division by zero" in printed
    assert printed.count("ZeroDivisionError") == 1
    assert "1 / value" in printed
    assert "carpool_worker" not in printed, "only the lines of the model are of interest"
    assert "All results are the same" in printed, "the others are not affected"
    assert "1 of 3 bodies failed." in printed


def test_an_error_has_one_traceback_however_many_batches_it_is_in(checked: Check) -> None:
    Path("bodies.jsonl").write_text("1\n0\n2\n")
    status, printed = checked("Nested", "@bodies.jsonl")
    assert status == 1
    assert printed.count("OSError: cannot identify <object object at 0x") == 1


def test_a_model_that_asks_others_needs_redis_and_says_so(
    checked: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARPOOL_REDIS_URL", "redis://127.0.0.1:1/0")
    status, printed = checked("Asking", "hello")
    assert status == 1
    assert "body 1: UNAVAILABLE: Asking -> shout: Redis at redis://127.0.0.1:1/0" in printed
    assert "Asking asks other models, and `carpool check` sends that to Redis" in printed
    assert "`carpool up`" in printed and "carpool.testing.LocalClient" in printed
    assert "Traceback" not in printed, "the sentence says all"


@pytest.mark.parametrize(
    ("model", "body", "reason"),
    [
        ("missing", "1", "INTERNAL: the model returned 0 results for 1 request: the argument is a list"),
        ("twice", "7", "the model returned 2 results for 1 request: the argument is a list of bodies"),
        ("Picky", "4", "INVALID_ARGUMENT: the model rejected this body: is above 3"),
        ("Scaled", "[1, 2]", "INVALID_ARGUMENT: body"),
        ("shout", "7", "INTERNAL: the model failed on this request: "),
        ("length", "7", "object of type 'int' has no len()"),
    ],
)
def test_failure_of_the_only_body(checked: Check, model: str, body: str, reason: str) -> None:
    status, printed = checked(model, body)
    assert status == 1
    assert reason in printed
    assert "1 of 1 body failed." in printed
    assert "requests/s" not in printed, "a time would be that of failing"


def test_endless_generation_is_no_failure(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool_worker.dry_run.STEPS_MAX", 20)
    status, printed = checked("endless", "1")
    assert status == 0
    assert "still being generated after 20 steps" in printed


def test_raw_bytes_from_a_file(checked: Check) -> None:
    Path("image.bin").write_bytes(bytes(300))
    status, printed = checked("first", "@image.bin", "--raw")
    assert (status, "body 1: 3 bytes" in printed) == (0, True), printed


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("Bound", "binds sequences"),
        ("Unloadable", "OSError: weights.bin is missing"),
        ("Nothing", "has no 'Nothing'"),
        ("ill", "nothing works any more in its process: the card is gone"),
    ],
)
def test_model_that_cannot_be_tried_out(checked: Check, model: str, reason: str) -> None:
    status, printed = checked(model, "1")
    assert status == 1
    assert reason in printed.splitlines()[-1]
    assert printed.splitlines()[-1].startswith("carpool check: ")


def test_missing_file(checked: Check) -> None:
    assert checked("shout", "@absent") == (
        1, "carpool check: BODY: cannot read absent: No such file or directory\n",
    )  # fmt: skip
    Path("empty.jsonl").write_text("\n")
    assert checked("shout", "@empty.jsonl") == (1, "carpool check: BODY: empty.jsonl has no lines\n")


def test_several_bodies(checked: Check) -> None:
    status, printed = checked("shout", "a, b", '["x", 1', "@more.txt", "")
    assert status == 1
    assert printed == "carpool check: BODY: cannot read more.txt: No such file or directory\n"
    Path("more.txt").write_text("z")
    status, printed = checked("shout", "a, b", '["x", 1', "@more.txt", "")
    assert status == 0, printed
    for line in ('body 1: "A, B"', 'body 2: "[\\"X\\", 1"', 'body 3 (more.txt): "Z"', 'body 4: ""'):
        assert f"{line}\n" in printed


def test_each_file_of_a_folder_is_in_batches_of_all_sizes(checked: Check) -> None:
    folder = Path("bodies")
    folder.mkdir()
    assert checked("shares", "@bodies") == (1, "carpool check: BODY: the folder bodies has no files\n")
    for number in range(40):
        (folder / f"{number:02}").write_text("1")
    (folder / "39").write_text("3")
    (folder / ".hidden").write_text("not JSON for shares")
    status, printed = checked("shares", "@bodies")
    assert "body 40 (bodies/39): 1.0\n" in printed
    assert "Request 1 of a batch of 32 (body 1 (bodies/00)) is answered\n    0.03125\nand alone" in printed
    (folder / "39").write_text('"a text"')
    status, printed = checked("inverse", "@bodies")
    assert status == 1
    assert "body 40 (bodies/39): INTERNAL: the model failed on this request" in printed
    assert "1 of 40 bodies failed." in printed


@pytest.mark.parametrize(
    ("model", "status", "found"),
    [
        ("Tokens", 1, "body 1, resumed after 1 of 6 chunks, is answered\n"),
        ("Characters", 0, "Streams that are cut and resumed go on as before (tried 5 times)."),
        ("countdown", 0, "Streams that are cut and resumed go on as before (tried 5 times)."),
        ("Dice", 1, "Not tried whether streams are resumed rightly: the output for body 1 is random."),
    ],
)
def test_streams_are_cut_and_resumed(checked: Check, model: str, status: int, found: str) -> None:
    exited, printed = checked(model, "6")
    assert (exited, found in printed) == (status, True), printed
    assert ("declare `continues = False`" in printed) is (model == "Tokens")


def test_model_that_does_not_continue_is_not_resumed(checked: Check) -> None:
    status, printed = checked("Aborting", "6")
    assert (status, "resumed" in printed) == (0, False), printed


def test_cuts_are_spread_over_the_stream() -> None:
    for chunks in range(2, 100):
        cuts = cuts_of(chunks)
        assert cuts == sorted(set(cuts))
        assert (cuts[0], cuts[-1]) == (1, chunks - 1)
        assert len(cuts) == min(CUTS_MAX, chunks - 1)


def test_a_model_that_writes_into_its_inputs_is_named(checked: Check) -> None:
    for model, writes in {"Writing": True, "Scaled": False}.items():
        status, printed = checked(model, "[1, 2, 3]")
        assert (status, "writes into its input arrays" in printed) == (0, writes), printed


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak")
def test_memory_of_batches_is_shown(checked: Check) -> None:
    # A process that has freed much memory before needs no more for this.
    command = [sys.executable, "-P", "-m", "carpool_cli", "check", "models.py:Large", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (shown,) = re.findall(r"^memory that a batch needs .* 1: ([0-9.]+) MiB", done.stdout, re.MULTILINE)
    assert 12 <= float(shown) <= 40
    assert "memory" not in checked("shout", "a")[1], "too little to be shown"


@pytest.mark.parametrize(
    ("model", "body", "found"),
    [
        ("spell", '{"prompt": "abc"}', ""),
        (
            "count",
            '{"prompt": "3"}',
            "a client of OpenAI's API would get an error: the model's result has the type int",
        ),
        ("spell", "abc", """A client of OpenAI's API sends a body such as {"prompt": "Return the"}"""),
        ("Vectors", '{"input": "abc"}', ""),
        (
            "Vectors",
            '{"input": ""}',
            "a client of OpenAI's API would get an error: the model's result is no",
        ),
    ],
)
def test_what_clients_of_openai_could_not_read_is_named(
    checked: Check, model: str, body: str, found: str
) -> None:
    status, printed = checked(model, body)
    assert (status, found in printed, "OpenAI" in printed) == (int(bool(found)), True, bool(found)), printed


def test_misspelt_setting_is_named(checked: Check) -> None:
    assert "max_batch_szie is not a setting" in checked("Picky", "1")[1]


@pytest.mark.parametrize(
    ("one", "other", "close"),
    [
        (1.0, 1.0001, True),
        (1.0, 1.1, False),
        (0.0, 1e-6, True),
        (float("nan"), float("nan"), True),
        (1, 2, False),
        (1.0, "1.0", False),
        ([1.0, {"a": 2.0}], [1.0001, {"a": 2.0001}], True),
        ([1.0], [1.0, 2.0], False),
        ({"a": 1.0}, {"b": 1.0}, False),
        (np.ones(3, np.float32), np.full(3, 1.0001, np.float32), True),
        (np.ones(3, np.float32), np.ones((3, 1), np.float32), False),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.array(["a"], object), np.array(["a"], object), True),
    ],
)
def test_numbers_may_differ_by_their_rounding(one: Any, other: Any, close: bool) -> None:
    assert comparing.are_close(one, other) is close
    assert comparing.are_close(other, one) is close


def test_model_has_the_threads_of_a_model_process_before_numpy_is_imported(tmp_path: Path) -> None:
    """numpy's OpenBLAS reads its number of threads when it is imported, and not again."""
    (tmp_path / "echo.py").write_text("def echo(batch): return batch\n")
    program = (
        "import os, sys\n"
        "from carpool_cli.__main__ import main\n"
        "class Observed:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'numpy':\n"
        "            print(*[os.environ.get(variable) for variable in sys.argv[1:]])\n"
        "sys.meta_path.insert(0, Observed())\n"
        "sys.exit(main(['check', 'echo.py:echo', '1']))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    command = [sys.executable, "-P", "-c", program, *THREAD_VARIABLES]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].split() == [str(usable_cpus())] * len(THREAD_VARIABLES)
