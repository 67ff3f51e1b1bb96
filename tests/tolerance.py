"""How far two floating-point results may be apart that were rounded in another order: by other kernels, BLAS calls, memory layouts or CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

#: roundings; float16 is calculated in float32 and rounded at the end, so that it takes few, however many numbers are added
UNITS, UNITS_OF_HALF = 32, 4


def tolerance(dtype: Any, units: float = UNITS) -> float:
    """The largest relative difference, of a dtype: `units` roundings of it, or of its parts if it is complex.

    Differences are taken relative to the norm or the largest value of a result, since what is left when large numbers cancel is not exact.
    """
    limits = np.finfo(dtype)
    return float(limits.eps) * (UNITS_OF_HALF if limits.bits == 16 else units)


def assert_close(found: Any, wanted: Any, units: float = UNITS, what: object = "") -> None:
    """Shapes and dtypes are equal, floating-point values up to `tolerance` of the largest, others to the bit."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), what
    if wanted.dtype.kind not in "fc":
        np.testing.assert_array_equal(found, wanted, err_msg=str(what))
        return
    finite = np.isfinite(wanted)
    most = tolerance(wanted.dtype, units)
    np.testing.assert_allclose(found, wanted, rtol=most, atol=most * float(np.abs(wanted[finite]).max(initial=0.1)), err_msg=str(what))
