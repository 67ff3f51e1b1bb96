"""SciPy's ufuncs on Tensors: which row or composition computes each. SciPy is not imported; its ufuncs are recognised by name and home.

A ufunc is SciPy's if ``scipy.special`` has it under its own name, so that no other library's ufunc is taken for one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.ops import ROWS, gamma, special

#: name of a ufunc of ``scipy.special`` -> what answers for it, called with Tensors, arrays and numbers
SCIPY: dict[str, Callable[..., Any]] = {
    **{name: ROWS[name] for name in "erf erfc erfinv gamma gammaln log_ndtr logit xlogy xlog1py exp2 expm1 log1p cbrt".split()},
    **{name: ROWS[name] for name in "rgamma gammasgn gammainc gammaincc betainc betaincc stdtr erfcx ndtri exprel rel_entr".split()},
    **{name: ROWS[f"bessel_{name}"] for name in "i0 i0e i1 i1e j0 j1 y0 y1 k0 k1 jv yn iv ive".split()},
    "expit": ROWS["sigmoid"],
    "log_expit": ROWS["log_sigmoid"],
    "psi": ROWS["digamma"],
    "_zeta": ROWS["zeta"],
    "beta": gamma.beta,
    "betaln": gamma.betaln,
    "ndtr": special.ndtr,
    "erfcinv": special.erfcinv,
    "entr": special.entr,
}


def scipy_function(ufunc: np.ufunc) -> Callable[..., Any] | None:
    """The implementation of a ufunc of ``scipy.special``; None for any other."""
    name = ufunc.__name__
    found = SCIPY.get(name)
    if found is None:
        return None
    homes = (sys.modules.get(home) for home in ("scipy.special", "scipy.special._ufuncs"))
    return found if any(home is not None and getattr(home, name, None) is ufunc for home in homes) else None
