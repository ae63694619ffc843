"""Numbers with units, read and written. GB is 10^9 bytes and GiB is 2^30: papers mix them, this package does not."""

from __future__ import annotations

import re

GB, GIB = 10**9, 2**30

PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
            "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"
BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8": 8, "int8": 8, "int4": 4,
        "bool": 8, "int64": 64}  # fmt: skip


def size(elements: int, dtype: str) -> int:
    """Return the bytes of so many elements; a broken byte counts whole."""
    return -(-elements * BITS[dtype] // 8)


def read_bytes(text: str) -> int:
    """Read ``80GB``, ``79.2 GiB`` or ``24e9``, which are bytes.

    Raises
    ------
    ValueError
        Where it is no size.
    """
    match = re.fullmatch(NUMBER + r"([KMGTP]I?)?B?", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no size: write 80GB (10^9 bytes) or 80GiB (2^30)")
    return round(float(match[1]) * PREFIXES[(match[2] or "").upper()])


def read_rate(text: str) -> float:
    """Read bytes a second, such as ``300GB/s``. A network's Gb/s are bits: ``200Gb/s`` is 25e9."""
    match = re.fullmatch(NUMBER + r"([KMGTPkmgtp]?[iI]?)([Bb]?)/s", text)
    if match is None or match[2].upper() not in PREFIXES or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no rate: write 300GB/s (bytes), or 200Gb/s (bits)")
    return float(match[1]) * PREFIXES[match[2].upper()] / (8 if match[3] == "b" else 1)


def read_flops(text: str) -> float:
    """Read operations a second, such as ``312TFLOPS``."""
    match = re.fullmatch(NUMBER + r"([KMGTP]?)(?:FLOPS?|FLOP/s)?", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no speed: write 312TFLOPS")
    return float(match[1]) * PREFIXES[match[2].upper()]


def read_count(text: str) -> int:
    """Read a number of things, such as ``7.5e9``, ``7.5B`` or ``1.3T``."""
    match = re.fullmatch(NUMBER + r"([KMBT]?)", text, re.IGNORECASE)
    if match is None or round(float(match[1]) * COUNTS[match[2].upper()]) < 1:
        raise ValueError(f"{text!r} is no number of parameters: write 7.5e9 or 7.5B")
    return round(float(match[1]) * COUNTS[match[2].upper()])


def gb(n: float, digits: int = 2) -> str:
    """Return bytes in GB, without the unit."""
    return f"{n / GB:,.{digits}f}"


def gib(n: float, digits: int = 2) -> str:
    """Return bytes in GiB, without the unit."""
    return f"{n / GIB:,.{digits}f}"


def human(n: float) -> str:
    """Return bytes in the unit that suits them, always a decimal one."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(n) >= factor:
            return f"{n / factor:,.2f} {unit}"
    return f"{n:,.0f} B"


def seconds(t: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if t >= factor:
            return f"{t / factor:,.3g} {unit}" if t < 1000 * factor else f"{t / factor:,.0f} {unit}"
    return f"{t * 1e6:,.3g} us"


def count(n: float) -> str:
    """Return a number of parameters, such as ``7.50 B``."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if n >= factor:
            return f"{n / factor:,.2f} {unit}"
    return f"{n:,.0f}"
