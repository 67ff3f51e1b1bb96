"""``ag.implicit``: derivatives of the answers of solvers, by the equations that these solve, see `root`."""

from aiograd.implicit.decorators import argmin as argmin
from aiograd.implicit.decorators import fixed_point as fixed_point
from aiograd.implicit.decorators import root as root

__all__ = ["argmin", "fixed_point", "root"]
