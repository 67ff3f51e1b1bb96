"""Libraries that take any array of the Array API take Tensors, and what they compute differentiates."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, DeviceError
from tests.support import assert_raises

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


#: calls functions and estimators of scikit-learn with arrays and with Tensors
SCIKIT_LEARN = """
import numpy as np, sklearn, aiograd as ag
from sklearn import decomposition, discriminant_analysis, linear_model, metrics, model_selection, preprocessing

sklearn.set_config(array_api_dispatch=True)
random = np.random.default_rng(0)
X, y, w, b = random.normal(size=(40, 5)), random.integers(0, 3, 40), random.normal(size=40), random.integers(0, 2, 40)
P = random.uniform(size=(40, 3))
P /= P.sum(axis=1, keepdims=True)

def plain(found):
    found = found if isinstance(found, tuple) else (found,)
    return [np.asarray(x.detach().numpy() if isinstance(x, ag.Tensor) else x) for x in found]

def check(name, function, *arrays):
    try:
        wanted, found = plain(function(*arrays)), plain(function(*map(ag.asarray, arrays)))
        equal = len(wanted) == len(found) and all(np.allclose(a, b, atol=1e-8) for a, b in zip(wanted, found))
        print(f"{name}: {'equal' if equal else 'different'}")
    except Exception as error:
        print(f"{name}: {error!r}")

for name in ("accuracy", "zero_one_loss", "balanced_accuracy", "cohen_kappa", "confusion_matrix", "hamming_loss"):
    check(name, getattr(metrics, name, None) or getattr(metrics, f"{name}_score"), y, np.roll(y, 1))
for name in ("f1", "precision", "recall", "jaccard"):
    check(name, lambda t, p: getattr(metrics, f"{name}_score")(t, p, average="macro"), y, np.roll(y, 1))
for name in ("mean_squared_error", "mean_absolute_error", "r2_score", "explained_variance_score", "max_error", "mean_pinball_loss",
             "median_absolute_error", "root_mean_squared_error", "mean_absolute_percentage_error", "mean_tweedie_deviance", "d2_tweedie_score",
             "d2_absolute_error_score"):
    check(name, getattr(metrics, name), w, w * 1.1)
check("log_loss", metrics.log_loss, y, P)
check("brier_score_loss", metrics.brier_score_loss, b, P[:, 0])
for name in ("roc_curve", "det_curve", "precision_recall_curve", "roc_auc_score", "average_precision_score"):
    check(name, getattr(metrics, name), b, w)
for name in ("cosine_similarity", "cosine_distances", "euclidean_distances", "manhattan_distances", "linear_kernel", "polynomial_kernel",
             "rbf_kernel", "sigmoid_kernel", "laplacian_kernel"):
    check(name, getattr(metrics.pairwise, name), X)
for name in ("chi2_kernel", "additive_chi2_kernel"):
    check(name, getattr(metrics.pairwise, name), abs(X))
for name in ("paired_cosine_distances", "paired_euclidean_distances"):
    check(name, lambda x: getattr(metrics.pairwise, name)(x, x * x), X)
for kind in (preprocessing.StandardScaler, preprocessing.MinMaxScaler, preprocessing.MaxAbsScaler, preprocessing.Normalizer, preprocessing.Binarizer,
             preprocessing.PolynomialFeatures):
    check(kind.__name__, lambda x: kind().fit(x).transform(x), X)
check("KernelCenterer", lambda x: preprocessing.KernelCenterer().fit(x).transform(x), X[:5])
check("LabelEncoder", lambda t: preprocessing.LabelEncoder().fit_transform(t), y)
for solver in ("full", "covariance_eigh"):
    check(f"PCA {solver}", lambda x: decomposition.PCA(2, svd_solver=solver).fit(x).transform(x), X)
