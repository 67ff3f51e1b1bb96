"""MessageTable and REQUESTS: all requests by kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiograd.coordination.message_code import shown
from aiograd.coordination.message_form import WireMessage, parse
from aiograd.distributed.failpoints import RequestPoints
from aiograd.distributed.messages.calls import AskWaits, FunctionCall, Post, Relay
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
from aiograd.errors import ProtocolError


class MessageTable:
    """Requests by kind and word.

    Args:
        *requests: their classes.
    """

    def __init__(self, *requests: type[WireMessage]) -> None:
        #: kind -> word -> class
        self.kinds: Mapping[int, Mapping[str, type[WireMessage]]] = {}
        by_kind: dict[int, dict[str, type[WireMessage]]] = {}
        for request in requests:
            form = request.form
            words = by_kind.setdefault(form.kind, {})
            if form.word in words or (words and "" in (form.word, *words)):
                raise TypeError(f"messages: two requests {form.name} of kind {int(form.kind)}")
            words[form.word] = request
        self.kinds = by_kind
        #: by kind, where there are any
        self.failpoints: Mapping[int, RequestPoints] = {
            each.form.kind: RequestPoints(*each.form.failpoints) for each in requests if any(each.form.failpoints)
        }

    def name_of(self, kind: int) -> str:
        """The name of a kind in errors.

        Args:
            kind: any number.

        Returns:
            The name in lower case, or ``kind 99``.
        """
        words = self.kinds.get(kind)
        return f"kind {kind}" if words is None else next(iter(words.values())).form.kind.name.lower()

    def parse(self, kind: int, value: Any) -> WireMessage:
        """The request of a wire value.

        Args:
            kind: of the request.
            value: from a peer.

        Returns:
            The message.

        Raises:
            ProtocolError: as for `parse`; or there is no such kind, or no such word.
        """
        words = self.kinds.get(kind)
        if words is None:
            raise ProtocolError(f"a request of unknown kind {kind}", code="kind")
        request = words.get("")
        if request is not None:
            return parse(request, value)
        word = value[0] if value.__class__ is tuple and value else None
        request = words.get(word) if word.__class__ is str else None
        if request is None:
            first = next(iter(words.values()))
            found = shown(word) if value.__class__ is tuple and value else shown(value)
            text = f"a malformed {first.form.kind.name}: its first value is {found}; expected one of {', '.join(words)}"
            raise ProtocolError(text, code=first.form.code)
        return parse(request, value[1:])


REQUESTS: Final = MessageTable(
    FunctionCall, Mark, Gradient, Commit, Abort, PassOutcome, Release, Renew, Relay, Post, AskWaits,
    GroupJoin, GroupWithdraw, GroupPiece, Vote, GroupOutcome, GroupLeave, GroupLeft, GroupFail,
)  # fmt: skip
