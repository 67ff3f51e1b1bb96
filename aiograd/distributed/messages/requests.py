"""The table of all requests by kind."""

from __future__ import annotations

from typing import Final

from aiograd.distributed.messages.calls import FunctionCall, Post, Relay
from aiograd.distributed.messages.form import MessageTable
from aiograd.distributed.messages.groups import (
    GroupFail,
    GroupJoin,
    GroupLeave,
    GroupLeft,
    GroupOutcome,
    GroupPiece,
    GroupWithdraw,
    Vote,
)
from aiograd.distributed.messages.passes import Abort, Commit, Gradient, Mark, PassOutcome, Release, Renew

REQUESTS: Final = MessageTable(
    FunctionCall, Mark, Gradient, Commit, Abort, PassOutcome, Release, Renew, Relay, Post,
    GroupJoin, GroupWithdraw, GroupPiece, Vote, GroupOutcome, GroupLeave, GroupLeft, GroupFail,
)  # fmt: skip
