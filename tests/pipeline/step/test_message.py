"""Messages between stages are cut out of the graph, and fit together again on the other side."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, ModifiedError
from aiograd.pipeline.step.message import StageMessage, check_gradients, pack, tensors_of, unpack

Point = collections.namedtuple("Point", "x y")


def test_cut_and_joined() -> None:
    weight = ag.tensor([2.0, 3.0], requires_grad=True)
    y, plain, whole = weight * 2, ag.tensor([1.0]), ag.arange(3)
    message, edges = pack((y, {"a": [y, plain], "b": Point(whole, None)}, "text"))
    assert message.wants == (True, False, False) and edges == [(y._node, y._nr)]
    assert [tensor.requires_grad for tensor in tensors_of(message)] == [False] * 3 and tensors_of(message)[0]._data is y._data
    (first, rest, text), leaves = unpack(message)
    assert text == "text" and rest["b"].y is None and isinstance(rest["b"], Point)
    assert first is rest["a"][0] and leaves == [first] and first.is_leaf and first.requires_grad
    assert not rest["a"][1].requires_grad and rest["b"].x.dtype == whole.dtype
    assert unpack(pack(None)[0]) == ((None,), []) and unpack(pack(())[0]) == ((), [])


async def test_changes_on_either_side_are_noticed() -> None:
    weight = ag.tensor([2.0, 3.0], requires_grad=True)
    y = weight.exp()  # saves its output
    message, _ = pack(y)
    with ag.no_grad():
        tensors_of(message)[0].add_(1)
    with pytest.raises(ModifiedError):
        await y.sum().backward()


def test_leaves_and_parameters_go_through() -> None:
    parameter = ag.nn.Parameter(ag.tensor([1.0]))
    message, edges = pack(parameter)
    assert edges == [(parameter._node, 0)] and type(message.values) is ag.Tensor
    (arrived,), leaves = unpack(message)
    assert arrived is leaves[0] and arrived._node is not parameter._node


def test_messages_that_do_not_fit_themselves() -> None:
    x = ag.tensor([1.0])
    for message in (StageMessage(x, ()), StageMessage(x, (True, True)), StageMessage((x, ag.tensor([2.0])), (False,))):
        with pytest.raises(ArgumentError, match="says something about|that it says"):
            unpack(message)
    with pytest.raises(ArgumentTypeError):
        unpack(StageMessage(ag.arange(2), (True,)))  # integers want no gradient


def test_gradients_that_do_not_fit() -> None:
    x: Any = ag.tensor(np.zeros(2, np.float32))
    assert check_gradients((x, None), 2) == [x, None]
    for wrong, error in (([x], ArgumentError), (x, ArgumentTypeError), ([x, 3], ArgumentTypeError), (None, ArgumentTypeError)):
        with pytest.raises(error):
            check_gradients(wrong, 2)
