"""Custom functions: forward and backward of the user's own, synchronous or not."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentTypeError, GraphError, InPlaceError, NestedPassError, OnceDifferentiableError
from tests.support import assert_awaiting_raises, assert_raises, constant, custom_function, leaf, same


@custom_function(lambda a: a * a, inline=True, saves=True)
def Square(ctx: Any, g: Any) -> Any:
    (a,) = ctx.saved_tensors
    return 2 * a * g


# -------------------------------------------------------------------- the basics


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "executor"])
async def test_forward_runs_without_recording_and_backward_is_the_rule(inline: bool) -> None:
    threads: list[int] = []

    class Cube(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            assert not ag.is_grad_enabled()
            ctx.save_for_backward(a)
            out = a * a * a
            assert not out.requires_grad
            return out

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            threads.append(threading.get_ident())
            assert not g.requires_grad and not ag.is_grad_enabled()
            (a,) = ctx.saved_tensors
            return g * 3 * a * a

    Cube.inline = inline
    x = leaf([2.0, 3.0])
    y = Cube.apply(x)
    assert y.requires_grad and y.grad_fn.name == "CubeBackward"
    same(y.detach(), [8.0, 27.0])
    await (y * constant([1.0, 10.0])).sum().backward()
    same(x.grad, [12.0, 270.0])
    assert (threads[0] == threading.get_ident()) is inline


async def test_forward_and_backward_may_be_coroutines() -> None:
    class Remote(ag.Function):
        @staticmethod
        async def forward(ctx: Any, a: Any, factor: float) -> Any:
            await asyncio.sleep(0)
            assert not ag.is_grad_enabled()
            ctx.factor = factor
            return a * factor

        @staticmethod
        async def backward(ctx: Any, g: Any) -> Any:
            await asyncio.sleep(0)
            assert ag.graph.current_node().name == "RemoteBackward"
            return g * ctx.factor, None

    x = leaf([1.0])
    one, two = await asyncio.gather(Remote.apply(x, 3.0), Remote.apply(x, 5.0))
    assert ag.is_grad_enabled()
    await (one + two).sum().backward()
    same(x.grad, [8.0])


async def test_arguments_and_outputs_that_are_no_tensors_pass_through() -> None:
    class Mixed(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any, name: str, b: Any, options: dict[str, int]) -> Any:
            assert name == "name" and options == {"k": 3}
            return a * 2, "text", b * 3, None, ["a", {"b": 1}]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            ga, text, gb, none, items = grads
            assert text is None and none is None and items == [None, {"b": None}]
            return ga * 2, None, gb * 3, None

    x, w = leaf([1.0]), leaf([1.0])
    first, text, second, none, items = Mixed.apply(x, "name", w, {"k": 3})
    assert text == "text" and none is None and items == ["a", {"b": 1}]
    await (first * 10 + second).sum().backward()
    same(x.grad, [20.0])
    same(w.grad, [3.0])


def outputs_of(a: np.ndarray[Any, Any], form: str) -> Any:
    """2a, 3a and, where there is room, 4a, made with numpy."""
    forms: dict[str, Any] = {
        "array": lambda: a * 2,
        "scalar": lambda: (a * 2).sum(),
        "tuple": lambda: (a * 2, a * 3),
        "list": lambda: [a * 2, a * 3],
        "dict": lambda: {"two": a * 2, "more": (a * 3, "text", [ag.asarray(a * 4)])},
        "mixed": lambda: (ag.asarray(a * 2), {"more": [a * 3]}, 7),
    }
    return forms[form]()


def nested_sum(tree: Any) -> Any:
    if isinstance(tree, ag.Tensor):
        return tree.sum()
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return sum((nested_sum(item) for item in items), start=constant(0.0))


@pytest.mark.parametrize(("form", "factor"), [("array", 2), ("scalar", 2), ("tuple", 5), ("list", 5), ("dict", 9), ("mixed", 5)])
@pytest.mark.parametrize("kind", ["def", "async def", "parallel map"])
async def test_arrays_and_nested_outputs_of_forward_are_recorded(form: str, factor: float, kind: str) -> None:
    seen: list[Any] = []

    @custom_function(lambda a: outputs_of(a.numpy(), form))
    def Multiples(ctx: Any, *grads: Any) -> Any:
        seen.append(grads)
        weights = iter((2, 3, 4))

        def pulled(tree: Any) -> Any:
            if isinstance(tree, ag.Tensor):
                return tree * next(weights)
            items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
            return sum(map(pulled, items), start=constant(0.0))

        return pulled(grads) + constant([0.0, 0.0])

    class Later(Multiples):
        @staticmethod
        async def forward(ctx: Any, a: Any) -> Any:
            await asyncio.sleep(0)
            return outputs_of(a.numpy(), form)

    x = leaf([1.0, 2.0])
    if kind == "parallel map":
        results = await ag.parallel.map_with_parallel_backward(Later, (x,), (x,))
        result, factor = results[0], factor * 2
        await nested_sum(results).backward()
    else:
        result = Multiples.apply(x) if kind == "def" else await Later.apply(x)
        await nested_sum(result).backward()
    same(x.grad, [factor, factor])
    if form == "dict":
        tree = result[0] if kind == "parallel map" else result
        assert tree["more"][1] == "text" and isinstance(tree["more"][0], ag.Tensor)
        ((grads,), *_) = seen
        assert grads["more"][1] is None and grads["more"][2][0].tolist() == [1.0, 1.0]
    with ag.no_grad():
        assert {type(leaf) for leaf in leaves(Multiples.apply(x))} <= {ag.Tensor, str, int}


def leaves(tree: Any) -> list[Any]:
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else None
    return [tree] if items is None else [leaf for item in items for leaf in leaves(item)]


async def test_an_array_of_an_argument_s_own_memory_is_a_copy() -> None:
    @custom_function(lambda a: a.numpy()[:1])
    def Same(ctx: Any, g: Any) -> Any:
        return np.concatenate([g, constant([0.0])])

    x = leaf([1.0, 2.0]) * 1.0
    y = Same.apply(x)
    y += 1
    same(x.detach(), [1.0, 2.0])


async def test_a_nested_output_may_be_differentiated_once_only_where_the_rule_says_so() -> None:
    class Doubled(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            return {"y": a * 2}

        @staticmethod
        @ag.once_differentiable
        def backward(ctx: Any, grads: Any) -> Any:
            return grads["y"] * 2

    x, seed = leaf([1.0]), leaf([3.0])
    (grad,) = await ag.grad(Doubled.apply(x)["y"], [x], [seed], create_graph=True)
    await assert_awaiting_raises(OnceDifferentiableError, None, ag.grad(grad.sum(), [seed]))


async def test_a_function_is_not_instantiated_and_its_forward_returns_something() -> None:
    assert_raises(ArgumentTypeError, r"call Square.apply\(\.\.\.\)", lambda: Square(leaf([1.0])))

    class Forgetful(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            a * 2

    class Later(ag.Function):
        @staticmethod
        async def forward(ctx: Any, a: Any) -> Any:
            a * 2

    for argument in (leaf([1.0]), constant([1.0])):
        assert_raises(ArgumentTypeError, "Forgetful.forward returned None.*Was `return` forgotten", Forgetful.apply, argument)
        await assert_awaiting_raises(ArgumentTypeError, "Later.forward returned None", Later.apply(argument))


async def test_without_tensors_that_require_grad_nothing_is_recorded() -> None:
    assert not Square.apply(constant([2.0])).requires_grad
    with ag.no_grad():
        assert not Square.apply(leaf([2.0])).requires_grad

    @custom_function(lambda a: str(a.shape))
    def Words(ctx: Any, g: Any) -> Any:
        raise AssertionError

    assert Words.apply(leaf([2.0])) == "(1,)"


async def test_a_tuple_of_one_stays_a_tuple() -> None:
    @custom_function(lambda a: (a * 2,), inline=True)
    def One(ctx: Any, g: Any) -> Any:
        return (g * 2,)

    x = leaf([1.0])
    (y,) = One.apply(x)
    await y.sum().backward()
    same(x.grad, [2.0])


async def test_attributes_of_the_context_last_from_forward_to_backward() -> None:
    class Scale(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any, k: float) -> Any:
            ctx.k = k
            return a * k

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * ctx.k, None

    x = leaf([1.0])
    await (Scale.apply(x, 2.0) + Scale.apply(x, 5.0)).sum().backward()
    same(x.grad, [7.0])


async def test_a_function_that_saved_nothing_can_run_again() -> None:
    @custom_function(lambda a: -a, inline=True)
    def Negate(ctx: Any, g: Any) -> Any:
        return -g

    x = leaf([1.0])
    y = Negate.apply(x)
    for _ in range(3):
        await y.backward()
    same(x.grad, [-3.0])


# -------------------------------------------------------------------- missing and double methods


async def test_forward_has_to_be_there() -> None:
    class Empty(ag.Function):
        pass

    assert_raises(NotImplementedError, "You must implement the forward function", lambda: Empty.apply(leaf([1.0])))


async def test_backward_has_to_be_there_when_it_is_needed() -> None:
    class Forward(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            return a * 1

    x = leaf([1.0])
    y = Forward.apply(x)
    await assert_awaiting_raises(RuntimeError, "You must implement either the backward or vjp method", y.sum().backward())
    assert x.grad is None


async def test_vjp_is_another_name_for_backward_but_not_a_second_one() -> None:
    class Vjp(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            return a * 3

        @staticmethod
        def vjp(ctx: Any, g: Any) -> Any:
            return g * 3

    class Both(Vjp):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * 3

    x = leaf([1.0])
    await Vjp.apply(x).sum().backward()
    same(x.grad, [3.0])
    y = Both.apply(x).sum()
    await assert_awaiting_raises(GraphError, "Implementing both 'backward' and 'vjp' for the custom Function Both is not allowed", y.backward())
    same(x.grad, [3.0])


# -------------------------------------------------------------------- saving


async def test_inputs_outputs_intermediates_and_none_can_be_saved() -> None:
    class Keeps(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            middle = a * 2
            out = middle * a
            ctx.save_for_backward(a, middle, out, None)
            return out

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            a, middle, out, nothing = ctx.saved_tensors
            assert nothing is None
            same(out.detach(), (a * middle).detach().numpy())
            return g * (middle + 2 * a)

    x = leaf([3.0])
    y = Keeps.apply(x)
    await y.sum().backward()
    same(x.grad, [12.0])


async def test_saved_inputs_and_outputs_are_in_the_graph_of_a_second_derivative() -> None:
    class Reciprocal(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            out = 1 / a
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            (out,) = ctx.saved_tensors
            return -g * out * out

    x = leaf([2.0])
    for function, derivatives in ((Reciprocal.apply, (-0.25, 0.25, -0.375)), (Square.apply, (4.0, 2.0))):
        y = function(x).sum()
        for expected in derivatives:
            (y,) = await ag.grad(y, x, create_graph=True)
            same(y.detach(), [expected])
            y = y.sum()


def test_only_tensors_can_be_saved() -> None:
    class Wrong(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            ctx.save_for_backward(a, 3.0)
            return a * 1

    assert_raises(ArgumentTypeError, "save_for_backward: argument 1 is a float; expected a Tensor or None", lambda: Wrong.apply(leaf([1.0])))


def test_saved_tensors_are_for_backward() -> None:
    class Early(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            ctx.save_for_backward(a)
            return ctx.saved_tensors

    assert_raises(GraphError, "available in backward only", lambda: Early.apply(leaf([1.0])))


async def test_passes_at_the_same_time_do_not_see_each_others_context() -> None:
    needs: dict[int, list[Any]] = {}

    @custom_function(lambda a, b: a * b, saves=True)
    async def Product(ctx: Any, g: Any) -> Any:
        before = ctx.needs_input_grad
        await asyncio.sleep(0)
        assert ctx.needs_input_grad == before
        needs.setdefault(ag.graph.current_graph_task_id(), []).append(before)
        a, b = ctx.saved_tensors
        return g * b, g * a

    x, w = leaf([2.0]), leaf([3.0])
    y = Product.apply(x, w).sum()
    (gx,), (gw,) = await asyncio.gather(ag.grad(y, x, retain_graph=True), ag.grad(y, w, retain_graph=True))
    same(gx, [3.0])
    same(gw, [2.0])
    assert sorted(needs.values()) == [[(False, True)], [(True, False)]]


# -------------------------------------------------------------------- gradients that are not there


async def test_missing_gradients_are_zeros_unless_asked_for_as_none() -> None:
    seen: list[Any] = []

    class Two(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any, materialize: bool) -> Any:
            ctx.set_materialize_grads(materialize)
            return a * 1, ag.tensor(np.ones((2, 2), np.float32))

        @staticmethod
        def backward(ctx: Any, g1: Any, g2: Any) -> Any:
            seen.append(g2)
            return g1, None

    x = leaf([1.0])
    for materialize in (True, False):
        first, second = Two.apply(x, materialize)
        assert second.requires_grad
        await first.sum().backward()
    same(seen[0], np.zeros((2, 2)))
    assert seen[0].dtype == np.float32 and seen[1] is None


async def test_none_travels_on_as_none() -> None:
    seen: list[Any] = []

    @custom_function(inline=True)
    def Nothing(ctx: Any, g: Any) -> Any:
        return None

    class Looks(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any, materialize: bool) -> Any:
            ctx.set_materialize_grads(materialize)
            return a * 1

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            seen.append(g)
            return g, None

    x, w = leaf([1.0]), leaf([1.0])
    out = Nothing.apply(Looks.apply(x * 2, False)) + Nothing.apply(Looks.apply(w * 2, True))
    await out.sum().backward()
    assert seen[1] is None
    same(seen[0], [0.0])
    assert x.grad is None  # None all the way
    same(w.grad, [0.0])


async def test_what_is_marked_non_differentiable_requires_no_grad_and_gets_zeros() -> None:
    seen: list[Any] = []

    class Sort(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            order = np.argsort(a)
            ranks = a * 0 + 7
            ctx.mark_non_differentiable(ranks)
            ctx.order = order
            return a[order], order, ranks

        @staticmethod
        def backward(ctx: Any, g: Any, g_order: Any, g_ranks: Any) -> Any:
            seen.extend((g_order, g_ranks))
            return g[np.argsort(ctx.order)]

    x = leaf([3.0, 1.0, 2.0])
    values, order, ranks = Sort.apply(x)
    assert values.requires_grad and not order.requires_grad and not ranks.requires_grad
    assert ranks.grad_fn is None
    await (values * constant([1.0, 10.0, 100.0]) * ranks).sum().backward()
    same(x.grad, [700.0, 7.0, 70.0])
    same(seen[0], [0, 0, 0])
    same(seen[1], [0.0, 0.0, 0.0])


async def test_a_saved_output_that_is_not_differentiable_stays_so() -> None:
    class Sign(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            sign = np.sign(a)
            ctx.mark_non_differentiable(sign)
            ctx.save_for_backward(sign)
            return a * sign, sign

        @staticmethod
        def backward(ctx: Any, g: Any, g_sign: Any) -> Any:
            (sign,) = ctx.saved_tensors
            assert not sign.requires_grad
            return g * sign

    x = leaf([-2.0, 3.0])
    y, _ = Sign.apply(x)
    (g,) = await ag.grad(y.sum(), x, create_graph=True)
    same(g.detach(), [-1.0, 1.0])


@pytest.mark.parametrize("mark", ["mark_non_differentiable", "mark_dirty"])
def test_only_tensors_can_be_marked(mark: str) -> None:
    class Wrong(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            getattr(ctx, mark)([a])
            return a

    assert_raises(ArgumentTypeError, f"{mark}: argument 0 is a list", lambda: Wrong.apply(leaf([1.0]) * 1))


# -------------------------------------------------------------------- returned and modified inputs


async def test_a_returned_input_is_a_place_of_its_own_in_the_graph() -> None:
    @custom_function(lambda a: a, inline=True)
    def Same(ctx: Any, g: Any) -> Any:
        return g * 5

    x = leaf([1.0])
    y = Same.apply(x)
    assert y is not x and y.grad_fn.name == "SameBackward" and x.is_leaf
    seen: list[Any] = []
    x.register_hook(lambda g: seen.append(("x", g.item())))
    y.register_hook(lambda g: seen.append(("y", g.item())))
    await (x * 3 + y * 2).sum().backward()
    same(x.grad, [13.0])
    assert seen == [("y", 2.0), ("x", 13.0)]


class DoubleInPlace(ag.Function):
    inline = True

    @staticmethod
    def forward(ctx: Any, a: Any) -> Any:
        a *= 2
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2


async def test_a_modified_input_is_returned_as_itself() -> None:
    x = leaf([1.0, 2.0])
    y = x * 1
    z = DoubleInPlace.apply(y)
    assert z is y and y.grad_fn.name == "DoubleInPlaceBackward" and y.version > 0
    same(y.detach(), [2.0, 4.0])
    await (y * 3).sum().backward()
    same(x.grad, [6.0, 6.0])


async def test_a_modified_view_takes_its_base_along() -> None:
    x = leaf([1.0, 2.0, 3.0])
    y = x * 1
    sibling = y[1:]
    DoubleInPlace.apply(y[:2])
    same(y.detach(), [2.0, 4.0, 3.0])
    await (y.sum() + (sibling * 10).sum()).backward()
    same(x.grad, [2.0, 22.0, 11.0])


async def test_a_modified_input_keeps_retaining_its_gradient() -> None:
    x = leaf([1.0])
    y = x * 1
    y.retain_grad()
    DoubleInPlace.apply(y)
    await (y * 3).sum().backward()
    same(y.grad, [3.0])
    same(x.grad, [6.0])


async def test_a_modified_input_invalidates_what_was_saved_of_it() -> None:
    x = leaf([2.0])
    y = x * 1
    z = y * y
    DoubleInPlace.apply(y)
    await assert_awaiting_raises(ag.errors.ModifiedError, None, z.sum().backward())


def test_a_leaf_or_a_view_of_one_cannot_be_modified() -> None:
    x = leaf([1.0])
    with pytest.raises(InPlaceError, match=r"DoubleInPlace.forward: a leaf Variable that requires grad is being used in an in-place operation"):
        DoubleInPlace.apply(x)
    assert_raises(InPlaceError, "a view of a leaf Variable", lambda: DoubleInPlace.apply(x[0:1]))


def test_what_is_marked_dirty_is_an_argument_and_returned() -> None:
    class Forgets(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            ctx.mark_dirty(a)
            return a * 1

    class Stranger(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            out = a * 1
            ctx.mark_dirty(out)
            return out

    y = leaf([1.0]) * 1
    assert_raises(InPlaceError, r"Forgets.forward: a tensor marked dirty was not returned", Forgets.apply, y)
    assert_raises(InPlaceError, r"Stranger.forward: a tensor marked dirty is not an argument", Stranger.apply, y)


async def test_an_output_that_is_a_view_of_an_input_cannot_be_modified_in_place() -> None:
    @custom_function(lambda a: a[0:1], inline=True)
    def Head(ctx: Any, g: Any) -> Any:
        return np.concatenate([g * 5, g * 0])

    x = leaf([1.0, 2.0])
    y = x * 1
    z = Head.apply(y)
    with pytest.raises(InPlaceError, match=r"a view that the custom Function Head returned.*Use clone"):
        z *= 2
    same(y.detach(), [1.0, 2.0])
    copy = z.clone()
    copy *= 2
    await copy.sum().backward()
    same(x.grad, [10.0, 0.0])


# -------------------------------------------------------------------- once_differentiable


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_rule_marked_once_differentiable_can_be_differentiated_once(asynchronous: bool) -> None:
    class Once(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            ctx.save_for_backward(a)
            return a * a

        if asynchronous:

            @staticmethod
            @ag.once_differentiable
            async def backward(ctx: Any, g: Any) -> Any:
                assert not ag.is_grad_enabled()
                await asyncio.sleep(0)
                (a,) = ctx.saved_tensors
                return 2 * a * g

        else:

            @staticmethod
            @ag.once_differentiable
            def backward(ctx: Any, g: Any) -> Any:
                assert not ag.is_grad_enabled()
                (a,) = ctx.saved_tensors
                return 2 * a * g

    x = leaf([3.0])
    y = Once.apply(x * 1).sum()
    (g,) = await ag.grad(y, x, create_graph=True)
    same(g.detach(), [6.0])
    assert g.requires_grad
    with pytest.raises(OnceDifferentiableError, match="trying to differentiate twice a function that was marked with @once_differentiable"):
        await g.sum().backward()
    assert x.grad is None
    await Once.apply(x).sum().backward()
    same(x.grad, [6.0])


# -------------------------------------------------------------------- errors


async def test_an_exception_keeps_its_type_and_traceback_and_says_where() -> None:
    class Mine(Exception):
        pass

    def deep() -> None:
        raise Mine("broken")

    for inline in (True, False):

        @custom_function()
        def Fails(ctx: Any, g: Any) -> Any:
            deep()

        Fails.inline = inline
        x = leaf([1.0])
        y = Fails.apply(x)  # the line that the note names
        with pytest.raises(Mine, match="broken") as caught:
            await y.sum().backward()
        assert "deep" in [entry.name for entry in caught.traceback]
        (note,) = caught.value.__notes__
        assert "FailsBackward" in note and "test_function.py" in note and "graph task" in note
        assert x.grad is None


async def test_a_nested_pass_in_a_synchronous_rule_is_refused() -> None:
    @custom_function()
    def Nests(ctx: Any, g: Any) -> Any:
        with ag.enable_grad():
            inner = (leaf([1.0]) * 2).sum()
        return inner.backward()

    for inline in (True, False):
        Nests.inline = inline
        with pytest.raises(NestedPassError, match=r"inside the synchronous rule of NestsBackward.*Make it `async def`"):
            await Nests.apply(leaf([1.0])).sum().backward()


async def test_a_synchronous_rule_that_returns_a_coroutine_has_it_awaited() -> None:
    @custom_function()
    def Late(ctx: Any, g: Any) -> Any:
        async def later() -> Any:
            await asyncio.sleep(0)
            return g * 3

        return later()

    x = leaf([1.0])
    await Late.apply(x).sum().backward()
    same(x.grad, [3.0])
