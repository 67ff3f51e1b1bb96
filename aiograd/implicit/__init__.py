"""``ag.implicit``: derivatives of what a solver returns, by the equation that its answer solves, see `root`."""

from aiograd.implicit.decorators import argmin as argmin
from aiograd.implicit.decorators import fixed_point as fixed_point
from aiograd.implicit.decorators import root as root

__all__ = ["argmin", "fixed_point", "root"]
