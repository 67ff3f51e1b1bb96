"""Libraries that take any array of the Array API take Tensors, and what they compute differentiates."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, DeviceError

PROGRAM = """
import numpy as np, scipy.special, scipy.integrate, scipy.linalg, scipy.stats, warnings
import aiograd as ag

async def main():
    x = ag.tensor(np.array([[0.5, 1.5, -0.3], [0.2, 0.1, 0.9]]), requires_grad=True)
    plain = x.detach().numpy()
    for function in FUNCTIONS:
        result = function(x)
        assert isinstance(result, ag.Tensor) and result.requires_grad, function
        np.testing.assert_allclose(result.detach().numpy(), function(plain), rtol=1e-12)
        assert await ag.gradcheck(function, (x,)), function

FUNCTIONS = [
    lambda t: scipy.special.logsumexp(t, axis=1), lambda t: scipy.special.softmax(t, axis=1), lambda t: scipy.special.log_softmax(t, axis=0),
    lambda t: scipy.special.expit(t), lambda t: scipy.special.gammaln(t + 2), lambda t: scipy.special.xlogy(t + 2, t + 1),
]
ag.run(main())
print("done")
"""


def test_functions_of_scipy_take_tensors_and_differentiate() -> None:
    pytest.importorskip("scipy")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, "SCIPY_ARRAY_API": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def test_the_namespace_answers_questions() -> None:
    info = ag.__array_namespace_info__()
    assert ag.ones(2).__array_namespace__() is ag and ag.ones(2).__array_namespace__(api_version="2023.12") is ag
    assert info.capabilities()["boolean indexing"] and info.default_device() == "cpu" in info.devices()
    assert info.default_dtypes()["real floating"] == np.float32 and info.dtypes(kind="bool") == {"bool": np.dtype(bool)}
    assert set(info.dtypes(kind=("complex floating", "real floating"))) == {"float32", "float64", "complex64", "complex128"}
    with pytest.raises(ArgumentError, match="2030.12"):
        ag.ones(2).__array_namespace__(api_version="2030.12")
    with pytest.raises(DeviceError):
        info.dtypes(device="nowhere:0")


def test_devices_and_dlpack() -> None:
    x = ag.ones((2, 2))
    assert x.to_device("cpu") is x and x.device == "cpu"
    with pytest.raises(ArgumentError, match="stream"):
        x.to_device("cpu", stream=1)
    array = np.arange(3.0)
    shared, copied = ag.from_dlpack(array), ag.from_dlpack(array, copy=True)
    array[0] = 5
    assert shared.tolist()[0] == 5 and copied.tolist()[0] == 0
    assert ag.from_dlpack(array, device="cpu", copy=False).tolist() == array.tolist()
    assert isinstance(ag.meshgrid(array, array), tuple) and isinstance(ag.broadcast_arrays(array, x[0, 0]), tuple)
    assert ag.finfo(ag.complex64).bits == 32 and isinstance(ag.finfo(ag.float32).eps, float) and ag.finfo(x).dtype == np.float32


def test_array_api_compat_takes_the_namespace() -> None:
    compat: Any = pytest.importorskip("array_api_compat")
    assert compat.array_namespace(ag.ones(2), ag.ones(3)) is ag


async def test_opt_einsum_takes_tensors() -> None:
    opt_einsum: Any = pytest.importorskip("opt_einsum")
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for shape in ((3, 4), (4, 5), (5, 2))]
    inputs = tuple(ag.tensor(array, requires_grad=True) for array in arrays)
    result = opt_einsum.contract("ij,jk,kl->il", *inputs)
    np.testing.assert_allclose(result.detach().numpy(), arrays[0] @ arrays[1] @ arrays[2])
    assert await ag.gradcheck(lambda *t: opt_einsum.contract("ij,jk,kl->il", *t), inputs)


async def test_einops_takes_tensors() -> None:
    einops: Any = pytest.importorskip("einops.array_api")
    array = np.random.default_rng(0).normal(size=(2, 6, 3))
    x = ag.tensor(array, requires_grad=True)
    assert einops.rearrange(x, "b (h w) c -> b c h w", h=2).shape == (2, 3, 2, 3)
    np.testing.assert_allclose(einops.reduce(x, "b n c -> b c", "mean").detach().numpy(), array.mean(1))
    assert einops.repeat(x, "b n c -> b n c r", r=2).shape == (2, 6, 3, 2)
    assert await ag.gradcheck(lambda t: einops.reduce(einops.rearrange(t, "b (h w) c -> h (b w) c", h=2), "h n c -> n c", "sum"), (x,))
