"""Statements that are no rows: draws of random numbers, effects, and calls that a program makes again with its own Tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiograd.ops.op import Op
from aiograd.running.random_streams import Draws, Replay
from aiograd.running.trees import map_tree

#: of an Op for a statement that is no row
_NO_ROW: dict[str, Any] = {"outputs": 1, "differentiable_outputs": (), "view": False, "complex": "real", "cost": 1.0, "fused": None}


def statement_op(name: str, forward: Callable[..., Any]) -> Op:
    """The row of a statement that is none of the tables: a draw of random numbers, an effect."""
    return Op("".join([letter if letter.isalnum() else "_" for letter in name]), forward, {}, {}, **_NO_ROW)


class DrawOp(Op):
    """A draw of random numbers.

    Args:
        name: of the method that draws.
        forward: draws the next numbers, as an array.
    """

    __slots__ = ()

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        super().__init__(name, forward, {}, {}, **_NO_ROW)


def drawn_again(draw: Callable[[], Any], draws: Draws) -> Any:
    """The numbers of a draw once more, from the states that were noted."""
    with Replay(draws).playing():
        return draw()


class CalledOp(Op):
    """A call with Tensors that a program makes between its numeric parts and that is no row: an optimizer's step, a backward pass.

    Args:
        name: for people.
        repeated: the call that is made; its `again` takes Tensors and returns None, or a result that contains the statement's outputs.
        is_awaited: True if it returns a coroutine.
    """

    __slots__ = ("is_awaited", "repeated")

    def __init__(self, name: str, repeated: RepeatedCall, *, is_awaited: bool) -> None:
        super().__init__(name, lambda *tensors: repeated.again(*tensors), {}, {}, **_NO_ROW)
        self.is_awaited = is_awaited
        self.repeated = repeated


@dataclass(frozen=True, slots=True)
class RepeatedCall:
    """A call that was recorded, to be made at every run.

    Attributes:
        function: the function to call.
        args, kwargs: its arguments, with an `ArgumentPlace` for each Tensor that the statement takes.
        again: takes these Tensors and makes the call.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    again: Callable[..., Any]


class ArgumentPlace:
    """Stands for a Tensor among the arguments of a call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def caller(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """A function of Tensors that calls `function` with them in their places among arguments."""

    def again(*tensors: Any) -> Any:
        filled, named = map_tree(lambda place: tensors[place.index], (args, kwargs), ArgumentPlace)
        return function(*filled, **named)

    def flat(*tensors: Any) -> Any:
        filled = [*args]
        for i, index in places:
            filled[i] = tensors[index]
        return function(*filled, **kwargs)

    has_trees = any(isinstance(each, (tuple, list, dict, slice)) for each in (*args, *kwargs.values()))
    if has_trees or any(isinstance(each, ArgumentPlace) for each in kwargs.values()):
        return again
    places = [(i, each.index) for i, each in enumerate(args) if isinstance(each, ArgumentPlace)]
    return flat
