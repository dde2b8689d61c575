"""What of a model's exceptions fails a request, and what ends the process."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool.errors import (
    INTERNAL,
    INVALID_ARGUMENT,
    AbortedError,
    CarpoolError,
    ResourceExhaustedError,
    Unhealthy,
)
from carpool_worker.model_process import broken_devices
from carpool_worker.model_process.bound_executor import BoundExecutor
from carpool_worker.model_process.executor import ListItems
from carpool_worker.model_process.failures import CAUSES_MAX, failure_of
from carpool_worker.model_process.frames import pack_values
from carpool_worker.model_process.model import (
    BoundModel,
    LoadedModel,
    RequestInfo,
    SteppingModel,
    adapt,
    load_model,
)
from carpool_worker.model_process.stepping.frames import Admit
from carpool_worker.model_process.stepping.stepper import Stepper
from support.executing import execute

ILLEGAL = "CUDA error: an illegal memory access was encountered"

BROKEN = [
    # torch
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some "
    "other API call, so the stacktrace below might be incorrect.",
    ILLEGAL,
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "HIP error: an illegal memory access was encountered",
    "HIP error: unspecified launch failure",
    "CUDA error: HIPBLAS_STATUS_EXECUTION_FAILED when calling `hipblasSgemm`",
    # onnxruntime
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Conv node. Status Message: "
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; expr=cudaStreamSynchronize(s)",
    # CuPy, Numba, cuda-python, TensorFlow, Triton, jax
    "cudaErrorIllegalAddress: an illegal memory access was encountered",
    "[700] Call to cuMemcpyDtoH results in CUDA_ERROR_ILLEGAL_ADDRESS",
    "cuLaunchKernel failed: <CUresult.CUDA_ERROR_LAUNCH_FAILED: 719>",
    "cudaErrorLaunchTimeout",
    "hipErrorLaunchTimeOut",
    "hipErrorECCNotCorrectable",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "INTERNAL: CUDA: Failed to end stream capture: CUDA_ERROR_MISALIGNED_ADDRESS: misaligned address",
    "INTERNAL: CUDA error: [0] Failed to load in-memory CUBIN (compiled for a different GPU?).: "
    "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered [executable_name='jit_add']",
]

WORKING = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
    "CUDA error: out of memory",
    "HIP out of memory. Tried to allocate 20.00 MiB",
    "cudaErrorMemoryAllocation: out of memory",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64.00TiB with allocator GPU_0_bfc",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: invalid configuration argument",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: operation not permitted when stream is capturing",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "misaligned address 17 in the header of the file",
    "",
]


def kind_of(
    module: str, name: str = "AcceleratorError", base: type[Exception] = RuntimeError
) -> type[Exception]:
    """A class of exceptions as a framework has it."""
    return type(name, (base,), {"__module__": module})


def from_native(error: Exception) -> BaseException:
    """This exception, raised by code of C, as torch does: there is no `raise`."""
    future: asyncio.Future[None] = asyncio.Future(loop=asyncio.new_event_loop())
    future.set_exception(error)
    with pytest.raises(type(error)) as caught:
        future.result()
    future.get_loop().close()
    return caught.value


@pytest.fixture(autouse=True)
def driver_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken_devices, "is_driver_loaded", lambda: True)


@pytest.mark.parametrize("text", BROKEN)
def test_known_errors_of_broken_accelerators_end_the_process(text: str) -> None:
    with pytest.raises(Unhealthy, match=r"^the accelerator is broken: ."):
        failure_of(kind_of("torch")(text), INTERNAL)


@pytest.mark.parametrize("text", WORKING)
def test_other_errors_fail_a_request(text: str) -> None:
    for error in (kind_of("torch")(text), from_native(RuntimeError(text))):
        status, detail = failure_of(error, INTERNAL)
        assert status == INTERNAL and detail.endswith(text)


@pytest.mark.parametrize("text", [ILLEGAL, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
                                  "Triton Error [CUDA]: an illegal memory access was encountered",
                                  "CUDA driver error: misaligned address", f"{ILLEGAL}\n."])  # fmt: skip
def test_runtime_error_that_native_code_raises(text: str) -> None:
    """As torch does. One that Python code raised may quote a body."""
    error = from_native(RuntimeError(text))
    with pytest.raises(Unhealthy, match=r"^the accelerator is broken: (?!CUDA|cuDNN|Triton)"):
        failure_of(error, INTERNAL)
    assert failure_of(raised_in_python(text), INTERNAL)[0] == INTERNAL
    assert failure_of(RuntimeError(text), INTERNAL)[0] == INTERNAL  # returned, not raised


def raised_in_python(text: str) -> BaseException:
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        from_native(RuntimeError(f"cannot parse {ILLEGAL!r}")),
        from_native(OSError(ILLEGAL)),
        kind_of("model")(ILLEGAL),
        kind_of("tensorflow.errors", "InvalidArgumentError")(ILLEGAL),
        kind_of("torch.jit", "Error")(f"The operation failed:\nRuntimeError: {ILLEGAL}"),
    ],
)
def test_text_of_a_body_does_not_end_the_process(error: BaseException) -> None:
    assert failure_of(error, INTERNAL)[0] == INTERNAL


def test_no_accelerator_breaks_where_none_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken_devices, "is_driver_loaded", lambda: False)
    assert failure_of(kind_of("torch")(ILLEGAL), INTERNAL)[0] == INTERNAL


def test_loaded_driver_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not broken_devices.is_driver_loaded()
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(b"driver")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert broken_devices.is_driver_loaded()


def test_what_is_told_is_only_what_was_recognised() -> None:
    """The rest of an error's text may be of a producer."""
    with pytest.raises(Unhealthy) as caught:
        failure_of(kind_of("torch")(f"secret: {ILLEGAL} (secret)"), INTERNAL)
    assert str(caught.value) == "the accelerator is broken: an illegal memory access was encountered"


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, AssertionError, AbortedError])
def test_what_is_raised_about_a_body_may_quote_it(kind: type[Exception]) -> None:
    failure_of(kind(ILLEGAL), INVALID_ARGUMENT)


