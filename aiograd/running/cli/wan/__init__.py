"""``aiograd wan``: how much of its time a worker computes when its line is slow, by method and bandwidth.

Note [What is run]
    The library takes its own steps, on a simulated network in virtual time; only the work is modelled: a loss and its backward sleep for the
    seconds of a step, a third of them before the loss and the rest between the gradients of eight parameters of equal size. A few workers take
    whole steps. A thousand workers with their parameters do not fit into one process: their rounds are requests of the library over its own
    connections with payloads of the right size, and nothing is computed of these. The table says which is which.
"""

from __future__ import annotations

__all__: list[str] = []
