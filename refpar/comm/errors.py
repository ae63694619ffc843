"""What goes wrong between ranks. Each error names the ranks by their number in the world."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank raised, exited, was killed, or cannot go on.

    On a process that catches one of communication, whatever it waits for next raises it again.

    Attributes
    ----------
    rank : the rank that caused it, as far as that is known
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class CollectiveMismatch(RankError):
    """Ranks that should have called the same operation on like arrays did not; the text shows both sides."""


class CommTimeout(RankError):
    """A wait for another rank ran out.

    ``rank`` is the one at the end of the chain of waits: who is waited for may wait for another, or be stopped. Over
    MPI, where no rank knows what the others do, it is the one that was waited for.
    """
