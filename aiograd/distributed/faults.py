"""Errors on their way between workers: an exception becomes a value that may cross, and an exception again on the other side.

aiograd's own distributed errors travel by a word from a closed table and come out as the class they went in as, with their attributes.
Anything else comes out as `RemoteError`. No class is ever looked up by a name that a peer sent.

Note [What crosses]
    The kind of failure, the worker and function where it happened, the exception's type name, and the first line of its message without
    file paths, cut to `TEXT` characters; a correlation id under which the worker's own log has the traceback. Never a traceback, a note
    or a cause. The text of an error that is none of ours begins with function and type. An error that passes on through further workers
    keeps all of this; only its text gains a prefix per worker, and its `path` a name.

Note [What a peer may send]
    A peer is authenticated but not trusted: words that are not in the table, values of the wrong type and missing parts give a
    `ProtocolError` that says so, and texts are cut and stripped of control characters before they reach a log or a terminal.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiograd.errors import (
    AddressError,
    AuthenticationError,
    CertificateError,
    ClusterError,
    CommitUnknown,
    ContextError,
    ContextNotFoundError,
    ContextReleasedError,
    DeadlineError,
    DistributedError,
    ExpertLostError,
    HostRefusedError,
    LimitError,
    NameTakenError,
    NoContextError,
    NotExposedError,
    Overloaded,
    PassAbortedError,
    ProtocolError,
    ReferenceLostError,
    RemoteError,
    StepError,
    UnknownPeerError,
    VersionMismatch,
    WorkerLostError,
)

logger = logging.getLogger("aiograd.distributed")

#: characters of an error's message that cross
TEXT = 500
#: characters of a name: of a worker, a function, a type
NAME = 200
#: names in `path` that are believed; a longer chain of calls is cut at its far end
HOPS = 64
#: function, type and a prefix of each worker are put before the text, so what comes in may be longer than what was raised
RECEIVED_TEXT = TEXT + 2 * NAME + HOPS * (NAME + 20)


class _Form(NamedTuple):
    """How one class travels: the word for it, and its attributes with their types."""

    error: type[DistributedError]
    attributes: Mapping[str, type]


_FORMS: dict[str, _Form] = {
    "distributed": _Form(DistributedError, {}),
    "lost": _Form(WorkerLostError, {"worker": str, "stage": str, "is_gone": bool}),
    "unknown_peer": _Form(UnknownPeerError, {}),
    "deadline": _Form(DeadlineError, {}),
    "cluster": _Form(ClusterError, {}),
    "name_taken": _Form(NameTakenError, {}),
    "remote": _Form(RemoteError, {}),
    "aborted": _Form(PassAbortedError, {}),
    "commit_unknown": _Form(CommitUnknown, {"workers": tuple}),
    "context": _Form(ContextError, {}),
    "no_context": _Form(NoContextError, {}),
    "context_not_found": _Form(ContextNotFoundError, {}),
    "context_released": _Form(ContextReleasedError, {}),
    "step": _Form(StepError, {"step": int, "applied": tuple, "failed": tuple}),
    "expert": _Form(ExpertLostError, {"sample": int, "position": int}),
    "reference_lost": _Form(ReferenceLostError, {}),
    "not_exposed": _Form(NotExposedError, {}),
    "overloaded": _Form(Overloaded, {"retry_after": float}),
    "limit": _Form(LimitError, {}),
    "authentication": _Form(AuthenticationError, {}),
    "certificate": _Form(CertificateError, {"is_certain": bool}),
    "address": _Form(AddressError, {}),
    "host": _Form(HostRefusedError, {}),
    "protocol": _Form(ProtocolError, {"code": str}),
    "version": _Form(VersionMismatch, {"code": str}),
}
_WORDS = {form.error: word for word, form in _FORMS.items()}

#: absolute paths, those from ~ . or .., Windows drives and shares. A slash inside a word ("and/or", "1/2") or after a colon (a URL) is none.
_START = r"(?:[A-Za-z]:[\\/]|\\\\|~[\w.-]*[\\/]|\.{1,2}[\\/]|/)"
_PATH = re.compile(rf"""(?<![\w/\\.:~)\]]){_START}[^\s'"`<>|;,()\[\]{{}}]+""")
#: in quotes a path may have spaces
_QUOTED_PATH = re.compile(rf"""(['"`]){_START}[^'"`]+\1""")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: lone surrogates cannot be sent as text
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def to_wire(error: BaseException, worker: str, function: str, correlation_id: str) -> dict[str, Any]:
    """What of `error` may cross to the peer that asked, and a line with the traceback in the log of this worker.

    Args:
        error: what a handler raised.
        worker: the name of this worker.
        function: the exposed function, the node of the graph or the kind of request that raised it.
        correlation_id: a fresh word to find the log's line by.

    Returns:
        A value that `encode` takes and `from_wire` turns back into an exception.
    """
    word, form = _form_of(error)
    path = error.path if isinstance(error, DistributedError) else ()
    value: dict[str, Any] = {
        "error": word,
        "type": _clean(type(error).__name__, NAME),
        "text": _text(error) or _clean(type(error).__name__, NAME),
        "worker": worker,
        "function": _clean(str(getattr(error, "_aiograd_function", function)), NAME),  # of a backward pass: the node that raised it
        "id": correlation_id,
        "code": "cancelled" if type(error).__name__ == "CancelledError" else "raised",
        "path": list(path),
    }
    if isinstance(error, DistributedError) and (path or isinstance(error, RemoteError)):  # it comes from further away: see Note [What crosses]
        value["id"] = error.correlation_id or correlation_id
    if isinstance(error, RemoteError):
        origin = {"worker": error.worker, "function": error.function, "code": error.code, "type": error.type_name}
        value.update((part, _clean(str(known), NAME)) for part, known in origin.items() if known)
    elif form.error is RemoteError:
        told = value["type"] if value["text"] == value["type"] else f"{value['type']}: {value['text']}"  # an error may have no text but its type
        value["text"] = f"{value['function']}: {told}"
    if getattr(error, "committed", False) is True:  # also of an error of a user's hook
        value["committed"] = True
    for name, kind in form.attributes.items():
        value["." + name] = _plain(getattr(error, name), kind)
    expected = isinstance(error, DistributedError)
    level = logging.DEBUG if expected else logging.WARNING
    if logger.isEnabledFor(level):
        story = "".join(traceback.format_exception(error)).rstrip().encode("utf-8", "replace").decode()  # a text may hold what no stream takes
        logger.log(level, "%s: %s raised %s for a peer (correlation id %s)\n%s", worker, function, value["type"], value["id"], story)
    return value


def from_wire(value: Any, peer: str) -> BaseException:
    """The exception that `peer` sent, one hop further: its text gains a prefix and its `path` the peer's name.

    Args:
        value: what `to_wire` made over there, decoded; nothing about it is believed.
        peer: the name of the worker that sent it.

    Returns:
        An exception to raise. A `ProtocolError` where `value` makes no sense.
    """
    prefix = f"Error on Node {peer}: "
    try:
        return _rebuild(value, peer, prefix)
    except _NonsenseError as nonsense:
        return ProtocolError(f"{prefix}it answered with an error that makes no sense: {nonsense}", code="failure")


class _NonsenseError(Exception):
    """Part of a received error is missing or of the wrong type."""


def _rebuild(value: Any, peer: str, prefix: str) -> DistributedError:
    if type(value) is not dict:
        raise _NonsenseError(f"expected a dict, found {type(value).__name__}")
    word = _part(value, "error", str)
    form = _FORMS.get(word)
    if form is None:
        raise _NonsenseError(f"unknown kind {_clean(word, NAME)!r}")
    text = prefix + _clean(_part(value, "text", str), RECEIVED_TEXT)
    path = (peer, *(_clean(name, NAME) for name in _names(value, "path")[: HOPS - 1]))
    correlation_id = _name(value, "id")
    error: DistributedError
    if form.error is RemoteError:
        error = RemoteError(
            text, worker=_name(value, "worker"), function=_name(value, "function"), code=_name(value, "code"), type_name=_name(value, "type")
        )
    else:
        error = form.error(text, **{name: _attribute(value, "." + name, kind) for name, kind in form.attributes.items()})
    error.path, error.correlation_id = path, correlation_id
    if value.get("committed") is True:
        error.committed = True
    return error


def _form_of(error: BaseException) -> tuple[str, _Form]:
    if isinstance(error, DistributedError):
        for cls in type(error).__mro__:
            word = _WORDS.get(cls)
            if word is not None:
                return word, _FORMS[word]
    return "remote", _FORMS["remote"]


def _text(error: BaseException) -> str:
    """The first line of the message, without paths."""
    if isinstance(error, OSError) and error.filename is not None:  # its message ends with the file's name, whatever that looks like
        message = f"[Errno {error.errno}] {error.strerror}"
    else:
        try:
            message = str(error)
        except Exception as broken:  # a user's class may have a __str__ that fails
            message = f"(its message could not be made: {type(broken).__name__})"
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    limit = RECEIVED_TEXT - NAME if isinstance(error, DistributedError) and error.path else TEXT  # prefixes were added on the way
    return _clean(_PATH.sub("<path>", _QUOTED_PATH.sub(r"\1<path>\1", line[: 4 * limit])), limit)


def _plain(attribute: Any, kind: type) -> Any:
    """An attribute as a value that may cross."""
    if kind is tuple:
        return [_clean(str(each), NAME) for each in attribute]
    return _clean(attribute, NAME) if kind is str else kind(attribute)


def _clean(text: str, limit: int) -> str:
    text = _CONTROL.sub(" ", _SURROGATE.sub("?", text[: limit + 1]))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _part(value: dict[str, Any], name: str, kind: type) -> Any:
    part = value.get(name)
    if type(part) is not kind:
        raise _NonsenseError(f"{name!r} is {type(part).__name__}, expected {kind.__name__}")
    return part


def _name(value: dict[str, Any], name: str) -> str:
    return _clean(_part(value, name, str), NAME)


def _names(value: dict[str, Any], name: str) -> list[str]:
    names: list[str] = _part(value, name, list)
    if any(type(each) is not str for each in names):
        raise _NonsenseError(f"{name!r} holds something that is not text")
    return names


def _attribute(value: dict[str, Any], name: str, kind: type) -> Any:
    if kind is tuple:
        return tuple(_clean(each, NAME) for each in _names(value, name)[:1024])
    if kind is str:
        return _name(value, name)
    if kind is int or kind is bool:
        return _part(value, name, kind)
    number: Any = value.get(name)
    if type(number) not in (int, float) or not 0 <= number < float("inf"):
        raise _NonsenseError(f"{name!r} is not a number of at least 0")
    return float(number)
