"""Standard output and standard error that never stop the work.

A run may take hours. Its result and its exit status do not hang on whether somebody still reads (``| head``), on a full
disk, on a stream that was closed before it began (``>&-``), or on a letter that the terminal's encoding has not.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast


class Output:
    """A stream that takes everything. What it cannot pass on is lost, and the first reason is kept.

    Attributes
    ----------
    stream : where text goes
    error : why text was lost, None while none was
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write text, escapes for letters that the encoding has not."""
        try:
            self._try(self.stream.write, text)
        except UnicodeEncodeError:  # of which nothing has been written
            encoding = self.stream.encoding
            self._try(self.stream.write, text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Pass on what has been written."""
        self._try(self.stream.flush)

    def _try(self, act: Callable[..., Any], *arguments: str) -> None:
        try:
            act(*arguments)
        except OSError as error:
            self.error = self.error or error
            with contextlib.suppress(OSError, ValueError):  # or what is still in the buffer fails once more at the end
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @property
    def full(self) -> bool:
        """Whether text was lost for another reason than that nobody wanted to read on."""
        return self.error is not None and not isinstance(self.error, BrokenPipeError)


@contextlib.contextmanager
def patient() -> Iterator[Output]:
    """Give the block such streams as ``sys.stdout`` and ``sys.stderr``, and the first of them to look at."""
    with contextlib.ExitStack() as stack:
        out, err = (
            Output(cast(TextIO, stream or stack.enter_context(open(os.devnull, "w"))))
            for stream in (sys.stdout, sys.stderr)
        )
        stack.enter_context(contextlib.redirect_stdout(cast(TextIO, out)))
        stack.enter_context(contextlib.redirect_stderr(cast(TextIO, err)))
        try:
            yield out
        finally:
            out.flush()
            err.flush()