check("Ridge", lambda x, t: linear_model.Ridge(solver="svd").fit(x, t).predict(x), X, w)
check("RidgeCV", lambda x, t: linear_model.RidgeCV().fit(x, t).predict(x), X, w)
check("LinearDiscriminantAnalysis", lambda x, t: discriminant_analysis.LinearDiscriminantAnalysis(solver="svd").fit(x, t).predict(x), X, y)
check("LogisticRegression", lambda x, t: linear_model.LogisticRegression().fit(x, t).predict(x), X, y)
check("train_test_split", lambda x, t: tuple(model_selection.train_test_split(x, t, random_state=0)), X, y)
check("cross_val_predict", lambda x, t: model_selection.cross_val_predict(linear_model.Ridge(solver="svd"), x, t), X, w)
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
    assert_raises(ArgumentError, "2030.12", lambda: ag.ones(2).__array_namespace__(api_version="2030.12"))
    assert_raises(DeviceError, None, info.dtypes, device="nowhere:0")


def test_devices_and_dlpack() -> None:
    x = ag.ones((2, 2))
    assert x.to_device("cpu") is x and x.device == "cpu"
    assert_raises(ArgumentError, "stream", x.to_device, "cpu", stream=1)
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


@pytest.mark.parametrize("functions", ["einops", "einops.array_api", "aiograd.interop.einops"])
async def test_einops_takes_tensors(functions: str) -> None:
    pytest.importorskip("einops", reason="it comes with the extra `interop`")
    importlib.import_module("aiograd.interop.einops")
    einops: Any = importlib.import_module(functions)
    array = np.random.default_rng(0).normal(size=(2, 6, 3))
    x = ag.tensor(array, requires_grad=True)
    assert einops.rearrange(x, "b (h w) c -> b c h w", h=2).shape == (2, 3, 2, 3)
    np.testing.assert_allclose(einops.reduce(x, "b n c -> b c", "mean").detach().numpy(), array.mean(1))
    assert einops.repeat(x, "b n c -> b n c r", r=2).shape == (2, 6, 3, 2)
    assert await ag.gradcheck(lambda t: einops.reduce(einops.rearrange(t, "b (h w) c -> h (b w) c", h=2), "h n c -> n c", "sum"), (x,))


async def test_the_rest_of_einops() -> None:
    pytest.importorskip("einops", reason="it comes with the extra `interop`")
    from aiograd.interop import einops

    rng = np.random.default_rng(0)
    x, w = (ag.tensor(rng.normal(size=shape), requires_grad=True) for shape in ((2, 3, 4), (4, 5)))
    np.testing.assert_allclose(einops.einsum(x, w, "a b c, c d -> a d").detach().numpy(), x.detach().numpy().sum(1) @ w.detach().numpy())
    packed, shapes = einops.pack([x, x[:, :, 0]], "a *")
    assert packed.shape == (2, 15) and [part.shape for part in einops.unpack(packed, shapes, "a *")] == [(2, 3, 4), (2, 3)]
    assert einops.parse_shape(x, "a b _") == {"a": 2, "b": 3}
    for operation in ("sum", "mean", "max", "min", "prod"):
        found = einops.reduce(x, "a b c -> c a", operation)
        np.testing.assert_allclose(found.detach().numpy(), getattr(x.detach().numpy(), operation)(axis=1).T)
    assert einops.rearrange([x[0], x[1]], "n b c -> c (n b)").shape == (4, 6)
    with pytest.raises(NotImplementedError, match="reduce_mean is not available for non-floating"):
        einops.reduce(ag.arange(6), "(a b) -> a", "mean", b=2)
    assert await ag.gradcheck(lambda x, w: einops.einsum(einops.repeat(x, "a b c -> (a 2) b c"), w, "a b c, c d -> a d"), (x, w))


def test_functions_and_estimators_of_scikit_learn_take_tensors() -> None:
    pytest.importorskip("array_api_compat", reason="it comes with the extra `interop`")
    environment = {**os.environ, "SCIPY_ARRAY_API": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCIKIT_LEARN], env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) >= 50, done.stderr
    assert not [line for line in lines if not line.endswith(": equal")]
