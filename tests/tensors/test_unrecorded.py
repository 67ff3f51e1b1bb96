"""numpy functions without a rule: on arrays where no graph is lost, refused by name where one would be."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, InPlaceError, ModifiedError, NoRuleError
from aiograd.ops import FUNCTIONS, UFUNCS
from aiograd.tensors.dispatch import array_function
from aiograd.tensors.unrecorded import name_of
from tests.support import assert_awaiting_raises, assert_raises

cluster = pytest.importorskip("sklearn.cluster", reason="scikit-learn comes with the extra `demo`")
linear_model = pytest.importorskip("sklearn.linear_model")
special = pytest.importorskip("scipy.special")

M = np.array([[4.0, 1.0, 0.5], [1.0, 3.0, -0.25], [0.5, -0.25, 2.0]])
V = np.array([3.0, 1.0, 2.0, 2.0])
N = np.array([3, 1, 2, 2])
B = np.array([True, False, True, True])
POLY = np.array([1.0, -3.0, 2.0])

#: name -> calls of the arguments they are given
CALLS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "apply_along_axis": lambda t: np.apply_along_axis(lambda row: row[::-1], 1, t(M)),
    "apply_over_axes": lambda t: np.apply_over_axes(np.sum, t(M), (0, 1)),
    "argpartition": lambda t: np.argpartition(t(V), 2),
    "array2string": lambda t: np.array2string(t(V)),
    "array_equiv": lambda t: np.array_equiv(t(V), V),
    "array_repr": lambda t: np.array_repr(t(V)),
    "array_str": lambda t: np.array_str(t(V)),
    "bincount": lambda t: np.bincount(t(N), weights=t(V)),
    "block": lambda t: np.block([[t(M), t(M)], [t(M), M]]),
    "can_cast": lambda t: np.can_cast(t(V), np.float32),
    "choose": lambda t: np.choose(t(np.array([0, 1, 0, 1])), [t(V), 2 * V]),
    "common_type": lambda t: np.common_type(t(V), t(N)),
    "convolve": lambda t: np.convolve(t(V), t(POLY)),
    "correlate": lambda t: np.correlate(t(V), t(POLY)),
    "cov": lambda t: np.cov(t(M)),
    "delete": lambda t: np.delete(t(V), 1),
    "diag_indices_from": lambda t: np.diag_indices_from(t(M)),
    "diagflat": lambda t: np.diagflat(t(V)),
    "digitize": lambda t: np.digitize(t(V), t(np.array([1.5, 2.5]))),
    "dsplit": lambda t: np.dsplit(t(np.ones((2, 2, 4))), 2),
    "ediff1d": lambda t: np.ediff1d(t(V)),
    "einsum_path": lambda t: np.einsum_path("ij,jk->ik", t(M), t(M)),
    "extract": lambda t: np.extract(t(B), t(V)),
    "fix": lambda t: np.fix(t(V / 2)),
    "geomspace": lambda t: np.geomspace(t(V), 8.0, 3),
    "gradient": lambda t: np.gradient(t(M)),
    "histogram": lambda t: np.histogram(t(V), bins=2),
    "histogram2d": lambda t: np.histogram2d(t(V), t(V), bins=2),
    "histogram_bin_edges": lambda t: np.histogram_bin_edges(t(V), bins=2),
    "histogramdd": lambda t: np.histogramdd((t(V), V), bins=2),
    "insert": lambda t: np.insert(t(V), 1, 9.0),
    "interp": lambda t: np.interp(t(V), [0.0, 5.0], t(np.array([0.0, 1.0]))),
    "intersect1d": lambda t: np.intersect1d(t(V), [2.0]),
    "iscomplex": lambda t: np.iscomplex(t(V)),
    "isreal": lambda t: np.isreal(t(V)),
    "ix_": lambda t: np.ix_(t(N), t(N)),
    "lexsort": lambda t: np.lexsort((t(V), t(N))),
    "linspace": lambda t: np.linspace(t(V), 9.0, 3),
    "logspace": lambda t: np.logspace(t(V), 3.0, 3),
    "may_share_memory": lambda t: (np.may_share_memory(t(V), V + 0), np.may_share_memory(x := t(V), x)),
    "min_scalar_type": lambda t: np.min_scalar_type(t(N)),
    **{
        f"nan{name}": lambda t, name=name: getattr(np, f"nan{name}")(t(V))  # type: ignore[misc]
        for name in "argmax argmin cumprod cumsum max mean median min prod std sum var".split()
    },
    "nanpercentile": lambda t: np.nanpercentile(t(V), 30),
    "nanquantile": lambda t: np.nanquantile(t(V), [0.3, 0.6]),
    "packbits": lambda t: np.packbits(t(B)),
    "partition": lambda t: np.partition(t(V), 2),
    "percentile": lambda t: np.percentile(t(V), [10, 50]),
    "piecewise": lambda t: np.piecewise(t(V), [t(B), ~B], [1.0, lambda x: x * 2]),
    "poly": lambda t: np.poly(t(V)),
    "polyadd": lambda t: np.polyadd(t(POLY), V),
    "polyder": lambda t: np.polyder(t(POLY)),
    "polydiv": lambda t: np.polydiv(t(V), t(POLY)),
    "polyfit": lambda t: np.polyfit(t(V[:3]), t(np.array([2.0, 4.0, 6.0])), 1),
    "polyint": lambda t: np.polyint(t(POLY)),
    "polymul": lambda t: np.polymul(t(POLY), t(V)),
    "polysub": lambda t: np.polysub(t(POLY), t(V)),
    "polyval": lambda t: np.polyval(t(POLY), t(V)),
    "quantile": lambda t: np.quantile(t(V), 0.25),
    "ravel_multi_index": lambda t: np.ravel_multi_index((t(N), t(N)), (4, 4)),
    "real_if_close": lambda t: np.real_if_close(t(V + 0j)),
    "resize": lambda t: np.resize(t(V), (2, 3)),
    "rollaxis": lambda t: np.rollaxis(t(M[:2]), 1),
    "roots": lambda t: np.roots(t(POLY)),
    "select": lambda t: np.select([t(B)], [t(V)], default=7.0),
    "setdiff1d": lambda t: np.setdiff1d(t(V), [2.0]),
    "setxor1d": lambda t: np.setxor1d(t(V), t(np.array([9.0]))),
    "shares_memory": lambda t: np.shares_memory(t(V), V + 0),
    "sort_complex": lambda t: np.sort_complex(t(V)),
    "trapezoid": lambda t: np.trapezoid(t(V)),
    "tril_indices_from": lambda t: np.tril_indices_from(t(M)),
    "trim_zeros": lambda t: np.trim_zeros(t(np.array([0.0, 1.0, 0.0]))),
    "triu_indices_from": lambda t: np.triu_indices_from(t(M)),
    "union1d": lambda t: np.union1d(t(V), t(POLY)),
    **{f"unique_{name}": lambda t, name=name: getattr(np, f"unique_{name}")(t(V)) for name in ("all", "counts", "inverse", "values")},  # type: ignore[misc]
    "unpackbits": lambda t: np.unpackbits(t(N.astype(np.uint8))),
    "unravel_index": lambda t: np.unravel_index(t(N), (2, 2)),
    "unwrap": lambda t: np.unwrap(t(V)),
    "vander": lambda t: np.vander(t(V)),
    "linalg.cond": lambda t: np.linalg.cond(t(M)),
    "linalg.matrix_rank": lambda t: np.linalg.matrix_rank(t(M)),
    "linalg.tensorinv": lambda t: np.linalg.tensorinv(t(M), ind=1),
    "linalg.tensorsolve": lambda t: np.linalg.tensorsolve(t(M), t(V[:3])),
    **{
        f"fft.{name}": lambda t, name=name: getattr(np.fft, name)(t(M))  # type: ignore[misc]
        for name in "fft fft2 fftn fftshift hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft rfft2 rfftn".split()
    },
    # keywords and ufunc methods without a rule, ufuncs without one
    "sum where": lambda t: np.sum(t(V), where=t(B), initial=1.0),
    "mean out": lambda t: np.mean(t(M), 1, None, np.zeros(3)),
    "max initial": lambda t: np.max(t(V), initial=9.0),
    "pad modes": lambda t: np.pad(t(V), 1, mode="mean"),
    "qr complete": lambda t: np.linalg.qr(t(M[:, :2]), mode="complete"),
    "order": lambda t: np.ravel(t(M[:2]), order="F"),
    "unique": lambda t: np.unique(t(V), return_counts=True),
    "add where": lambda t: np.add(t(V), 1.0, where=B, out=np.zeros(4)),
    "matmul axes": lambda t: np.matmul(t(M), t(M), axes=[(0, 1), (0, 1), (0, 1)]),
    "reduceat": lambda t: np.add.reduceat(t(V), [0, 2]),
    "divide accumulate": lambda t: np.divide.accumulate(t(V)),
    "subtract reduce": lambda t: np.subtract.reduce(t(V)),
    "frexp": lambda t: np.frexp(t(V)),
    "gcd": lambda t: np.gcd(t(N), 2),
    "spence": lambda t: special.spence(t(V)),
    "kv": lambda t: special.kv(t(V), 2.0),
    "like": lambda t: np.zeros(3, like=t(V)),
}  # fmt: skip

#: functions without a result to compare, or of other elements than Tensors have; `in1d`, which newer numpy does not have
APART = {"in1d", "copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask", "save", "savetxt", "savez", "savez_compressed"}
NO_NUMBERS = {"busday_count", "busday_offset", "datetime_as_string", "is_busday"}


def dispatching() -> dict[str, Any]:
    """numpy's functions that ask the arguments' classes, by name."""
    found = {}
    for prefix, module in (("", np), ("linalg.", np.linalg), ("fft.", np.fft)):
        for name in sorted(module.__all__):  # numpy makes it from sets
            function = getattr(module, name)
            if isinstance(function, type(np.sum)):
                found[prefix + name] = function
    return found


def same(ours: Any, numpys: Any) -> None:
    """Equal values, and Tensors where numpy has arrays or numbers of its own."""
    if isinstance(numpys, (tuple, list)):
        assert type(ours) is type(numpys) and len(ours) == len(numpys)
        for our, their in zip(ours, numpys, strict=True):
            same(our, their)
    elif isinstance(numpys, (np.ndarray, np.generic)):
        assert type(ours) is (ag.Tensor if numpys.dtype.kind in "biufc" else np.ndarray)
        assert ours.dtype == numpys.dtype and ours.shape == numpys.shape
        np.testing.assert_array_equal(np.asarray(ours), numpys)
    else:
        assert type(ours) is type(numpys) and ours == numpys


def test_every_function_that_asks_has_an_answer() -> None:
    functions = dispatching()
    assert len(functions) > 200
    missing = {name for name, function in functions.items() if function not in FUNCTIONS}
    assert missing <= CALLS.keys() | APART | NO_NUMBERS


@pytest.mark.filterwarnings("ignore:numpy.fix is deprecated")  # numpy 2.5
@pytest.mark.parametrize("name", CALLS)
def test_without_gradients_the_arrays_are_used(name: str) -> None:
    with np.errstate(all="ignore"):
        same_kind = {"add where", "mean out"}  # these return the array they were told to write into
        ours, numpys = CALLS[name](ag.tensor), CALLS[name](np.array)
    if name in same_kind:
        np.testing.assert_array_equal(ours, numpys)
        assert type(ours) is np.ndarray
    elif name == "like":
        same(ours, np.zeros(3))
    else:
        same(ours, numpys)


@pytest.mark.parametrize("name", [name for name in dispatching() if dispatching()[name] not in FUNCTIONS])
def test_with_gradients_they_are_refused_by_name(name: str) -> None:
    function = dispatching()[name]
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    assert_raises(NoRuleError, rf"np\.{re.escape(name)} has no row.*would lose its graph", array_function, function, (x,), {})
    assert_raises(NoRuleError, "has no row", lambda: array_function(function, ([1.0, {"a": (ag.tensor(1.0), [x])}],), {}))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: np.frexp(x), r"np\.frexp has no row"),
        (lambda x: np.add.reduceat(x, [0]), r"np\.add\.reduceat has no row"),
        (lambda x: np.add.at(x, [0], 1.0), r"np\.add\.at has no row"),
        (lambda x: special.spence(x), r"^scipy\.special\.spence has no row"),
        (lambda x: np.sum(x, where=np.array([True, False])), "np.sum was called on a Tensor with where="),
        (lambda x: np.add(x, x, out=np.zeros(2)), r"np\.add on Tensors.* does not support out="),
        (lambda x: np.matmul(x, x, axes=[(0,), (0,), ()]), "does not support axes="),
        (lambda x: np.linalg.qr(np.ones((3, 2)) * x, mode="complete"), "has no derivative"),
        (lambda x: np.copyto(ag.tensor([0.0, 0.0]), x), r"np\.copyto has no row"),
    ],
)
def test_with_gradients_other_ways_in_are_refused_too(call: Any, name: str) -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    assert_raises(NoRuleError, name, call, x)
    assert x.version == 0
    with ag.no_grad(), pytest.raises(ArgumentError):
        np.frexp(x, "nonsense")


def test_under_no_grad_the_arrays_are_used() -> None:
    x = ag.tensor(V, requires_grad=True)
    with ag.no_grad():
        result = np.percentile(x, 50)
        assert isinstance(result, ag.Tensor) and result.item() == 2.0
        np.add.at(x, [0, 0], 1.0)
    assert x.tolist() == [5.0, 1.0, 2.0, 2.0] and x.version == 1 and x.requires_grad


def test_a_ufunc_is_named_after_the_public_module_it_comes_from() -> None:
    assert name_of(special.gammaln) == "scipy.special.gammaln"
    assert name_of(np.exp) == "np.exp" and name_of(np.exp, "at") == "np.exp.at" and name_of(np.linalg.cond) == "np.linalg.cond"
    assert name_of(np.frompyfunc(len, 1, 1)).startswith("len")
    assert np.exp in UFUNCS and special.erf not in UFUNCS


# -------------------------------------------------------------------- what is written


def test_files(tmp_path: Path) -> None:
    t = ag.tensor(M)
    np.save(tmp_path / "one.npy", t)
    np.savez(tmp_path / "two.npz", a=t, b=t * 2)
    np.savez_compressed(tmp_path / "three.npz", a=t)
    text = io.StringIO()
    np.savetxt(text, t)
    np.testing.assert_array_equal(np.load(tmp_path / "one.npy"), M)
    np.testing.assert_array_equal(np.load(tmp_path / "two.npz")["b"], 2 * M)
    np.testing.assert_array_equal(np.load(tmp_path / "three.npz")["a"], M)
    np.testing.assert_array_equal(np.loadtxt(io.StringIO(text.getvalue())), M)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda t: np.copyto(t, [5.0, 6.0, 7.0]), [5.0, 6.0, 7.0]),
        (lambda t: np.put(t, [0], 9.0), [9.0, 2.0, 3.0]),
        (lambda t: np.place(t, [True, False, False], [8.0]), [8.0, 2.0, 3.0]),
        (lambda t: np.putmask(t, np.array([False, True, False]), 4.0), [1.0, 4.0, 3.0]),
        (lambda t: np.put_along_axis(t, np.array([2]), 0.0, 0), [1.0, 2.0, 0.0]),
        (lambda t: np.add.at(t, [0, 0], 1.0), [3.0, 2.0, 3.0]),
        (lambda t: np.multiply(t, 2.0, out=t), [2.0, 4.0, 6.0]),
        (lambda t: np.cumsum(ag.tensor([1.0, 1.0, 1.0], dtype=np.float64), out=t), [1.0, 2.0, 3.0]),
        (lambda t: np.modf(np.array([1.5, 2.5, 3.5]), out=(t, ag.tensor(np.zeros(3)))), [0.5, 0.5, 0.5]),
    ],
)
async def test_what_is_written_is_counted(write: Any, expected: Any) -> None:
    t = ag.tensor([1.0, 2.0, 3.0], dtype=np.float64)
    view = t[:]
    w = ag.tensor([1.0, 1.0, 1.0], dtype=np.float64, requires_grad=True)
    out = (w * view).sum()
    result = write(t)
    assert t.tolist() == expected and t.version == view.version == 1
    if result is not None:
        assert result is t or result[0] is t
    await assert_awaiting_raises(ModifiedError, None, out.backward())


def test_the_diagonal_is_filled() -> None:
    t = ag.tensor(np.zeros((2, 2)))
    np.fill_diagonal(t, 3.0)
    assert t.tolist() == [[3.0, 0.0], [0.0, 3.0]] and t.version == 1


def test_arrays_take_tensors_in_place() -> None:
    array = alias = np.array([1.0, 2.0])
    array += ag.tensor([1.0, 1.0])
    assert array is alias and type(array) is np.ndarray and array.tolist() == [2.0, 3.0]
    assert np.add(ag.tensor([1.0, 1.0]), 1.0, out=array) is array and array.tolist() == [2.0, 2.0]


def test_what_cannot_be_written_is_refused_and_untouched() -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    y = x * 2
    for target in (x, y, y[:1]):
        assert_raises(NoRuleError, None, np.copyto, target, 5.0)
    wide = ag.tensor([1.0]).expand(3)
    assert_raises(InPlaceError, r"np\.copyto, which writes into it", np.copyto, wide, 5.0)
    t = ag.tensor([1.0, np.nan])
    assert_raises(ArgumentError, "read-only", np.nanmedian, t, overwrite_input=True)
    assert y.tolist() == [2.0, 4.0] and t.version == 0


async def test_a_result_that_shares_memory_shares_the_version() -> None:
    t = ag.tensor(np.array([0.0, 1.0, 2.0, 0.0]))
    trimmed = np.trim_zeros(t)
    w = ag.tensor(np.ones(2), requires_grad=True)
    out = (w * trimmed).sum()
    with pytest.raises(InPlaceError, match="read-only"):
        trimmed += 1
    t += 1
    assert trimmed.version == 1
    await assert_awaiting_raises(ModifiedError, None, out.backward())


# -------------------------------------------------------------------- scikit-learn


def test_estimators_of_scikit_learn_take_tensors() -> None:
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(size=(20, 3)), 5 + rng.normal(size=(20, 3))])
    y = points @ np.array([1.0, -2.0, 0.5])
    x, target = ag.tensor(points), ag.tensor(y)
    ours, theirs = (cluster.KMeans(2, n_init=1, random_state=0).fit(data) for data in (x, points))
    np.testing.assert_array_equal(ours.labels_, theirs.labels_)
    assert ours.predict(x).tolist() == theirs.predict(points).tolist()
    net, reference = linear_model.ElasticNet(alpha=0.01).fit(x, target), linear_model.ElasticNet(alpha=0.01).fit(points, y)
    np.testing.assert_allclose(np.asarray(net.coef_), reference.coef_, rtol=1e-12)
