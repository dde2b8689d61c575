"""The errors after which an accelerator does not work any more in the process that got them.

CUDA's documentation says of these that any further work returns the same error, and that the process must be
terminated and relaunched; HIP has the same texts. Frameworks pass on the text (torch, onnxruntime, jax), or
the name of the error (cuda-python, TensorFlow), or both (CuPy, Numba).

An exception may quote a body, so its text alone says nothing: a producer could have the process replaced. The
exception must be of a framework's class, or a RuntimeError that native code raised, as torch does; and the
process must have loaded the driver of an accelerator.

Out of memory is none of them: it passes. Nor is `CUBLAS_STATUS_NOT_INITIALIZED`, which most often is out of
memory as well. If it does follow from one of these errors, that one was raised before it.
"""

from __future__ import annotations

import dis
import re
from pathlib import Path
from typing import Final

_FRAMEWORKS: Final = frozenset(
    (
        "torch",
        "onnxruntime",
        "jax",
        "jaxlib",
        "tensorflow",
        "cupy",
        "cupy_backends",
        "numba",
        "pycuda",
        "cuda",
    )
)
_ABOUT_INPUTS: Final = "InvalidArgument"  # in names of their classes
_DRIVERS: Final = (b"/libcuda.so", b"/libamdhip64.so")  # of CUDA and HIP
_RAISE: Final = dis.opmap["RAISE_VARARGS"]

_TEXTS: Final = (
    "device-side assert triggered",
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "uncorrectable (?:ECC|NVLink) error",
)
# Too general to be told from another error by themselves.
_GENERAL_TEXTS: Final = (
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "operation not supported on global/shared address space",
    "context is destroyed",
)
_NAMES: Final = (
    "(?:cuda|hip)Error(?:Assert|IllegalAddress|IllegalInstruction|MisalignedAddress|InvalidAddressSpace|InvalidPc"
    "|LaunchFailure|LaunchTime[oO]ut|HardwareStackError|ECCUncorrectable|ECCNotCorrectable|NvlinkUncorrectable"
    "|ContextIsDestroyed)",
    "CUDA_ERROR_(?:ASSERT|ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|INVALID_ADDRESS_SPACE|INVALID_PC"
    "|LAUNCH_FAILED|LAUNCH_TIMEOUT|HARDWARE_STACK_ERROR|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE"
    "|CONTEXT_IS_DESTROYED)",
    "(?:CU|HIP)(?:BLAS|DNN|FFT|SPARSE|SOLVER)_STATUS_EXECUTION_FAILED",
    "CUFFT_EXEC_FAILED",
)
_GENERAL: Final = rf"(?:CUDA|HIP)\b.*?(?:{'|'.join(_GENERAL_TEXTS)})"
_IN_TEXT: Final = re.compile("|".join((*_TEXTS, _GENERAL, *_NAMES)))
_AT_START: Final = re.compile(
    r"(?:(?:CUDA|HIP|cuDNN|MIOpen)(?: \w+)? error|Triton Error \[(?:CUDA|HIP)\]): "
    rf"(?P<words>{'|'.join((*_TEXTS, *_GENERAL_TEXTS, *_NAMES))})"
)


def broken_device(error: BaseException, text: str) -> str:
    """The words in an error's text that say that the accelerator is broken; empty if it is not."""
    kind, line = type(error), text.partition("\n")[0]
    words = ""
    if kind.__module__.partition(".")[0] in _FRAMEWORKS:
        if _ABOUT_INPUTS not in kind.__name__ and (found := _IN_TEXT.search(line)):
            words = found[0]
    elif kind is RuntimeError and (found := _AT_START.match(line)) and _is_of_native_code(error):
        words = found["words"]
    return words if words and is_driver_loaded() else ""


def is_driver_loaded() -> bool:
    """Whether this process has loaded the driver of an accelerator. True where that cannot be seen."""
    try:
        libraries = Path("/proc/self/maps").read_bytes()
    except OSError:
        return True
    return any(driver in libraries for driver in _DRIVERS)


def _is_of_native_code(error: BaseException) -> bool:
    """Whether no `raise` in Python raised it: then what Python code did at last is a call."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_code
    return not 0 <= trace.tb_lasti < len(code) or code[trace.tb_lasti] != _RAISE
