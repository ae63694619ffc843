"""A package called cupy, for tests of the flag on machines without a GPU: the stand-in's arrays, and GPUs to count.

``PRETENDED_GPUS`` says how many; without it, there is none. Put ``tests/pretending`` on ``PYTHONPATH`` to have it.
"""

import os
from typing import Any

import strictpy
from strictpy import ndarray

__all__ = ["cuda", "ndarray"]
__version__ = "pretended"


class Device:
    """One of the GPUs that are pretended."""

    chosen: int | None = None

    def __init__(self, number: int) -> None:
        if not 0 <= number < cuda.runtime.getDeviceCount():
            raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self.number = number

    def use(self) -> None:
        Device.chosen = self.number


class runtime:
    """The calls that count and describe them."""

    @staticmethod
    def getDeviceCount() -> int:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == "-1"
        count = 0 if hidden else int(os.environ.get("PRETENDED_GPUS", "0"))
        if count == 0:
            raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return count

    @staticmethod
    def getDeviceProperties(number: int) -> dict[str, Any]:
        return {"name": b"none at all", "totalGlobalMem": 0}

    runtimeGetVersion = driverGetVersion = staticmethod(lambda: 0)


class cuda:
    """As far as the flag needs it."""

    Device, runtime, get_current_stream = Device, runtime, staticmethod(strictpy.cuda.get_current_stream)


def __getattr__(name: str) -> Any:
    return getattr(strictpy, name)
