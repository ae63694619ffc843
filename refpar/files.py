"""Writing files that others rely on: whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


def check_place(path: Path) -> None:
    """Find out, before it takes time to make the content, whether a file can be written there.

    Raises
    ------
    OSError
        As :func:`write_whole` would; a disk that is full shows only then.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if as_it_is(path):
        return
    check_writable(path)
    beside = beside_of(Path(os.path.realpath(path)))
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    os.unlink(beside)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name beside its place, down to the disk, and only then give it its name.

    A link stays a link, to the new file, which those may read who might read the old one. A device or a pipe is
    written to as it is, and nothing takes its place (``--json /dev/null`` by root would otherwise leave the machine
    without one).

    Raises
    ------
    OSError
        Where that fails. Nothing of it is left behind, and a file that was there is there unchanged.
    """
    if as_it_is(path):
        with open(path, "ab") as file:
            file.write(content)
        return
    path = Path(os.path.realpath(path))
    check_writable(path)
    beside = beside_of(path)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            if path.exists():
                os.fchmod(descriptor, path.stat().st_mode & 0o777)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)


def as_it_is(path: Path) -> bool:
    """Return whether a place is to be written to as it is: a device, a pipe, or what this process has open.

    ``/dev/stdout`` may lead to a file, which the shell has open: under a new name it would lose what is printed.
    """
    in_devices = path.absolute().parts[1:2] in (("dev",), ("proc",))
    return path.exists() and not path.is_dir() and (in_devices or not path.is_file())


def check_writable(path: Path) -> None:
    """Refuse to put something in the place of a file that is write-protected, as a folder would let us."""
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def beside_of(path: Path) -> Path:
    """Return a name under which a file is written first, no longer than its own can be.

    Nobody else has it: in containers the numbers of processes repeat, and one that was killed may have left its file.
    """
    return path.with_name(f".{path.name[:50]}.{os.urandom(4).hex()}.part")
