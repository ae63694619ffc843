"""What a world may be asked for, whoever starts its ranks."""

from __future__ import annotations

import contextlib
import numbers
from typing import Any

LONGEST_TIMEOUT = 1e9  # seconds, which the kernel can count


def checked_timeout(timeout: Any) -> float | None:
    """Return a limit in seconds as a float, or None for no limit."""
    if timeout is None:
        return None
    with contextlib.suppress(OverflowError):
        if not isinstance(timeout, bool) and isinstance(timeout, numbers.Real):
            seconds = float(timeout)
            if 0 < seconds <= LONGEST_TIMEOUT:
                return seconds
    must = f"it must be a positive number of seconds up to {LONGEST_TIMEOUT:g}, or None for no limit"
    raise ValueError(f"timeout is {timeout!r}; {must}")
