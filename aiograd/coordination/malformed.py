"""The error of a value that is no message: it names message, field and bound. Pure."""

from __future__ import annotations

from typing import Protocol

from aiograd.errors import ProtocolError


class NamedForm(Protocol):
    """The part of a `MessageForm` that errors use."""

    name: str
    code: str


def malformed(form: NamedForm, found: str, expected: str, field: str = "", *, peer: str = "", is_answer: bool = False) -> ProtocolError:
    """The error for a value from a peer.

    Args:
        form: of the message.
        found: the value, in words; see `message_code.shown`.
        expected: the type or bound, in words.
        field: the path of the field; "": the whole message.
        peer: name of the worker that has sent it; "": the error does not name it.
        is_answer: True if the value is an answer to the message.

    Returns:
        The error, to be raised.
    """
    what = f"worker {peer} gave a malformed answer to {form.name}" if is_answer else f"{peer and f'worker {peer} sent '}a malformed {form.name}"
    return ProtocolError(f"{what}: {f'field {field} is ' if field else 'it is '}{found}; expected {expected}", code=form.code)
