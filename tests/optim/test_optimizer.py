"""Groups, state, gradients, and the step that leaves the loop free."""

from __future__ import annotations

import copy
import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphError, ModifiedError
from aiograd.kernels import optimizer as kernels
from aiograd.kernels import pool
from aiograd.running.random import Generator
from tests.support import assert_awaiting_raises, assert_raises, custom_function


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4, generator=Generator(0)), nn.Tanh(), nn.Linear(4, 2, generator=Generator(1)))


async def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    x = ag.tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
    for _ in range(steps):
        optimizer.zero_grad()
        await model(x).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> list[Any]:
    return [value.tolist() for value in model.state_dict().values()]


# ---- groups


def test_groups_have_options_of_their_own() -> None:
    model = net()
    optimizer = optim.SGD([{"params": model[0].parameters(), "lr": 0.5}, {"params": [model[2].weight]}], lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": model[2].bias, "momentum": 0.0})
    assert [(len(g["params"]), g["lr"], g["momentum"]) for g in optimizer.param_groups] == [(2, 0.5, 0.9), (1, 0.1, 0.9), (1, 0.1, 0.0)]
    for p in model.parameters():
        p.grad = ag.tensor(np.ones(p.shape, np.float32))
    before = [p.detach().numpy().copy() for p in model.parameters()]
    optimizer.step()
    moved = [np.unique(np.round(b - p.detach().numpy(), 5)).tolist() for b, p in zip(before, model.parameters(), strict=True)]
    np.testing.assert_allclose(moved, [[0.5], [0.5], [0.1], [0.1]], rtol=1e-4)
    assert "group 2: 1 parameters, lr=0.1, momentum=0.0" in repr(optimizer)


def test_wrong_parameters_are_refused() -> None:
    p = nn.Parameter([1.0])
    for wrong, error in (
        ([], ArgumentError), (p, ArgumentTypeError), ([3], ArgumentTypeError), ([p, p], ArgumentError),
        ([{"params": [p]}, {"params": [p]}], ArgumentError), ([{"parameters": [p]}], ArgumentTypeError),
        ([{"params": [p], "learning_rate": 1.0}], ArgumentError), ([p * 2], GraphError), (None, ArgumentTypeError),
    ):
        assert_raises(error, None, optim.SGD, wrong)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, {"lr": "a"}), (optim.SGD, {"momentum": None}), (optim.Adam, {"betas": 0.9}), (optim.Adam, {"betas": ("a", 0.9)}),
        (optim.Adadelta, {"rho": "a"}), (optim.LBFGS, {"max_iter": "a"}), (optim.LBFGS, {"lr": 0.0}),
    ],
)  # fmt: skip
def test_options_of_another_type_are_refused(kind: Any, options: dict[str, Any]) -> None:
    (name,) = options
    assert_raises(ArgumentError, rf"{kind.__name__}\({name}=", lambda: kind([nn.Parameter([1.0])], **options))


# ---- gradients


async def test_zero_grad() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters())
    await train(model, optimizer, 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.numpy().any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    before = values(model)
    optimizer.step()
    assert values(model) == before


def test_gradients_may_be_handed_in() -> None:
    p, q = nn.Parameter([1.0, 2.0]), nn.Parameter([3.0])
    p.grad = ag.tensor([100.0, 100.0])
    optimizer = optim.SGD([p, q], lr=1.0)
    optimizer.step({p: ag.tensor([1.0, 1.0])})
    assert (p.tolist(), q.tolist()) == ([0.0, 1.0], [3.0])
    assert_raises(ArgumentError, r"\[1\]", lambda: optimizer.step({p: ag.tensor([1.0])}))


async def test_a_graph_that_saved_old_values_notices_the_step() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters())
    x = ag.tensor(np.ones((1, 3), np.float32), requires_grad=True)
    loss = model(x).sum()
    for p in model.parameters():
        p.grad = ag.tensor(np.ones(p.shape, np.float32))
    optimizer.step()
    await assert_awaiting_raises(ModifiedError, None, loss.backward())


