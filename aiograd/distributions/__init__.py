"""Probability distributions with awaited gradients: samples, logarithms of densities, entropies, divergences.

Names and signatures are the same as in ``torch.distributions``; draws come from an explicit `Generator` or the default one.
`distribution` has the base class, `standard_gamma` the derivatives of samples of a gamma distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.distributions.continuous import Normal, Uniform
from aiograd.distributions.discrete import Bernoulli, Categorical, Multinomial
from aiograd.distributions.distribution import Distribution
from aiograd.distributions.divergence import kl_divergence, register_kl
from aiograd.distributions.drawing import multinomial
from aiograd.distributions.gamma_family import Beta, Dirichlet, Gamma
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "Distribution", "Normal", "Uniform", "Gamma", "Beta", "Dirichlet", "Bernoulli", "Categorical", "Multinomial", "kl_divergence", "register_kl",
    "multinomial",
]  # fmt: skip
