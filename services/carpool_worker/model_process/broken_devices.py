"""The texts of errors after which an accelerator does not work any more in the process that got them.

CUDA's documentation says of these that any further work returns the same error, and that the process must be
terminated and relaunched; HIP has the same texts. Frameworks pass on the text (torch, onnxruntime, jax), or
the name of the error (cuda-python, TensorFlow), or both (CuPy, Numba).

Out of memory is none of them: it passes. Nor is `CUBLAS_STATUS_NOT_INITIALIZED`, which most often is out of
memory as well. If it does follow from one of these errors, that one was raised before it.
"""

from __future__ import annotations

import re
from typing import Final

_TEXTS: Final = (
    "device-side assert triggered",
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "uncorrectable (?:ECC|NVLink) error",
    # Too general to be told from another error by themselves:
    r"(?:CUDA|HIP)\b[^\n]*?(?:misaligned address|invalid program counter|hardware stack error)",
    r"(?:CUDA|HIP)\b[^\n]*?operation not supported on global/shared address space",
    r"(?:CUDA|HIP)\b[^\n]*?context is destroyed",
)
_RUNTIME_NAMES: Final = (
    "(?:cuda|hip)Error(?:Assert|IllegalAddress|IllegalInstruction|MisalignedAddress|InvalidAddressSpace|InvalidPc"
    "|LaunchFailure|LaunchTime[oO]ut|HardwareStackError|ECCUncorrectable|ECCNotCorrectable|NvlinkUncorrectable"
    "|ContextIsDestroyed)",
)
_DRIVER_NAMES: Final = (
    "CUDA_ERROR_(?:ASSERT|ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|INVALID_ADDRESS_SPACE|INVALID_PC"
    "|LAUNCH_FAILED|LAUNCH_TIMEOUT|HARDWARE_STACK_ERROR|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE"
    "|CONTEXT_IS_DESTROYED)",
)
_LIBRARY_NAMES: Final = (
    "(?:CU|HIP)(?:BLAS|DNN|FFT|SPARSE|SOLVER)_STATUS_EXECUTION_FAILED",
    "CUFFT_EXEC_FAILED",
)
_BROKEN: Final = re.compile("|".join((*_TEXTS, *_RUNTIME_NAMES, *_DRIVER_NAMES, *_LIBRARY_NAMES)))


def broken_device(text: str) -> str:
    """The words in an error's text that say that the accelerator is broken; empty if none do."""
    found = _BROKEN.search(text)
    return found[0] if found else ""
