"""Run the whole battery against an implementation of your own: one small adapter, and ``pytest`` or ``refpar``.

An *adapter* is a class that says how your code is called. It has the methods below that your code can do, and no
others; what it lacks is skipped by name. Here is the whole of one::

    # mine.py
    class Mine:
        name, version = "my ring", "1.0"

        def all_reduce(self, arrays):           # one array a rank in, one array a rank out
            return my_ring(arrays)

    $ refpar conformance mine:Mine              # or: pytest --refpar-adapter=mine:Mine

==============================  ===================================  ============================================
method                          gets                                 returns, in lists by rank where marked *
==============================  ===================================  ============================================
``all_reduce``                  arrays*                              their sum*
``all_reduce_max``              arrays*                              their maximum*
``reduce_scatter``              arrays*, counts                      part r of the sum*, flat, of counts[r] elements
``all_gather``                  arrays*, flat, of any lengths        all of them, one after another*
``broadcast``                   arrays*, root                        the root's array*
``all_to_all``                  arrays* (ranks, ...)                 row r of everybody's*
``column_linear``               x*, weight*, bias*, dy*              (y*, dx*, dweight*, dbias*)
``row_linear``                  x*, weight*, bias*, dy*              (y*, dx*, dweight*, dbias*)
``vocabulary_cross_entropy``    logits*, targets*, mask*             (sum of losses*, its gradient*)
``clip``                        gradients*, max_norm                 (global norm*, clipped gradients*)
``loss_scale``                  rule, overflows* (steps,)            (scale*, good*) after each step
``checkpoint``                  x, weight, rate, seed, recompute     (y, dx, dweight)
``run``                         case, layout                         a Trace, or by step a dict of some of its values
==============================  ===================================  ============================================

What each means exactly is said in :mod:`refpar.conformance.operations`; ``run`` takes a :class:`refpar.Case` and a
:class:`refpar.Layout`, and its values are named as by :meth:`refpar.case.Step.items`.

An adapter may say more: ``ranks``, the numbers of ranks it can do (by default 1 to 4); ``dtypes``; ``limits``, a
:class:`Limits` of what ``run`` can do; ``close()``, called at the end.

**Where a rank is a process of its own.** A method marked :func:`spmd` is called once on every rank, and gets and
returns that rank's share: no lists. The ranks are those of ``mpiexec`` or ``torchrun``, if one of these has started the
program (rank 0 then draws and shrinks, and the others wait for calls), or with ``workers = "torch"`` in the adapter
standing processes with a gloo group, of any number of ranks::

    class Mine:                                 # mpiexec -n 3 refpar conformance mine:Mine
        @spmd
        def all_reduce(self, array):            # this rank's
            total = numpy.empty_like(array)
            MPI.COMM_WORLD.Allreduce(array, total)
            return total

**Known failures** are listed in a file, a line each, ``all_reduce: the reason``, given by ``--known`` (pytest:
``--refpar-known``): they are expected to fail, and their passing is reported. **Failing examples**, after shrinking, go
to a folder with ``--write`` (``--refpar-write``): a golden, with what the adapter computed beside it, that ``refpar
compare`` reproduces without pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refpar.conformance.adapter import BadAdapter, spmd
    from refpar.conformance.problems import Limits

__all__ = ["BadAdapter", "Limits", "spmd"]

_HOMES = {"spmd": "adapter", "BadAdapter": "adapter", "Limits": "problems"}


def __getattr__(name: str) -> Any:
    """Import names when they are first used: pytest loads this package in every run, for its options."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f"refpar.conformance.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'refpar.conformance' has no attribute {name!r}")
