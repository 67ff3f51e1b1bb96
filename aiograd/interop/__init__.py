"""Models and tensors of other libraries in a graph of aiograd, and the other way: one package for each library.

A library is imported when something of its package is first used, so the packages can be imported where it is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.interop.background import BackgroundLoop as BackgroundLoop
from aiograd.running.lazy import on_first_use

if TYPE_CHECKING:
    from aiograd.interop import einops as einops
    from aiograd.interop import jax as jax
    from aiograd.interop import torch as torch
else:
    __getattr__, __dir__ = on_first_use(__name__, modules=("einops", "jax", "torch"))
