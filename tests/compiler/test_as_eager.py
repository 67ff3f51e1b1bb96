"""Whatever a user changes between two calls, and whatever a function does beside computing: never a stale result, no effect lost or done twice."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.nn import functional as F
from tests.compiler.scenarios import check

SCALE = 2.0


def _made_within(x: Any) -> Any:
    return sum(x * SCALE for _ in range(2))


def _third(x: Any) -> Any:
    return x * SCALE


def _second(x: Any) -> Any:
    return _third(x)


def _first(x: Any) -> Any:
    return _second(x)


def _through(x: Any) -> Any:
    return _first(x)


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale


SETTINGS = {"a": Settings(2.0), "b": Settings(2.0)}
SETTINGS["b"].other = 3.0  # type: ignore[attr-defined]


def _of_a(x: Any) -> Any:
    return x * SETTINGS["a"].scale


def _of_b(x: Any) -> Any:
    return x * SETTINGS["b"].other  # type: ignore[attr-defined]


class Scaled(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        self.weight = nn.Parameter(np.ones(3, np.float32))
        self.scales = [1.0, 2.0]
        self.settings = Settings(2.0)
        self.named = {"a": 1.0}

    def forward(self, x: Any) -> Any:
        return self.scaled(x) + _of_a(x) + _of_b(x)

    def scaled(self, x: Any) -> Any:
        return x * self.weight * self.scales[0] * self.settings.scale * self.named["a"] * self.factor * SCALE


@dataclasses.dataclass(eq=False)
class Pair:
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: float


Named = collections.namedtuple("Named", "a b")


# ---------------------------------------------------------------- arguments


def an_argument_that_is_captured(wrap: Any, log: Any, t: Any) -> None:
    weight, other = t(3), t(3)
    f = wrap(lambda x: x * weight)
    for x in (weight, other, weight, other):
        log(f(x))


async def a_parameter_as_an_argument(wrap: Any, log: Any, t: Any) -> None:
    weight, other = t(3, grad=True), t(3, grad=True)
    f = wrap(lambda x: (x * weight + x.sin() * weight * 3 + weight * x * x + weight.exp()).sum())
    for x in (other, weight, other, weight):
        weight.grad = other.grad = None
        await f(x).backward()
        log(weight, other)


def an_array_as_an_argument_that_is_captured(wrap: Any, log: Any, t: Any) -> None:
    array, y = np.arange(3, dtype=np.float32), t(3)
    f = wrap(lambda x: y * x + y * array)
    for x in (array, array + 1, array):
        log(f(x))


def objects_among_the_arguments(wrap: Any, log: Any, t: Any) -> None:
    x, settings, pair, model = t(3), Settings(2.0), Pair(t(3), 2.0), nn.Linear(3, 3)
    scale = 2.0

    def helper(y: Any) -> Any:
        return y * scale

    f = wrap(lambda x, s, p, *, m, h: h(x) * s[0].scale * p.a * p.b + x @ m.weight)
    for change in range(7):
        if change == 2:
            settings.scale = 3.0
        elif change == 3:
            pair.a = t(3)
        elif change == 4:
            pair.b = 5.0
        elif change == 5:
            model.weight = nn.Parameter(t(3, 3))
        elif change == 6:
            scale = 7.0
        log(f(x, [settings], pair, m=model, h=helper))


def tuples_and_dicts_of_other_classes(wrap: Any, log: Any, t: Any) -> None:
    f = wrap(lambda n: (n.a * n.b, type(n).__name__ == "Named" and n.a))
    pair = Named(t(3), t(3))
    for _ in range(3):
        log(f(pair)[0])  # the same object again
    ordered = collections.OrderedDict(a=t(3), b=t(3))

    def g(d: Any) -> Any:
        return {key: value * 2 for key, value in d.items()}

    g = wrap(g)
    for _ in range(4):
        log(g(ordered))
        ordered.move_to_end("a")
    h = wrap(lambda d: d["a"] * d["none"])
    for _ in range(2):
        log(h(collections.defaultdict(lambda: 3.0, a=t(3))))


class Subclass(np.ndarray):
    pass


def arrays_of_subclasses(wrap: Any, log: Any, t: Any) -> None:
    array = np.arange(3.0).view(Subclass)
    f = wrap(lambda x: ag.asarray(x) * 2)
    for _ in range(4):
        log(f(array))


def numbers_that_are_equal_but_not_the_same(wrap: Any, log: Any, t: Any) -> None:
    x = ag.asarray(np.array([1, -2]))
    f = wrap(lambda x, s: x / s)
    with np.errstate(all="ignore"):
        for zero in (np.float32(0.0), np.float32(-0.0), np.float64(0.0), np.float64(-0.0)):
            log(f(x, zero), f(x, zero))
    g = wrap(lambda x, s: x * next(iter(s)))
    for numbers in (frozenset([1.0]), frozenset([1]), frozenset([True])):
        log(g(x, numbers), g(x, numbers))
    h = wrap(lambda x, s: x * s.a)
    for number in (1.0, 1, 1.0):
        log(h(x, Frozen(number)), h(x, Frozen(number)))
    k = wrap(lambda x, s: x[s])
    for part in (slice(0, 1), slice(1, 2), slice(0, 1)):
        log(k(x, part))


def arguments_that_the_function_changes(wrap: Any, log: Any, t: Any) -> None:
    values = [t(3)]

    def f(values: Any) -> Any:
        values.append(values[0] * 2)
        return values[0] + 1

    f = wrap(f)
    for _ in range(3):
        log(f(values), values)


# ---------------------------------------------------------------- what a name leads to


def globals_of_functions_within(wrap: Any, log: Any, t: Any) -> None:
    global SCALE
    x, before = t(3), SCALE
    within = wrap(lambda x: [y * SCALE for y in (x, x)][1] + sum(x * SCALE for _ in range(2)))
    generated, deep = wrap(lambda x: _made_within(x)), wrap(lambda x: _through(x))
    for f in (within, generated, deep):
        for SCALE in (2.0, 2.0, 3.0, 3.0):  # noqa: B007
            log(f(x))
    SCALE = before


def containers_and_defaults(wrap: Any, log: Any, t: Any) -> None:
    x, numbers, named, factors, many = t(3), {1, 2}, {2: None, 3: None}, [2.0], [float(n) for n in range(50)]
    f = wrap(lambda x: x * sum(numbers) * sum(named) * many[40])

    def g(x: Any, s: float = 2.0, ones: Any = factors, *, k: float = 1.0) -> Any:
        return x * s * ones[0] + k

    compiled = wrap(g)
    for change in range(6):
        if change == 2:
            numbers.add(5)
        elif change == 3:
            del named[2], named[3]
            named.update({5: None, 6: None})
        elif change == 4:
            factors[0] = 3.0
            many[40] = 0.5
            g.__kwdefaults__["k"] = 5.0
        elif change == 5:
            g.__defaults__ = (3.0, factors)
        log(f(x), compiled(x))


def parts_of_modules(wrap: Any, log: Any, t: Any) -> None:
    global SCALE
    model, x, before = nn.Sequential(Scaled(), nn.Tanh()), t(3), SCALE
    inner: Any = model[0]
    direct, called = wrap(model), wrap(lambda x: model(x))
    for change in range(9):
        if change == 2:
            inner.scales[0] = 5.0
        elif change == 3:
            inner.settings.scale = 3.0
        elif change == 4:
            inner.named["a"] = 7.0
        elif change == 5:
            Scaled.factor = 3.0
        elif change == 6:
            SCALE = 0.5
        elif change == 7:
            SETTINGS["b"].other = 7.0  # type: ignore[attr-defined]
        elif change == 8:
            SETTINGS["a"].scale = 7.0
        log(direct(x), called(x))
    Scaled.factor, SCALE = 2.0, before
    SETTINGS["b"].other, SETTINGS["a"].scale = 3.0, 2.0  # type: ignore[attr-defined]


def forward_hooks(wrap: Any, log: Any, t: Any) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), t(3)
    f, factor = wrap(lambda x: model(x)), 2.0
    handles = [model.register_forward_hook(lambda m, a, y: y * factor)]
    for change in range(7):
        if change == 1:
            handles.append(model.register_forward_hook(lambda m, a, y: y + 1))
        elif change == 2:
            handles.append(model[0].register_forward_pre_hook(lambda m, a: a[0] * 2))
        elif change == 3:
            factor = 5.0
        elif change > 3:
            handles.pop(0).remove()
        log(f(x), f(x))


# ---------------------------------------------------------------- shapes and views


async def masks(wrap: Any, log: Any, t: Any) -> None:
    mask, fixed = np.array([1, 0, 1, 0], bool), t(4)
    captured = wrap(lambda x: x[mask].sum() / x[mask].size)
    log(captured(fixed), captured(fixed))
    mask[1] = True
    log(captured(fixed), captured(fixed))

    def assigned(x: Any) -> Any:
        y = x * 2
        y[x > 0] = x[x > 0] * 3
        return y.sum()

    for function in (
        lambda x: x[x > 0].mean(), lambda x: (ag.masked_select(x, x > 0) ** 2).sum(), lambda x: (x[ag.nonzero(x > 0)[0]] ** 2).sum(),
        lambda x: x[x > 0].sum() / x[x > 0].size, lambda x: ag.unique(x.round()).sum() + x.sum(), assigned,
    ):  # fmt: skip
        f = wrap(function, on_break="eager")
        for numbers in ([1, -2, 3, -4], [1, 2, 3, -4], [-1, -2, 3, -4]):
            x = ag.tensor(np.array(numbers, np.float32), requires_grad=True)
            loss = f(x)
            await loss.backward()
            log(loss, x)


async def counts_of_repetitions(wrap: Any, log: Any, t: Any) -> None:
    f = wrap(lambda x, n: ag.repeat(x, n).sum(), on_break="eager")
    for n in ([1, 2, 3], [3, 2, 1], [1, 1, 1]):
        x = t(3, grad=True)
        await f(x, np.array(n)).backward()
        log(x)


async def results_that_share_memory(wrap: Any, log: Any, t: Any) -> None:
    weight = t(4, grad=True)

    def base_and_view(x: Any) -> Any:
        y = x * weight
        return y, y[1:], y.reshape(2, 2)

    def overlapping(x: Any) -> Any:
        y = x * weight
        return y[:3], y[1:], y.sum()

    for f in (wrap(base_and_view), wrap(overlapping)):
        for _ in range(3):
            weight.grad = None
            one, other, third = f(t(4))
            one.mul_(2.0)
            log(one, other, third)
            other.add_(1.0)
            await (one.sum() + (other * other).sum() + (third * third).sum()).backward()
            log(one, other, third, weight)


async def results_that_share_memory_with_what_is_saved(wrap: Any, log: Any, t: Any) -> None:
    weight = t(4, grad=True)

    def saved_view(x: Any) -> Any:
        y = x * weight
        return y, (y[1:] ** 2).sum()

    def saved_base(x: Any) -> Any:
        y = (x * weight).exp()[1:]
        return y, y.sum()

    for f in (wrap(saved_view), wrap(saved_base)):
        for changes in (False, True, True, False):
            y, loss = f(t(4))
            if changes:
                y.mul_(2.0)
            try:
                await loss.backward()
                log(weight)
            except ag.errors.ModifiedError as error:
                log(error)


async def results_that_are_arguments_or_views_of_them(wrap: Any, log: Any, t: Any) -> None:
    weight, buffer = t(2, 3, grad=True), t(3)
    functions = (
        lambda x: x, lambda x: (x, x), lambda x: x.reshape(-1), lambda x: x.T[1:], lambda x: (x[0], x[1:], x.mT), lambda x: (x * 2, x.exp()[1:]),
        lambda x: x.detach(), lambda x: (x.detach(), x), lambda x: weight, lambda x: (weight[1], weight.T * x.T), lambda x: (buffer[1:], x * buffer),
        lambda x: (x[0] ** 2, x[0]), lambda x: x.contiguous(), lambda x: ag.zeros(2), lambda x: (ag.ones(2), x.new_zeros(2)),
        lambda x: {"a": [x.T, None]},
        lambda x: ag.broadcast_to(x, (2, 2, 3)), lambda x: x.reshape(3, 2).reshape(6)[::2],
    )  # fmt: skip
    for number, function in enumerate(functions):
        f = wrap(function)
        for change in range(6):
            weight.grad = None
            x = t(2, 3, grad=change % 2 == 0) * 1
            result = f(x)
            results = ag.running.trees.leaves_of(result, ag.Tensor)
            log(result, [each is x for each in results], [each is weight for each in results])
            if change > 2 and not any(each.requires_grad for each in results) and number != 16:
                for each in results:
                    each += 1.0
                log(result, x, buffer)
            if change > 2 and results[0].requires_grad and results[0] is not weight and not results[0].is_leaf:
                try:
                    results[0].mul_(2.0)
                    await (results[0] * x.sum()).sum().backward()
                except ag.errors.AiogradError as error:
                    log(error)
            log(result, x, weight)


async def results_of_a_step_that_share_memory(wrap: Any, log: Any, t: Any) -> None:
    weight = t(4, grad=True)

    @wrap
    async def step(x: Any) -> Any:
        y = x * weight
        await y.sum().backward()
        return y, y[1:]

    for _ in range(3):
        one, other = await step(t(4))
        with ag.no_grad():
            one.mul_(2.0)
        log(one, other, weight)


def _added(x: Any, made: Any) -> Any:
    made += x
    return made * 1.0


def _assigned(x: Any, made: Any) -> Any:
    made[:] = x
    made[0] = 7.0
    for i in range(2):
        made[i] += x[i] * i
    return made * 1.0


def _used_before(x: Any, made: Any) -> Any:
    view, before = made[1:], made * 3.0
    view += x[1:]
    return made + before + view.sum()


def _without_gradients(x: Any, made: Any) -> Any:
    with ag.no_grad():
        made += x
    return made * x


async def tensors_that_are_made_and_modified(wrap: Any, log: Any, t: Any) -> None:
    makers = (
        lambda x: ag.zeros(3, dtype=ag.float64), lambda x: ag.tensor([1.0, 2.0, 3.0]), lambda x: ag.full(3, 2.0), lambda x: ag.eye(3)[1],
        lambda x: ag.empty(3).fill_(2.0), lambda x: ag.asarray([1.0, 2.0, 3.0]), lambda x: ag.zeros_like(x), lambda x: x.new_zeros(3),
        lambda x: ag.arange(3.0),
    )  # fmt: skip
    for make in makers:
        for modify in (_added, _assigned, _used_before, _without_gradients):
            f = wrap(lambda x, make=make, modify=modify: modify(x, make(x)))
            for grad in (False, True, False, True, True):
                x = t(3, grad=grad)
                result = f(x)
                log(result)
                if result.requires_grad:
                    await result.sum().backward()
                    log(x)


def arrays_that_change_in_place(wrap: Any, log: Any, t: Any) -> None:
    array, integers, single, large = np.arange(3.0), np.arange(3), np.ones(3, np.float32), np.ones(5000)
    for function in (
        lambda x: x * array, lambda x: x * integers, lambda x: x * single, lambda x: x * ag.tensor(array), lambda x: x * ag.asarray(array),
        lambda x: x * ag.asarray(array, dtype=np.float32), lambda x: ag.stack([ag.asarray(array), x]) * 1, lambda x: x * ag.tensor(large).sum(),
        lambda x: x * np.add(array, single), lambda x: x * array.max(), lambda x: x * np.asarray(array[::2]).sum(),
        lambda x: ag.where(array > 1.0, x, 0.0),
    ):  # fmt: skip
        f = wrap(function)
        array[:], integers[:], single[:], large[:] = np.arange(3), np.arange(3), 1.0, 1.0
        for change in range(5):
            if change > 2:
                array[1], integers[1], single[1], large[7] = change, change, change, change
            log(f(t(3)))


# ---------------------------------------------------------------- effects


def modes_that_are_set(wrap: Any, log: Any, t: Any) -> None:
    def f(x: Any) -> Any:
        ag.set_grad_enabled(False)
        return x * 2

    def g(x: Any) -> Any:
        ag.set_default_dtype(np.float64)
        return x * ag.ones(3)

    f, g = wrap(f), wrap(g)
    for _ in range(3):
        log(f(t(3)), ag.is_grad_enabled())
        ag.set_grad_enabled(True)
        log(g(t(3)), str(ag.get_default_dtype()))
        ag.set_default_dtype(np.float32)


def random_numbers_that_are_not_plain_draws(wrap: Any, log: Any, t: Any) -> None:
    shared = ag.Generator(5)
    state = ag.Generator(7).state_dict()

    def seeds(x: Any) -> Any:
        ag.seed(3)
        return x + ag.rand(3)

    def goes_back(x: Any) -> Any:
        shared.load_state_dict(state)
        return x + shared.uniform(3)

    made = lambda x: x + ag.rand(3, generator=ag.Generator(3))  # noqa: E731
    forked = lambda x: x + shared.fork().uniform(3)  # noqa: E731
    for f in map(wrap, (seeds, made, forked, goes_back)):
        for _ in range(3):
            log(f(t(3)), ag.rand(2), shared.uniform(2))


def floating_point_errors(wrap: Any, log: Any, t: Any) -> None:
    def f(x: Any) -> Any:
        with np.errstate(divide="raise"):
            return 1.0 / x

    f = wrap(f)
    for number in (1.0, 2.0, 0.0, 1.0):
        try:
            log(f(ag.asarray(np.full(3, number, np.float32))))
        except FloatingPointError as error:
            log(error)


async def hooks_of_leaves(wrap: Any, log: Any, t: Any) -> None:
    weight = t(3, grad=True)

    def f(x: Any) -> Any:
        weight.register_hook(lambda g: g * 2)
        return (x * weight).sum()

    f = wrap(f)
    for _ in range(3):
        weight.grad = None
        await f(t(3)).backward()
        log(weight)


async def options_that_a_step_sets(wrap: Any, log: Any, t: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = ag.optim.SGD(model.parameters(), lr=0.1)

    @wrap
    async def step(x: Any, lr: float, factor: float) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = (model(x) ** 2).mean()
        await loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= factor
        return loss

    for lr, factor in ((0.1, 1.0), (0.2, 1.0), (0.1, 1.0), (0.1, 0.5), (0.1, 0.5)):
        log(await step(t(4, 3), lr, factor), optimizer.param_groups[0]["lr"], *model.parameters())


async def an_optimizer_of_one_call(wrap: Any, log: Any, t: Any) -> None:
    model = nn.Linear(3, 1)

    @wrap
    async def step(x: Any) -> Any:
        optimizer = ag.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss = model(x).sum()
        await loss.backward()
        optimizer.step()
        return loss

    for _ in range(3):
        log(await step(t(2, 3)), *model.parameters())


async def gradients_that_are_looked_for(wrap: Any, log: Any, t: Any) -> None:
    model, unused = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = ag.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.1)

    @wrap
    async def step(x: Any) -> Any:
        if model.weight.grad is not None:
            optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        await loss.backward()
        for p in (*model.parameters(), *unused.parameters()):
            if p.grad is not None:
                p.grad.mul_(0.5)
        optimizer.step()
        return loss

    for number in range(6):
        if number == 4:
            unused.weight.grad = t(1, 3)
        log(await step(t(2, 3)), *model.parameters(), *unused.parameters())


async def gradients_of_captured_leaves_and_of_arguments(wrap: Any, log: Any, t: Any) -> None:
    weight = t(3, grad=True)
    plain = wrap(lambda x: x * (2.0 if weight.grad is None else weight.grad))

    @wrap
    async def of_an_argument(x: Any) -> Any:
        await (x * x).sum().backward()
        return x.grad * 2

    @wrap
    async def replaced(x: Any) -> Any:
        await (weight * x).sum().backward()
        grad = weight.grad
        weight.grad = None
        return grad * 2

    for number in range(8):
        if number in (2, 3, 6):
            weight.grad = None
            await (weight * t(3)).sum().backward()
        elif number == 4:
            weight.grad = None
        log(plain(t(3)))
    for _ in range(3):
        log(await of_an_argument(t(3, grad=True)), await replaced(t(3)), weight)


def refusals(wrap: Any, log: Any, t: Any) -> None:
    places = np.array([0, 1])
    f = wrap(lambda x: x[places] * 2)
    for place in (0, 1, 7, 2):
        places[0] = place
        try:
            log(f(t(3)))
        except ag.errors.IndexRangeError as error:
            log(error)


def refusals_of_values_that_nothing_uses(wrap: Any, log: Any, t: Any) -> None:
    place, matrix = ag.tensor([0, 1]), ag.eye(2)

    def computed(x: Any) -> Any:
        x[place] + 1.0  # which nothing uses
        z = x.clone()
        z[place] = 1.0
        return x * 2

    functions = [
        computed, lambda x: (x.index_select(0, place), x * 2)[1], lambda x: (ag.linalg.inv(matrix), x * 2)[1],
        lambda x: (F.nll_loss(x[:2, None] * ag.ones(1, 3), place), x * 2)[1],
    ]  # fmt: skip
    for tier in ("numpy", "native"):
        for f in [wrap(function, tier=tier) for function in functions]:
            for number in (0, 1, 7, 2):
                with ag.no_grad():
                    place[0], matrix[0, 0] = number, float(number != 7)
                try:
                    log(f(t(3)))
                except (ag.errors.IndexRangeError, ag.errors.LinearAlgebraError, ag.errors.ArgumentError) as error:
                    log(error)


async def views_of_what_is_modified(wrap: Any, log: Any, t: Any) -> None:
    def of_a_detached_view(x: Any) -> Any:
        y = x * 2.0
        turned = y[::-1]
        y[1:] = 0.5
        turned[turned.detach() > 0.75] = 3.0
        return y * x

    def detached_before(x: Any) -> Any:
        y = x * 2.0
        aside = y[::-1].detach()
        turned, part = y[::-1], aside[1:]
        product = aside + x
        y[0] = 2.0
        y[aside > 0.2] = 0.5
        return product + aside * turned, part * 1.0

    def masks(x: Any) -> Any:
        y, mask = x * 1.0, x > 0.0
        turned = mask[::-1]
        mask[0] = True
        y[turned] = 3.0
        return y * x

    for f in [wrap(function) for function in (of_a_detached_view, detached_before, masks)]:
        for _ in range(4):
            x = t(4, grad=True)
            results = f(x)
            for result in results if isinstance(results, tuple) else (results,):
                log(result)
                if result.requires_grad:
                    await result.sum().backward(retain_graph=True)
            log(x)


async def masks_that_select_nothing(wrap: Any, log: Any, t: Any) -> None:
    buffer = t(3)

    def through_a_view(x: Any, limit: Any) -> Any:
        y = x * 2.0
        part = y[1:]
        y[y.detach() > limit] = 0.5
        return part * x[1:]

    def needed_by_the_backward(x: Any, limit: Any) -> Any:
        y = x * 2.0
        z = y * y
        y[y.detach() > limit] = 0.5
        return z + y

    def of_a_buffer(x: Any, limit: Any) -> Any:
        with ag.no_grad():
            buffer[x > limit] = 0.5
        return x * 2.0

    for f in [wrap(function, on_break="eager") for function in (through_a_view, needed_by_the_backward, of_a_buffer)]:
        for limit in (100.0, 100.0, -100.0, 100.0):
            x = t(3, grad=True)
            other = x * buffer
            result = f(x, ag.tensor(limit)).sum() + other.sum()
            try:
                await result.backward()
            except ag.errors.ModifiedError as error:
                log(error)
            log(result, x, buffer)


async def values_at_masks(wrap: Any, log: Any, t: Any) -> None:
    def of(value: Any) -> Any:
        def function(x: Any, limit: Any) -> Any:
            y = x * 2.0
            y[y.detach() > limit] = value(x)
            return (y * y).sum()

        return function

    values = [lambda x: x.mean(), lambda x: x[:1, 0], lambda x: x[:1, :1].reshape(1, 1)[0]]
    for tier in ("numpy", "native"):
        for f in [wrap(of(value), tier=tier) for value in values]:
            for number in (1, 1, 1, 5, 12, 0, 2, 1):
                x = t(3, 4, grad=True)
                limit = np.sort(x.detach().numpy() * 2.0, axis=None)[-number - 1 if number < 12 else 0] - (number == 12)
                await f(x, ag.tensor(limit)).backward()
                log(x)


async def numbers_of_settings_that_change_in_place(wrap: Any, log: Any, t: Any) -> None:
    given, rows = ag.tensor([0, 1, 1]), np.array([0, 1, 1])
    losses = [wrap(lambda x: F.nll_loss(x, given)), wrap(lambda x: F.nll_loss(x, rows)), wrap(lambda x: F.embedding(given, x).sum())]
    for number in (0, 0, 2, 1, -1, 0):
        rows[0] = number
        with ag.no_grad():
            given[0] = number
        for loss in losses:
            x = t(3, 4, grad=True)
            try:
                await loss(x).backward()
            except ag.errors.ArgumentError as error:
                log(error)
            log(x)


SCENARIOS = [
    an_argument_that_is_captured, a_parameter_as_an_argument, an_array_as_an_argument_that_is_captured, objects_among_the_arguments,
    tuples_and_dicts_of_other_classes, arrays_of_subclasses, numbers_that_are_equal_but_not_the_same, arguments_that_the_function_changes,
    globals_of_functions_within, containers_and_defaults, parts_of_modules, forward_hooks, masks, counts_of_repetitions, results_that_share_memory,
    results_that_are_arguments_or_views_of_them, results_that_share_memory_with_what_is_saved, results_of_a_step_that_share_memory,
    modes_that_are_set, random_numbers_that_are_not_plain_draws, gradients_that_are_looked_for, gradients_of_captured_leaves_and_of_arguments,
    refusals, refusals_of_values_that_nothing_uses, views_of_what_is_modified, masks_that_select_nothing, values_at_masks,
    numbers_of_settings_that_change_in_place, tensors_that_are_made_and_modified,
    arrays_that_change_in_place, floating_point_errors, hooks_of_leaves, options_that_a_step_sets, an_optimizer_of_one_call,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_it_is_as_eager(scenario: Any) -> None:
    made = await check(scenario)
    assert sum([each.statistics().recordings for each in made]) >= len(made) > 0
