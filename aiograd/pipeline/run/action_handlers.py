"""ActionHandlers: functions of the user that carry out actions in place of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline.schedule.action import Action, ActionKind

#: action kinds that can have a handler: computations and actions on parameters
HANDLED = tuple(kind for kind in ActionKind if not (kind.is_send or kind.is_receive))


class ActionHandlers(dict[ActionKind, Callable[[Action], Any]]):
    """The handlers by the kind of action."""

    def register(self, kind: ActionKind, handler: Callable[[Action], Any]) -> None:
        """Add a handler; see `Pipeline.register_action`."""
        if kind not in HANDLED:
            allowed = ", ".join(each.value for each in HANDLED)
            raise ArgumentError(f"register_action({kind}): the pipeline itself moves values between ranks; expected one of {allowed}")
        if not callable(handler):
            raise ArgumentTypeError(f"register_action({kind}): expected a function, found {type(handler).__name__}")
        self[kind] = handler
