"""``ag.implicit``: derivatives of the answers of solvers, by the equations that these solve, see `root`."""

from typing import TYPE_CHECKING

from aiograd.implicit.decorators import argmin as argmin
from aiograd.implicit.decorators import fixed_point as fixed_point
from aiograd.implicit.decorators import root as root
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = ["argmin", "fixed_point", "root"]
