"""``cupy.cuda``, as far as one rank on one device needs it: choosing a device, waiting for it."""

from __future__ import annotations

from typing import Any

from strictpy._array import synchronise
from strictpy._surface import entry


class Stream:
    """A queue of work; here everything is done at once, and waiting is only counted."""

    null: Any = None

    def synchronize(self) -> None:
        synchronise()


Stream.null = Stream()


class Device:
    """The device that is current; there is one."""

    def __init__(self, device: int | None = None) -> None:
        self.id = device or 0
        if self.id != 0:
            raise RuntimeError(f"cudaErrorInvalidDevice: device {self.id} of 1")

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __int__(self) -> int:
        return self.id

    def use(self) -> Device:
        return self

    def synchronize(self) -> None:
        synchronise()


class runtime:
    """The few calls that choose a device."""

    deviceSynchronize = staticmethod(synchronise)
    getDevice = staticmethod(lambda: 0)
    getDeviceCount = staticmethod(lambda: 1)
    setDevice = staticmethod(lambda device: Device(device) and None)


def get_current_stream(device_id: int = -1) -> Stream:
    return Stream.null


def is_available() -> bool:
    return True


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotImplementedError(f"cupy.cuda has {name} ({entry('cupy.cuda', name)}); the stand-in does not model it yet")