def test_the_cause_of_an_exception_counts() -> None:
    def raised(raise_it: Callable[[Exception], object]) -> BaseException:
        try:
            try:
                raise kind_of("torch")(ILLEGAL)
            except RuntimeError as error:
                raise_it(error)
        except CarpoolError as error:
            return error
        raise AssertionError

    def from_it(error: Exception) -> None:
        raise ResourceExhaustedError("busy") from error

    def during(error: Exception) -> None:
        raise ResourceExhaustedError("busy")

    def instead(error: Exception) -> None:
        raise ResourceExhaustedError("busy") from None

    for raise_it in (from_it, during):
        with pytest.raises(Unhealthy):
            failure_of(raised(raise_it), INTERNAL)
    assert failure_of(raised(instead), INTERNAL) == ("RESOURCE_EXHAUSTED", "busy")


def test_a_circle_of_causes_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert failure_of(first, INTERNAL)[0] == INTERNAL
    assert CAUSES_MAX > 2


# --- wherever it is raised ---------------------------------------------------------------------------------


def test_it_is_part_of_the_package() -> None:
    assert carpool.Unhealthy is Unhealthy
    assert not issubclass(Unhealthy, CarpoolError)


class Raising:
    """Raises Unhealthy in one of its methods."""

    max_batch_size = 2

    def __init__(self, method: str) -> None:
        self._method = method

    def _called(self, method: str) -> None:
        if method == self._method:
            raise Unhealthy("no device")

    def validate(self, body: Any) -> None:
        self._called("validate")

    def preprocess(self, batch: Any) -> Any:
        self._called("preprocess")
        return batch

    def predict(self, batch: Any) -> Any:
        self._called("predict")
        return [Unhealthy("no device")] * len(batch) if self._method == "result" else batch

    def postprocess(self, outputs: Any) -> Any:
        self._called("postprocess")
        return outputs


class RaisingBound(Raising):
    binds_sequences = True

    def start(self, sequence: Any) -> None:
        self._called("start")

    def end(self, sequence: Any) -> None:
        self._called("end")


class RaisingSteps:
    max_batch_size = 2

    def __init__(self, method: str) -> None:
        self._method = method

    def _called(self, method: str) -> None:
        if method == self._method:
            raise Unhealthy("no device")

    def validate(self, body: Any) -> None:
        self._called("validate")

    def begin(self, requests: Any) -> None:
        self._called("begin")

    def step(self, requests: Any) -> None:
        self._called("step")
        for request in requests:
            if self._method == "fail":
                request.fail(Unhealthy("no device"))
            request.finish()

    def end(self, request: Any) -> None:
        self._called("end")


def executes(model: LoadedModel) -> None:
    infos = [RequestInfo(name, "", {}) for name in "ab"]
    execute(model, ListItems([1, 2]), infos)


@pytest.mark.parametrize("method", ["validate", "preprocess", "predict", "postprocess", "result"])
def test_a_model_may_say_so_in_each_of_its_methods(method: str) -> None:
    executes(adapt(Raising("none"), "cpu"))
    with pytest.raises(Unhealthy, match="no device"):
        executes(adapt(Raising(method), "cpu"))


def executes_bound(model: Raising) -> None:
    loaded = load_model(model, "cpu")
    assert isinstance(loaded, BoundModel)
    executor = BoundExecutor(loaded)
    starts = [RequestInfo(name, "", {}, name, sequence_start=True) for name in "ab"]
    executor.execute(ListItems([1, 2]), starts)
    executor.end("ab")


@pytest.mark.parametrize("method", ["validate", "start", "predict", "result", "end"])
def test_a_bound_model_may_say_so_in_each_of_its_methods(method: str) -> None:
    executes_bound(RaisingBound("none"))
    with pytest.raises(Unhealthy, match="no device"):
        executes_bound(RaisingBound(method))


def advances(model: Any, count: int = 2) -> None:
    loaded = load_model(model, "cpu")
    assert isinstance(loaded, SteppingModel)
    stepper = Stepper(loaded)
    for key in range(count):
        stepper.admit(Admit(key, (), (f"r{key}", "", {}), 1, True), pack_values([key]))
    while stepper.has_next:
        stepper.advance()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", ["validate", "begin", "step", "fail", "end"])
def test_a_stepping_model_may_say_so_in_each_of_its_methods(method: str, count: int) -> None:
    advances(RaisingSteps("none"), count)
    with pytest.raises(Unhealthy, match="no device"):
        advances(RaisingSteps(method), count)


def test_a_generator_may_say_so() -> None:
    def count(body: Any) -> Iterator[int]:
        yield 1
        raise Unhealthy("no device")

    with pytest.raises(Unhealthy, match="no device"):
        advances(count)
