"""Ranks, what they say to each other, and what goes wrong."""

from refpar.comm.communicator import Communicator
from refpar.comm.errors import CollectiveMismatch, CommTimeout, RankError
from refpar.comm.ledger import Ledger
from refpar.comm.processes import World

__all__ = ["CollectiveMismatch", "CommTimeout", "Communicator", "Ledger", "RankError", "World"]
