"""Arithmetic on paper: where the memory goes, what is sent, what fits, what to choose.

Read ``models.py`` (what a network consists of), ``memory.py`` (what a rank holds; ``states.py`` and
``activations.py`` write its lines), ``traffic.py`` (what it sends), ``speed.py`` and ``costs.py`` (seconds),
``repairs.py`` (why it does not fit, and the smallest change) and ``choose.py`` (the ladder). The same functions
answer for refpar's own small networks, where a run is held to them as exact integers, and for 10^12 parameters
on 10^5 devices.
"""