async def test_an_optimizer_may_step_in_the_backward_pass() -> None:
    model, together = net(), net()
    apart = {p: optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(leaf: Any) -> None:
        apart[leaf].step()
        leaf.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    x = ag.tensor(np.ones((2, 3), np.float32))
    await model(x).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer = optim.SGD(together.parameters(), lr=0.1)
    await together(x).square().sum().backward()
    optimizer.step()
    assert values(model) == values(together)


# ---- stepping off the loop


@pytest.mark.parametrize("make", [lambda p: optim.SGD(p, 0.1), lambda p: optim.Adam(p, 0.1), lambda p: optim.SGD(p, 0.1, momentum=0.9)])
async def test_astep_does_what_step_does_on_another_thread(make: Any) -> None:
    here, there = net(), net()
    optimizers = make(here.parameters()), make(there.parameters())
    for _ in range(3):
        for model in (here, there):
            model.zero_grad()
            await model(ag.tensor(np.ones((2, 3), np.float32))).square().sum().backward()
        optimizers[0].step()
        await optimizers[1].astep()
    assert values(here) == values(there)
    assert not any(p.requires_grad and p.grad_fn for p in there.parameters())


class Watched(optim.SGD):
    """Says when a step has begun, and goes on when it may."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self.threads: list[int] = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def _update(self, *args: Any) -> None:
        self.threads.append(threading.get_ident())
        self.begun.set()
        if not self.may_go_on.wait(30):
            raise TimeoutError
        super()._update(*args)


async def test_a_step_that_has_begun_is_carried_out_though_nobody_waits_for_it() -> None:
    p = nn.Parameter([1.0])
    p.grad = ag.tensor([1.0])
    optimizer = Watched([p])
    pending = optimizer.astep()
    pending.send(None)
    assert optimizer.begun.wait(30)
    assert p.version == 1, "graphs recorded so far notice at once"
    pending.close()
    optimizer.zero_grad()
    assert p.tolist() == [1.0]
    optimizer.may_go_on.set()
    optimizer.step()  # waits for the other; for itself there are no gradients left
    assert p.tolist() == [0.0]
    assert optimizer.threads[0] != threading.get_ident()


async def test_a_step_cancelled_before_it_has_begun_is_not_taken() -> None:
    p = nn.Parameter([1.0])
    p.grad = ag.tensor([1.0])
    optimizer = Watched([p])
    optimizer.may_go_on.set()
    pending = optimizer.astep()
    with optimizer._lock:
        pending.send(None)
        pending.close()
    optimizer.step()
    await optimizer.astep()
    assert p.tolist() == [-1.0]
    assert len(optimizer.threads) == 2


async def test_astep_counts_as_a_modification_of_what_it_writes_only() -> None:
    used, other = nn.Parameter([2.0]), nn.Parameter([3.0])
    loss = (used * used).sum()
    optimizer = optim.SGD([used, other], lr=1.0)
    other.grad = ag.tensor([1.0])
    await optimizer.astep()
    assert (used.version, other.version > 0, other.tolist()) == (0, True, [2.0])
    await optimizer.astep({other: other.grad, used: None})
    await loss.backward()
    assert used.grad is not None and used.grad.tolist() == [4.0]


async def test_a_failed_pass_that_kept_its_graph_can_be_tried_again_after_a_step() -> None:
    p = nn.Parameter([2.0])
    loss = (p * p).sum()
    optimizer = optim.SGD([p], lr=1.0)
    failing = [True]

    def hook(grad: Any) -> None:
        if failing:
            raise ZeroDivisionError

    handle = p.register_hook(hook)
    await assert_awaiting_raises(ZeroDivisionError, None, loss.backward(retain_graph=True))
    with pytest.warns(UserWarning, match="without any gradient"):
        await optimizer.astep()
    failing.clear()
    await loss.backward()
    handle.remove()
    assert p.grad is not None and p.grad.tolist() == [4.0]


USES = [
    lambda w, x: x @ w,
    lambda w, x: x @ w.T,
    lambda w, x: ag.checkpoint(lambda t: t @ w, x),
    lambda w, x: Product.apply(w, x),
]


@pytest.mark.parametrize("use", USES)
async def test_a_step_between_forward_and_backward_names_the_ways_to_share_parameters(use: Any) -> None:
    w = nn.Parameter(np.eye(2))
    x = ag.tensor(np.ones((2, 2)), requires_grad=True)
    loss = use(w, x).sum()
    optim.SGD([w], lr=1.0).step([ag.tensor(np.ones((2, 2)))])
    with pytest.raises(ModifiedError, match=r"an optimizer's step.*asyncio.Lock.*ag.grad\(loss, parameters\).*optimizer.step\(grads\)"):
        await loss.backward()


@custom_function(lambda w, x: x @ w, saves=True)
def Product(ctx: Any, grad: Any) -> Any:
    """x @ w."""
    w, x = ctx.saved_tensors
    return x.T @ grad, grad @ w.T


# ---- gradients that are given


async def test_gradients_are_given_one_per_parameter_or_by_parameter() -> None:
    models = [net() for _ in range(4)]
    optimizers = [optim.SGD([{"params": m[0].parameters(), "lr": 0.5}, {"params": m[2].parameters()}], lr=0.1) for m in models]
    x = ag.tensor(np.ones((2, 3), np.float32))
    for model, optimizer, way in zip(models, optimizers, range(4), strict=True):
        loss = model(x).square().sum()
        if way == 0:
            await loss.backward()
            optimizer.step()
            continue
        grads = await ag.grad(loss, list(model.parameters()))
        if way == 1:
            optimizer.step(grads)
        elif way == 2:
            await optimizer.astep([grad.numpy() for grad in grads])
        else:
            optimizer.step(dict(zip(model.parameters(), grads, strict=True)))
        assert all(p.grad is None for p in model.parameters())
    assert values(models[0]) == values(models[1]) == values(models[2]) == values(models[3])


@pytest.mark.parametrize(
    ("gradients", "error", "text"),
    [
        ([1.0], ArgumentError, "got 1 gradients for 2 parameters"),
        ([ag.tensor([1.0]), 2.0], ArgumentTypeError, "is a float"),
        ([ag.tensor([1.0]), ag.tensor([1.0, 2.0])], ArgumentError, r"shape \[2\] for a parameter of shape \[1\]"),
        ([ag.tensor([1.0]), ag.tensor([1j])], ArgumentTypeError, "a gradient of complex64 for a parameter of float32; expected float32"),
        ([ag.tensor([1.0]), np.array(["a"])], ArgumentTypeError, "a gradient of <U1 for a parameter of float32"),
        (ag.tensor([1.0, 2.0]), ArgumentTypeError, "found Tensor"),
        (3, ArgumentTypeError, "found int"),
    ],
)
async def test_gradients_that_do_not_fit_change_nothing(gradients: Any, error: type[Exception], text: str) -> None:
    params = [nn.Parameter([1.0]), nn.Parameter([1.0])]
    optimizer = optim.SGD(params, lr=1.0)
    for step in (optimizer.step, optimizer.astep):
        with pytest.raises(error, match=text):
            pending = step(gradients)
            if pending is not None:
                await pending
    assert [(p.tolist(), p.version) for p in params] == [([1.0], 0)] * 2
    optimizer.step([None, ag.tensor([1.0])])
    assert [p.tolist() for p in params] == [[1.0], [0.0]]


async def test_a_step_before_any_gradient_asks_whether_backward_was_forgotten() -> None:
    p = nn.Parameter([1.0])
    optimizer = optim.SGD([p])
    with pytest.warns(UserWarning, match="Was `await loss.backward") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    optimizer.step()
    other = optim.SGD([p])
    with pytest.warns(UserWarning, match="without any gradient") as caught:
        await other.astep()
    assert caught[0].filename == __file__
    p.grad = ag.tensor([1.0])
    third = optim.SGD([p])
    third.step()
    third.zero_grad()
    third.step()  # some steps have nothing to do


# ---- state


@pytest.mark.parametrize(
    "make", [lambda p: optim.SGD(p, 0.1, momentum=0.9), lambda p: optim.Adam(p, 0.1, amsgrad=True), lambda p: optim.AdamW(p, 0.1)]
)
async def test_training_continues_from_a_state_dict_to_the_bit(make: Any) -> None:
    model = net()
    optimizer = make(model.parameters())
    await train(model, optimizer, 3)
    twin = net()
    twin.load_state_dict(model.state_dict())
    other = make(twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    await train(model, optimizer, 3)
    await train(twin, other, 3)
    assert values(model) == values(twin)


async def test_a_loaded_state_is_a_copy() -> None:
    model = net()
    optimizer = optim.Adam(model.parameters())
    await train(model, optimizer, 1)
    state = optimizer.state_dict()
    twin = optim.Adam(net().parameters())
    twin.load_state_dict(state)
    state["state"][0]["exp_avg"].fill_(7.0)
    state["param_groups"][0]["lr"] = 9.0
    loaded = twin.state_dict()
    assert loaded["param_groups"][0]["lr"] == 1e-3
    assert not (loaded["state"][0]["exp_avg"].numpy() == 7.0).any()
    assert loaded["state"][0]["step"] == 1
    assert [group["params"] for group in loaded["param_groups"]] == [[0, 1, 2, 3]]


def test_states_as_pytorch_writes_them_are_understood() -> None:
    p = nn.Parameter(np.zeros(2, np.float32))
    optimizer = optim.Adam([p])
    group = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0, "amsgrad": False, "maximize": False, "foreach": None, "params": [0]}
    entry = {"step": np.array(4.0, np.float32), "exp_avg": np.ones(2), "exp_avg_sq": np.ones(2)}
    optimizer.load_state_dict({"state": {0: entry}, "param_groups": [group]})
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert "foreach" not in optimizer.param_groups[0]
    p.grad = ag.tensor([1.0, 1.0])
    optimizer.step()
    assert optimizer.state[p]["step"] == 5
    assert optimizer.state[p]["exp_avg"].dtype == np.float32
    assert optimizer.state[p]["exp_avg"].tolist() == [1.0, 1.0]


#: values that would make the next step fail, or take it for an earlier one
SPOILT = [
    *({"step": step} for step in (-1, 1.5, float("nan"), float("inf"), None, [1], np.ones(2), 1j)),
    *({"exp_avg": value} for value in (3.0, None, "x", [1.0], np.zeros((5, 4), np.complex64), np.full((5, 4), "x"), np.full((5, 4), None))),
]


async def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = net()
    optimizer = optim.Adam(model.parameters())
    await train(model, optimizer, 1)
    good = optimizer.state_dict()
    group, state = good["param_groups"][0], good["state"]
    for wrong in (
        3,
        {"state": {}},
        {"state": {}, "param_groups": []},
        {"state": {}, "param_groups": [{**group, "params": [0, 1]}]},
        {"state": {9: state[0]}, "param_groups": [group]},
        {"state": {**state, 0: {**state[0], "exp_avg": np.zeros(3)}}, "param_groups": [group]},
        {"state": state, "param_groups": [{**group, "lr": -1.0}]},
        {"state": {**state, 0: "x"}, "param_groups": [group]},
        {"state": {**state, 0: {**state[0], "step": "x"}}, "param_groups": [group]},
        {"state": "x", "param_groups": [group]},
        {"state": state, "param_groups": ["x"]},
        {"state": state, "param_groups": [{name: value for name, value in group.items() if name != "params"}]},
        {"state": state, "param_groups": [{**group, "params": 3}]},
        {"state": state, "param_groups": [3]},
        {"state": state, "param_groups": None},
        {"state": [state], "param_groups": [group]},
        {"state": {**state, 0: 3}, "param_groups": [group]},
        {"state": state, "param_groups": [{**group, "params": [0, 1, 2, 2]}]},
        {"state": state, "param_groups": [{**group, "params": [0, 1, 2, [3]]}]},
        {"state": state, "param_groups": [{**group, "initial_lr": "x"}]},
        *({"state": {**state, 0: {**state[0], **part}}, "param_groups": [group]} for part in SPOILT),
        *({"state": {**state, 0: {**state[0], **part}}, "param_groups": [{**group, "amsgrad": True}]} for part in ({"max_exp_avg_sq": 3.0},)),
        *({"state": {**state, 0: {n: each for n, each in state[0].items() if n != name}}, "param_groups": [group]} for name in state[0]),
    ):
        assert_raises(ArgumentError, r"load_state_dict|Adam\(lr", optimizer.load_state_dict, wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == good["param_groups"]
    assert after["state"][0]["exp_avg"].tolist() == state[0]["exp_avg"].tolist()


async def test_deepcopy_of_model_and_optimizer_together() -> None:
    model = net()
    optimizer = optim.Adam(model.parameters(), 0.1)
    await train(model, optimizer, 2)
    twin, other = copy.deepcopy((model, optimizer))
    assert other.param_groups[0]["params"][0] is twin[0].weight
    before = values(model)
    await train(twin, other, 2)
    assert values(model) == before
    await train(model, optimizer, 2)
    assert values(model) == values(twin)


@pytest.mark.parametrize("optimizer", [ag.optim.Adam, ag.optim.SGD])
def test_large_parameters_are_updated_in_one_job_but_those_that_may_share_memory_alone(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, alone = [], []
    monkeypatch.setattr(kernels, "compiled", lambda *args: mock.MagicMock())
    monkeypatch.setattr(kernels, "run", lambda kernel, count, *args: alone.append(count))
    monkeypatch.setattr(pool.KernelBatch, "add", lambda self, kernel, count, *args: parts.append(count))
    sizes = [100_001, 100_002, 100_003]
    parameters = [ag.tensor(np.zeros(size, np.float32), requires_grad=True) for size in sizes]
    parameters.insert(1, ag.asarray(np.zeros(100_009, np.float32)[4:]).requires_grad_())
    for p in parameters:
        p.grad = ag.ones_like(p)
    optimizer(parameters, lr=0.1).step()
    assert (parts, alone) == (sizes, [100_005])


# ---- an await too many


@pytest.mark.parametrize("optimizer_class", [ag.optim.SGD, ag.optim.Adam, ag.optim.AdamW])
async def test_a_step_that_is_awaited_is_not_taken_and_says_which_are_awaited(optimizer_class: Any) -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    optimizer = optimizer_class([x], lr=0.1)
    for _ in range(20):  # instructions that have run often are specialised
        with pytest.raises(ArgumentTypeError, match=r"leave out `await`.*await optimizer.astep\(\).*LBFGS.*DistributedOptimizer"):
            await optimizer.step([ag.ones(2)])
        with pytest.raises(ArgumentTypeError, match="not awaited"):
            await optimizer.step(*([ag.ones(2)],), **{})
    assert x.tolist() == [1.0, 2.0] and not optimizer.state
    optimizer.step([ag.ones(2)])
    taken = [optimizer.step([ag.ones(2)]), optimizer.step(gradients=[ag.ones(2)])]
    await optimizer.astep([ag.ones(2)])
    assert taken == [None, None] and x.tolist() != [1.0, 2.0]


async def test_an_awaited_step_says_so_in_a_compiled_function_too() -> None:
    x = ag.tensor([1.0], requires_grad=True)
    optimizer = ag.optim.SGD([x], lr=0.1)

    @ag.compile
    async def train() -> ag.Tensor:
        loss = (x * x).sum()
        await loss.backward()
        await optimizer.step()
        return loss

    await assert_awaiting_raises(ArgumentTypeError, "leave out `await`", train())
    assert x.tolist() == [1.0]
