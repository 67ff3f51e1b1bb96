"""Small PyTorch scripts run on aiograd after a change of the import and an ``await`` before backward, and give PyTorch's numbers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.array_functions.names import PARAMETERS, parameters_of, with_other_names
from aiograd.errors import ArgumentTypeError, InPlaceError, ModifiedError, ShapeError, UnknownNameError
from tests.ported_scripts import EXPECTED, SCRIPTS, namespace, port, same
from tests.support import assert_awaiting_raises, assert_raises

DOCS = Path(__file__).parent.parent / "docs" / "guides" / "from-pytorch.md"


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_ported_script_gives_the_numbers_of_pytorch(name: str) -> None:
    script = port(SCRIPTS[name])
    changed = [(old, new) for old, new in zip(SCRIPTS[name].split("\n"), script.split("\n"), strict=True) if old != new]
    assert all("import" in new or new.replace("async ", "").replace("await ", "") == old for old, new in changed)
    found = await namespace(script)["main"]()
    assert same(found, EXPECTED[name]), found


# ---- other names of parameters


def test_every_function_with_an_axis_takes_dim_and_every_one_with_keepdims_keepdim() -> None:
    checked = 0
    for home in (ag, ag.linalg, ag.fft, ag.special, ag.nn.functional, ag.Tensor):
        for name in getattr(home, "__all__", None) or dir(home):
            function = getattr(home, name)
            if name.startswith("_") or not inspect.isfunction(function) or not function.__module__.startswith("aiograd.array_functions"):
                continue
            own = parameters_of(function)
            for other, names in PARAMETERS.items():
                if set(names) & {*own.names, own.gathering} and other not in own.names and "." not in other:
                    assert inspect.unwrap(function) is not function, f"{name} does not take {other}="
                    checked += 1
    assert checked > 150
    x = ag.tensor(np.arange(6.0).reshape(2, 3))
    for name in "sum mean prod max min amax amin var std median logsumexp all any argmax argmin nansum nanmean nanmedian".split():
        assert getattr(x, name)(dim=1, keepdim=True).shape == (2, 1) == getattr(ag, name)(x, dim=1, keepdim=True).shape, name
    for name in "cumsum cumprod softmax log_softmax sort argsort flip diff".split():
        function = getattr(x, name)
        assert function(dim=0).tolist() == (function(axis=0) if name != "flip" else function(0)).tolist(), name


def test_names_are_translated_once_and_only_where_they_mean_something() -> None:
    x = ag.tensor(np.arange(6.0).reshape(2, 3))
    assert ag.transpose(x, dims=(1, 0)).shape == x.permute(dims=(1, 0)).shape == ag.swapaxes(x, dim0=0, dim1=1).shape == (3, 2)
    assert ag.linalg.matrix_norm(x=x, ord=1).shape == () and x.expand(size=(4, 2, 3)).shape == (4, 2, 3)
    assert ag.roll(x, shifts=1, dims=0).tolist() == np.roll(np.arange(6.0).reshape(2, 3), 1, 0).tolist()
    assert ag.triu(x, diagonal=1).tolist() == np.triu(x.numpy(), 1).tolist() and ag.arange(1, end=4).tolist() == [1, 2, 3]
    assert ag.zeros(2, 3).shape == ag.zeros((2, 3)).shape == ag.zeros(size=(2, 3)).shape == ag.ones(2, 3, dtype=ag.long).shape == (2, 3)
    assert ag.flatten(ag.ones(2, 3, 4), start_dim=1).shape == (2, 12) and x.norm(p=1).item() == 15
    assert x.var(unbiased=True).item() == pytest.approx(3.5) and x.var().item() == pytest.approx(np.var(np.arange(6)))
    assert_raises(TypeError, "dimension", ag.sum, x, dimension=1)
    assert with_other_names(ag.exp) is ag.exp, "nothing to translate: no further call"


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: ag.sum(x, dim=0, axis=1), r"sum\(\): axis is given twice, as dim= and as axis=; leave one out"),
        (lambda x: x.sum(axis=0, dim=1), "axis is given twice, as axis= and as dim="),
        (lambda x: x.sum(0, dim=1), "axis is given twice, by position and as dim="),
        (lambda x: x.sum(0, axis=1, keepdim=True), "axis is given twice, by position and as axis="),
        (lambda x: ag.sum(x, keepdim=True, keepdims=False), "keepdims is given twice, as keepdim= and as keepdims="),
        (lambda x: ag.roll(x, 1, dim=0, dims=1), "axis is given twice, as dim= and as dims="),
        (lambda x: x.permute(dims=(0, 1), axes=(1, 0)), "axes is given twice, as dims= and as axes="),
        (lambda x: ag.zeros(size=(2,), shape=(3,)), "shape is given twice, as size= and as shape="),
        (lambda x: x.var(unbiased=True, correction=0), "correction is given twice, as unbiased= and as correction="),
    ],
)
def test_a_parameter_that_is_given_twice_is_named_as_it_was_given(call: Any, words: str) -> None:
    assert_raises(ArgumentTypeError, words, lambda: call(ag.tensor(np.arange(6.0).reshape(2, 3))))


def test_unknown_attributes_name_the_nearest() -> None:
    x = ag.ones(2)
    assert_raises(AttributeError, "Tensor has no attribute 'sofmax'; the nearest is 'softmax'", lambda: x.sofmax(0))
    assert_raises(UnknownNameError, "module 'aiograd' has no attribute 'rnadn'; the nearest is 'randn'", lambda: ag.rnadn)
    with pytest.raises(AttributeError) as caught:
        _ = x.qqqqqqq
    assert str(caught.value) == "Tensor has no attribute 'qqqqqqq'"
    assert not hasattr(x, "__cuda_array_interface__") and getattr(x, "iloc", None) is None
    parameter = ag.nn.Parameter(x)
    parameter.note = 3  # parameters have a __dict__
    assert parameter.note == 3
    assert_raises(AttributeError, "Parameter has no attribute 'nota'; the nearest is 'note'", lambda: parameter.nota)


# ---- in place

IN_PLACE: dict[str, Any] = {
    "abs_": (), "neg_": (), "exp_": (), "log_": (), "sqrt_": (), "sin_": (), "cos_": (), "tanh_": (), "sigmoid_": (), "relu_": (), "erf_": (),
    "square_": (), "reciprocal_": (), "pow_": (3,), "clamp_": (0.3, 1.1), "clamp_min_": (0.5,), "clamp_max_": (0.9,), "lerp_": (2.0, 0.3),
    "addcmul_": (np.array([0.2, 0.3, 0.4]), 0.5), "addcdiv_": (1.0, np.array([0.2, 0.3, 0.4])), "masked_fill_": (np.array([True, False, True]), 0.25),
    "cumsum_": (0,), "nan_to_num_": (), "remainder_": (0.3,), "index_fill_": (0, [1], 3.0), "index_add_": (0, [1, 1], np.array([1.0, 2.0])),
    "lgamma_": (), "logit_": (0.1,), "floor_": (), "mul_": (3.0,), "add_": (np.array([1.0, 2.0, 3.0]),), "sub_": (2.0,), "div_": (4.0,),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
async def test_a_method_in_place_is_the_method_and_a_write(name: str) -> None:
    array = np.array([0.45, 0.71, 1.3])
    args = IN_PLACE[name]
    x = ag.tensor(array, requires_grad=True)
    expected = getattr(x * 1.0, name[:-1])(*args)
    h = x * 1.0
    same_memory = h.detach()
    before = h.version
    assert getattr(h, name)(*args) is h and h.version > before
    assert h.tolist() == expected.tolist() == same_memory.tolist()
    weights = ag.tensor(np.array([1.0, -2.0, 0.5]))
    (theirs,) = await ag.grad((expected * expected * weights).sum(), x, allow_unused=True, materialize_grads=True)
    (ours,) = await ag.grad((h * h * weights).sum(), x, allow_unused=True, materialize_grads=True)
    assert ours.tolist() == theirs.tolist()


async def test_in_place_keeps_the_rules_of_the_house() -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    assert_raises(InPlaceError, "exp_", x.exp_)
    with ag.no_grad():
        assert x.clamp_(max=1.5).tolist() == [1.0, 1.5]
    saved = x * 2
    product = saved * saved
    saved.sigmoid_()
    await assert_awaiting_raises(ModifiedError, None, product.sum().backward())
    h = x * 2
    assert h.add_(x, alpha=3).tolist() == [5.0, 7.5] and h.sub_(1.0, alpha=2).tolist() == [3.0, 5.5]
    assert_raises(ShapeError, None, lambda: h.addmm_(ag.ones(2, 2), ag.ones(2, 2)))
    assert h.tolist() == [3.0, 5.5]
    view = (x * 1.0)[:1]
    view.exp_()
    base = ag.ones(2, 2)
    base[0].normal_().uniform_(2, 3)
    assert base[0].min().item() >= 2 and base[1].tolist() == [1.0, 1.0]
    # a composition saves the old values in nodes before its last one: they must not be those that are written
    y = x * 1.0
    y.addcmul_(y, y, value=3)
    (grad,) = await ag.grad(y.sum(), x)
    np.testing.assert_allclose(grad.numpy(), 1 + 6 * x.detach().numpy(), rtol=1e-6)


async def test_data_is_the_values_outside_of_the_graph() -> None:
    p = ag.nn.Parameter(ag.tensor([1.0, 2.0]))
    loss = (p * p).sum()
    assert not p.data.requires_grad and p.data.tolist() == [1.0, 2.0]
    await loss.backward()
    p.data -= 0.5 * p.grad
    assert p.tolist() == [0.0, 0.0] and p.requires_grad and p.is_leaf
    p.data = [3, 4]
    assert p.tolist() == [3.0, 4.0] and p.dtype == np.float32
    with pytest.raises(ShapeError, match="setting .data"):
        p.data = ag.ones(3)
    loss = (p * p).sum()
    p.data.zero_()
    await assert_awaiting_raises(ModifiedError, None, loss.backward())


def test_moves_casts_and_news() -> None:
    x = ag.tensor([[1.0, 2.0]])
    assert x.to() is x and x.to("cpu") is x and x.to(device="cpu", dtype=ag.double).dtype == np.float64
    assert x.to("cpu", ag.int).dtype == np.int32 and x.to(ag.ones(1, dtype=ag.half)).dtype == np.float16 and x.to(ag.device("cpu")) is x
    assert x.to(copy=True) is not x and x.to(ag.float, copy=True).tolist() == x.tolist()
    assert x.type(ag.long).dtype == np.int64 and x.type() == np.float32 and x.type_as(ag.ones(1, dtype=ag.double)).dtype == np.float64
    assert x.new_zeros(2, 3).shape == (2, 3) and x.double().new_ones((2,)).dtype == np.float64 and x.new_full((2,), 3).tolist() == [3.0, 3.0]
    assert x.new_tensor([1, 2]).dtype == np.float32 and x.new_empty(0).shape == (0,)
    assert x.element_size() == 4 and x.nelement() == 2 and x.ndimension() == 2 and x.is_contiguous() and not x.is_cuda and x.is_floating_point()
    assert x.t().shape == (2, 1) and x.sum_to_size(1, 1).tolist() == [[3.0]] and x.reshape_as(ag.ones(2)).shape == (2,)
    assert_raises(ShapeError, None, lambda: ag.ones(2, 2, 2).t())
    assert x.equal(ag.tensor([[1.0, 2.0]])) is True and x.equal(ag.ones(2)) is False


def test_draws_follow_the_seed_and_the_arguments() -> None:
    ag.manual_seed(7)
    first = [f().tolist() for f in DRAWS]
    ag.manual_seed(7)
    assert [f().tolist() for f in DRAWS] == first
    generator = ag.Generator(3)
    assert ag.rand(4, generator=ag.Generator(3)).tolist() == ag.rand((4,), generator=generator).tolist() != ag.rand(4, generator=generator).tolist()
    assert ag.rand(2, requires_grad=True).requires_grad and ag.randn(2, dtype=ag.double).dtype == np.float64 and ag.rand().shape == ()
    assert ag.randint(3, (50,)).numpy().max() < 3 and ag.randint(low=-2, high=0, size=(5,)).numpy().min() >= -2
    assert ag.randint(0, 2, (3,), dtype=ag.float).dtype == np.float32 and sorted(ag.randperm(6).tolist()) == list(range(6))
    like = ag.ones(2, 2, dtype=ag.double)
    assert ag.rand_like(like).dtype == ag.randn_like(like).dtype == ag.randint_like(like, 3).dtype == np.float64
    mean = ag.tensor([0.0, 100.0], requires_grad=True)
    assert ag.normal(mean, 0.1).requires_grad and ag.normal(5.0, 0.0, size=(2,)).tolist() == [5.0, 5.0]
    assert ag.bernoulli(ag.tensor([0.0, 1.0])).tolist() == [0.0, 1.0]


DRAWS = (
    lambda: ag.rand(3), lambda: ag.randn(2, 2), lambda: ag.randint(0, 9, (4,)), lambda: ag.randperm(5), lambda: ag.rand_like(ag.ones(2)),
    lambda: ag.normal(0.0, 1.0, (3,)), lambda: ag.bernoulli(ag.full((5,), 0.5)), lambda: ag.ones(3).uniform_(), lambda: ag.ones(3).exponential_(),
    lambda: ag.ones(3).normal_(), lambda: ag.ones(9).bernoulli_(), lambda: ag.ones(3).random_(0, 10),
)  # fmt: skip


# ---- the table of differences


def test_the_table_of_differences_is_true() -> None:
    """Each row of the table in the documents has an expression and its value, both of which are evaluated."""
    x = ag.tensor([[3.0, 1.0, 2.0], [6.0, 5.0, 4.0]])
    rows = [line.split("|")[1:-1] for line in DOCS.read_text(encoding="utf-8").split("\n") if line.startswith("| `")]
    assert len(rows) >= 10
    for expression, _, value, _ in (map(str.strip, row) for row in rows):
        found = eval(expression.strip("`"), {"ag": ag, "x": x})  # noqa: S307
        assert str(found.tolist() if isinstance(found, ag.Tensor) else found) == value.strip("`"), expression
