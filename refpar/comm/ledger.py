"""Who sent what: every message counted where it is sent, by group and operation.

Papers state what a technique costs in elements sent per rank. The ledger is how that is checked
here: not an estimate, but a count of what went out, to be compared with the formula as an exact
integer. What a run sends only to look at itself (publishing gradients for a trace, comparing
replicas) or to set itself up (splitting communicators) would blur that count and is kept apart::

    with comm.ledger.observing():
        ring.all_gather(comm, digests)      # counted in comm.ledger.observed

A group stands here under its name. What was sent in several groups of one name is added up.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Sent:
    """Messages, and the elements and bytes in them. An empty message is a message."""

    messages: int = 0
    elements: int = 0
    bytes: int = 0


@dataclass
class Tally:
    """What was sent, by ``(group, operation)``, such as ``("dp", "all_reduce")``."""

    sent: dict[tuple[str, str], Sent] = field(default_factory=dict)

    def add(self, group: str, operation: str, elements: int, nbytes: int) -> None:
        """Count one message."""
        entry = self.sent.get((group, operation))
        if entry is None:
            entry = self.sent[group, operation] = Sent()
        entry.messages += 1
        entry.elements += elements
        entry.bytes += nbytes

    def total(self, group: str | None = None, operation: str | None = None) -> Sent:
        """Return the sum over all entries, or those of one group, one operation, or both."""
        chosen = [s for (g, o), s in self.sent.items() if group in (None, g) and operation in (None, o)]
        return Sent(sum(s.messages for s in chosen), sum(s.elements for s in chosen), sum(s.bytes for s in chosen))

    @property
    def messages_sent(self) -> int:
        """Messages in all."""
        return self.total().messages

    @property
    def elements_sent(self) -> int:
        """Elements in all."""
        return self.total().elements

    @property
    def bytes_sent(self) -> int:
        """Bytes in all."""
        return self.total().bytes


@dataclass
class Ledger(Tally):
    """One rank's account, shared by all communicators split from its world.

    Attributes
    ----------
    sent : what the computation needed
    observed : what was sent only to observe it or to set it up
    """

    observed: Tally = field(default_factory=Tally)
    _observing: bool = False

    def add(self, group: str, operation: str, elements: int, nbytes: int) -> None:
        """Count one message, as sent or as observed."""
        if self._observing:
            self.observed.add(group, operation, elements, nbytes)
        else:
            super().add(group, operation, elements, nbytes)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Count what is sent inside in :attr:`observed`."""
        before, self._observing = self._observing, True
        try:
            yield
        finally:
            self._observing = before

    def snapshot(self) -> Ledger:
        """Return a copy that later messages do not change."""
        return copy.deepcopy(self)
