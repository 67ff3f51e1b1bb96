"""Batches in pieces, and results put together again."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, MicrobatchError
from aiograd.pipeline import REPLICATE, Reduce, Split, merge_microbatches, split_microbatches
from aiograd.pipeline.microbatch import microbatches_of
from tests.support import assert_raises


def rows(n: int, *more: int) -> Any:
    return ag.tensor(np.arange(float(n * int(np.prod(more)))).reshape(n, *more))


class Pair(NamedTuple):
    left: Any
    right: Any


def shapes(pieces: Any, pick: Any) -> list[Any]:
    return [pick(piece).shape for piece in pieces]


# -------------------------------------------------------------------- splitting


def test_every_tensor_is_split_along_its_first_axis() -> None:
    pieces = split_microbatches([rows(128, 2), rows(256, 2)], {"z": rows(512, 2)}, 2)
    assert shapes(pieces, lambda p: p[0][0]) == [(64, 2)] * 2
    assert shapes(pieces, lambda p: p[0][1]) == [(128, 2)] * 2
    assert shapes(pieces, lambda p: p[1]["z"]) == [(256, 2)] * 2
    assert all(isinstance(args, tuple) and isinstance(kwargs, dict) for args, kwargs in pieces)


@pytest.mark.parametrize("n", [4, 5, 6, 7, 8, 13])
def test_uneven_batches_are_split_as_numpy_does(n: int) -> None:
    pieces = split_microbatches([rows(n, 2)], {}, 4)
    for (args, _), expected in zip(pieces, np.array_split(rows(n, 2).numpy(), 4), strict=True):
        assert np.array_equal(args[0].numpy(), expected)


@pytest.mark.parametrize("axis", [1, -1])
def test_another_axis(axis: int) -> None:
    x = rows(2, 6)
    pieces = split_microbatches([x, x], {"y": [x, x]}, 3, arg_specs=[Split(axis), REPLICATE], kwarg_specs={"y": [Split(axis), REPLICATE]})
    for i, (args, kwargs) in enumerate(pieces):
        assert np.array_equal(args[0].numpy(), x.numpy()[:, 2 * i : 2 * i + 2])
        assert args[1] is x
        assert np.array_equal(kwargs["y"][0].numpy(), args[0].numpy())
        assert kwargs["y"][1] is x


def test_what_is_no_tensor_is_repeated() -> None:
    marker = object()
    pieces = split_microbatches([marker, rows(2), None, "text"], {"k": 3}, 2)
    assert [(args[0], args[2], args[3], kwargs) for args, kwargs in pieces] == [(marker, None, "text", {"k": 3})] * 2
    assert split_microbatches([], None, 3) == [((), {})] * 3


def test_nested_arguments_keep_their_form() -> None:
    pieces = split_microbatches([Pair([rows(2)], {"a": (rows(4), 1)})], {}, 2)
    first = pieces[0][0][0]
    assert isinstance(first, Pair)
    assert first.left[0].tolist() == [0.0]
    assert first.right["a"][0].tolist() == [0.0, 1.0]
    assert first.right["a"][1] == 1
    shared = split_microbatches([(rows(2), rows(1))], {}, 2, arg_specs=[REPLICATE])[1][0][0]
    assert shared[1].shape == (1,)


def test_arrays_are_split_as_tensors_are() -> None:
    pieces = split_microbatches([np.arange(4)], {}, 2)
    assert [args[0].tolist() for args, _ in pieces] == [[0, 1], [2, 3]]


def test_pieces_are_views_and_differentiable() -> None:
    x = rows(4).requires_grad_()
    pieces = split_microbatches([x], {}, 2)
    assert np.shares_memory(pieces[1][0][0].detach().numpy(), x.detach().numpy())
    assert pieces[1][0][0].requires_grad


def test_a_first_tensor_that_is_too_short_means_fewer_microbatches() -> None:
    with pytest.warns(UserWarning, match=r"into 4 microbatches: args\[1\] has 2 rows only, so there will be 2 microbatches"):
        pieces = split_microbatches([3, rows(2)], {"y": rows(5)}, 4)
    assert [(args[1].shape, kwargs["y"].shape) for args, kwargs in pieces] == [((1,), (3,)), ((1,), (2,))]
    with pytest.warns(UserWarning, match=r"kwargs\['y'\] has 1 rows"):
        assert len(split_microbatches([3], {"y": rows(1)}, 2)) == 1


def test_a_later_tensor_that_is_too_short_is_an_error() -> None:
    for args, kwargs in ([[rows(8), rows(3)], {}], [[rows(8)], {"y": rows(3)}]):
        with pytest.raises(MicrobatchError, match=r"into 4 microbatches: .* has 3 rows \(args\[0\] has 8\)") as caught:
            split_microbatches(args, kwargs, 4)
        assert isinstance(caught.value, RuntimeError)
    with pytest.raises(MicrobatchError, match="into 2 microbatches"), pytest.warns(UserWarning, match="only"):
        split_microbatches([rows(2), rows(1)], {}, 4)
    with pytest.raises(MicrobatchError, match="has 0 rows"):
        split_microbatches([rows(0)], {}, 2)


@pytest.mark.parametrize(
    ("args", "specs", "kind", "message"),
    [
        ([rows(2)], [None, None], ArgumentError, "the spec of args, which is a tuple of 1, is a tuple of 2"),
        ([[rows(2)]], [[None, None]], ArgumentError, r"the spec of args\[0\], which is a list of 1, is a list of 2"),
        ([{"a": rows(2)}], [{"b": None}], ArgumentError, r"a dict with the keys \['a'\], is a dict with the keys \['b'\]"),
        ([{"a": rows(2)}], [[None]], ArgumentError, "a dict .* is a list of 1"),
        ([rows(2)], [0], ArgumentTypeError, r"the spec of args\[0\] is 0; expected None, Split\(axis\), REPLICATE"),
        ([rows(2)], [Reduce(max, 0)], ArgumentTypeError, r"expected None, Split\(axis\), REPLICATE"),
        ([3], [Split()], ArgumentTypeError, "is a int; only Tensors"),
        ([rows(2)], [Split(1)], ArgumentError, r"has shape \[2\], so no axis 1"),
        ([ag.tensor(1.0)], None, ArgumentError, r"args\[0\] has shape \[\], so no axis 0. Add an axis, or give it REPLICATE"),
    ],
)
def test_specs_that_do_not_fit(args: Any, specs: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        split_microbatches(args, {}, 2, arg_specs=specs)


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "2"])
def test_numbers_of_microbatches_that_make_no_sense(count: Any) -> None:
    with pytest.raises(ArgumentError, match="expected a number of at least 1"):
        split_microbatches([rows(2)], {}, count)


# -------------------------------------------------------------------- merging


def test_splitting_and_merging() -> None:
    x, y = rows(7, 2), rows(9, 2)
    pieces = [args for args, _ in split_microbatches([x, {"y": [y, "text"]}, 3.5], {}, 3)]
    merged = merge_microbatches(pieces)
    assert np.array_equal(merged[0].numpy(), x.numpy())
    assert np.array_equal(merged[1]["y"][0].numpy(), y.numpy())
    assert (merged[1]["y"][1], merged[2]) == ("text", 3.5)
    assert isinstance(merged, tuple)


def test_merging_along_another_axis_and_by_form() -> None:
    pieces = [Pair(rows(2, 3), [rows(2)]) for _ in range(2)]
    merged = merge_microbatches(pieces, (Split(1), None))
    assert isinstance(merged, Pair)
    assert merged.left.shape == (2, 6)
    assert merged.right[0].shape == (4,)
    assert merge_microbatches([rows(2, 3), rows(1, 3)]).shape == (3, 3)
    single = rows(2)
    assert merge_microbatches([single]) is single


def test_folding_results() -> None:
    losses = [ag.tensor(float(i)) for i in range(4)]
    total = merge_microbatches([{"loss": loss, "count": 2} for loss in losses], {"loss": Reduce(lambda a, b: a * 2.0 + b, 1.0), "count": None})
    assert (total["loss"].item(), total["count"]) == ((((1 * 2 + 0) * 2 + 1) * 2 + 2) * 2 + 3, 2)
    assert merge_microbatches([1, 2, 3], Reduce(lambda a, b: [*a, b], [])) == [1, 2, 3]
    assert merge_microbatches([losses[0], losses[1]], REPLICATE) is losses[0]


def test_results_that_differ() -> None:
    nan = float("nan")
    assert merge_microbatches([(nan,), (float("nan"),)])[0] != 0.0
    for results, message in (
        ([1, 2], "the result is 1 in microbatch 0 and 2 in microbatch 1; what is no Tensor must be equal"),
        ([rows(2), 2], "a Tensor of shape .* and 2"),
        ([[1], [1, 2]], "a list of 1 in microbatch 0 and a list of 2"),
        ([{"a": 1}, {"b": 1}], r"keys \['a'\] .* keys \['b'\]"),
        ([{"a": 1}, [1]], "a dict .* a list of 1"),
        ([(1,), 1], "a tuple of 1"),
    ):
        with pytest.raises(MicrobatchError, match=message):
            merge_microbatches(results)
    with pytest.raises(ArgumentError, match="there are none"):
        merge_microbatches([])
    with pytest.raises(ArgumentError, match=r"no axis 0. Add an axis, or give it REPLICATE or Reduce"):
        merge_microbatches([ag.tensor(1.0), ag.tensor(2.0)])


def test_merging_is_differentiable() -> None:
    x = rows(4).requires_grad_()
    assert merge_microbatches([args[0] for args, _ in split_microbatches([x], {}, 2)]).requires_grad


# -------------------------------------------------------------------- a step's microbatches


def test_a_whole_batch_with_its_target() -> None:
    calls, targets = microbatches_of((rows(6), 3), {"k": rows(3)}, rows(6), 3)
    assert [(args[0].shape, args[1], kwargs["k"].shape) for args, kwargs in calls] == [((2,), 3, (1,))] * 3
    assert [target.shape for target in targets or ()] == [(2,)] * 3
    assert microbatches_of((), {}, None, 2) == ([((), {})] * 2, None)
    calls, targets = microbatches_of((rows(4),), {}, {"y": rows(4), "n": 1}, 2)
    assert [(target["y"].shape, target["n"]) for target in targets or ()] == [((2,), 1)] * 2


@pytest.mark.parametrize(
    ("args", "kwargs", "target", "message"),
    [
        ((rows(8),), {}, rows(6), r"the target has 6 rows and args\[0\] has 8.*pass arg_mbs and target_mbs"),
        ((rows(8),), {}, rows(4), r"the target has 4 rows"),
        ((rows(8),), {}, {"a": rows(8), "b": rows(16)}, r"the target\['b'\] has 16 rows"),
        ((rows(8),), {"k": rows(6)}, None, r"kwargs\['k'\] has 6 rows and args\[0\] has 8"),
        ((rows(7), rows(4)), {}, None, r"args\[0\] has 7 rows and args\[1\] has 4"),
    ],
)
def test_rows_that_do_not_go_together_are_refused(args: Any, kwargs: Any, target: Any, message: str) -> None:
    with pytest.raises(MicrobatchError, match=message):
        microbatches_of(args, kwargs, target, 4)


def test_there_are_exactly_as_many_as_the_schedule_has() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for args, target in (((rows(2),), None), ((rows(4),), rows(2))):
            with pytest.raises(MicrobatchError, match="has 2 rows"):
                microbatches_of(args, {}, target, 4)


def test_batches_that_come_in_pieces() -> None:
    x = rows(2)
    given = [{"k": 1}, {"k": 2}]
    calls, targets = microbatches_of((), {}, None, 2, arg_mbs=[(x,), (x, 3)], kwarg_mbs=given, target_mbs=["a", None])
    assert calls == [((x,), {"k": 1}), ((x, 3), {"k": 2})]
    assert targets == ["a", None]
    assert calls[0][1] is not given[0]
    assert microbatches_of((), {}, None, 2, arg_mbs=[(x,), (x,)]) == ([((x,), {})] * 2, None)
    assert microbatches_of((), {}, None, 2, kwarg_mbs=given) == ([((), given[0]), ((), given[1])], None)
    assert microbatches_of((), {}, None, 2, target_mbs=[1, 2]) == ([((), {})] * 2, [1, 2])


X = rows(4)


@pytest.mark.parametrize(
    ("whole", "given", "kind", "message"),
    [
        (((X,), {}, None), {"arg_mbs": [(X,)] * 2}, ArgumentError, "arg_mbs cannot be combined with positional arguments"),
        (((), {"k": X}, None), {"kwarg_mbs": [{}] * 2}, ArgumentError, "kwarg_mbs cannot be combined with keyword arguments"),
        (((), {}, X), {"target_mbs": [X] * 2}, ArgumentError, "target_mbs cannot be combined with a target"),
        (((), {"k": X}, None), {"arg_mbs": [(X,)] * 2}, ArgumentError, "split all of them, or none"),
        (((X,), {}, None), {"kwarg_mbs": [{}] * 2}, ArgumentError, "split all of them, or none"),
        (((), {}, X), {"arg_mbs": [(X,)] * 2}, ArgumentError, "the target is not: pass target_mbs"),
        (((X,), {}, None), {"target_mbs": [X] * 2}, ArgumentError, "the arguments are not: pass arg_mbs"),
        (((), {}, None), {"arg_mbs": ((X,),) * 2}, ArgumentTypeError, "arg_mbs is a tuple; expected a list with a tuple of positional arguments"),
        (((), {}, None), {"arg_mbs": X}, ArgumentTypeError, "arg_mbs is a Tensor"),
        (((), {}, None), {"kwarg_mbs": {"k": X}}, ArgumentTypeError, "kwarg_mbs is a dict; expected a list with a dict"),
        (((), {}, None), {"target_mbs": X}, ArgumentTypeError, "target_mbs is a Tensor; expected a list with a target"),
        (((), {}, None), {"arg_mbs": [(X,), X]}, ArgumentTypeError, r"arg_mbs\[1\] is a Tensor; expected a tuple"),
        (((), {}, None), {"kwarg_mbs": [{}, (X,)]}, ArgumentTypeError, r"kwarg_mbs\[1\] is a tuple; expected a dict"),
        (((), {}, None), {"arg_mbs": [(X,)]}, ArgumentError, "arg_mbs has 1 entries; expected one for each of the 2"),
        (((), {}, None), {"arg_mbs": []}, ArgumentError, "arg_mbs has 0 entries"),
        (((), {}, None), {"kwarg_mbs": [{}] * 3}, ArgumentError, "kwarg_mbs has 3 entries"),
        (((), {}, None), {"target_mbs": [X]}, ArgumentError, "target_mbs has 1 entries"),
    ],
)
def test_batches_that_come_in_the_wrong_pieces(whole: Any, given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        microbatches_of(*whole, 2, **given)
    assert isinstance(caught.value, TypeError) == (kind is ArgumentTypeError)


def test_what_cannot_be_split_or_folded_is_refused() -> None:
    for args, kwargs in ((ag.ones(4, 2), None), (None, None), ((ag.ones(4),), 5)):
        assert_raises(ArgumentTypeError, "expected a tuple of arguments", split_microbatches, args, kwargs, 2)
    assert_raises(ArgumentTypeError, "arg_specs is a Split", split_microbatches, (ag.ones(4),), None, 2, arg_specs=Split(0))
    assert_raises(ArgumentTypeError, "kwarg_specs is a int", split_microbatches, (), {"x": ag.ones(4)}, 2, kwarg_specs=5)
    assert_raises(ArgumentTypeError, r"Split\(axis='a'\)", Split, "a")
    assert_raises(ArgumentTypeError, "a function of two results", Reduce, 5, 0)
