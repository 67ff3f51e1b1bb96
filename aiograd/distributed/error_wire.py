"""Serialization of errors: an exception becomes a value that may be sent to a peer, and an exception again there.

aiograd's own distributed errors are sent as a word from a closed table and become the same class again, with their attributes; a
`PipelineError` becomes a `RemotePipelineError`. Any other exception becomes a `RemoteError`. No class is ever looked up by a name that a peer
sent.

Note [Contents of an error message]
    Sent are the kind of failure, the worker and function where it happened, the exception's type name, the first line of its message without
    file paths, cut to `TEXT` characters, and a correlation id by which the worker's own log has the traceback. A traceback, a note
    or a cause is never sent. The text of an exception that is not aiograd's begins with function and type. An error that is forwarded by
    further workers keeps all of this; its text gains a prefix per worker, and its `path` a name.

Note [Errors of untrusted peers]
    A peer is authenticated but not trusted: words that are not in the table, values of the wrong type or out of range and missing parts
    raise a `ProtocolError`, and texts are cut and stripped of control characters before they reach a log or a terminal.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from aiograd.errors import (
    AddressError,
    AuthenticationError,
    CertificateError,
    ClusterError,
    CollectiveError,
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
    PipelineError,
    ProtocolError,
    QuorumError,
    ReferenceLostError,
    RemoteError,
    RemotePipelineError,
    StepError,
    UnknownPeerError,
    VersionMismatch,
    WorkerLostError,
)
from aiograd.running.log_fields import structured_logger

logger = structured_logger("aiograd.distributed")

#: the largest number of characters of an error's message that are sent
TEXT = 500
#: the largest number of characters of a name: of a worker, a function, a type
NAME = 200
#: the largest number of names in `path`; a longer chain of calls is cut at its far end
HOPS = 64
#: the largest length of a received text: function, type and a prefix per worker are put before the original one
RECEIVED_TEXT = TEXT + 2 * NAME + HOPS * (NAME + 20)


#: the accepted indexes of stages, microbatches and ranks
INDEXES: Final = range(10**9)


class _Index:
    """The type of an attribute that is one of `INDEXES`, or None."""


class _Action:
    """The type of an attribute that is the text of an action of a pipeline schedule, or empty."""


class _Form(NamedTuple):
    """The wire form of one class: the word for it, and its attributes with their types."""

    error: type[DistributedError]
    attributes: Mapping[str, type]


_FORMS: dict[str, _Form] = {
    "distributed": _Form(DistributedError, {}),
    "lost": _Form(WorkerLostError, {"worker": str, "stage": str, "is_gone": bool}),
    "unknown_peer": _Form(UnknownPeerError, {}),
    "deadline": _Form(DeadlineError, {}),
    "cluster": _Form(ClusterError, {}),
    "name_taken": _Form(NameTakenError, {}),
    "collective": _Form(CollectiveError, {"worker": str}),
    "remote": _Form(RemoteError, {}),
    "pipeline": _Form(RemotePipelineError, {"stage": _Index, "microbatch": _Index, "action": _Action, "rank": _Index}),
    "quorum": _Form(QuorumError, {"lost": tuple}),
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
_WORDS: dict[type[BaseException], str] = {PipelineError: "pipeline"} | {form.error: word for word, form in _FORMS.items()}

#: absolute paths, those from ~ . or .., Windows drives and shares. A slash inside a word ("and/or", "1/2") or after a colon (a URL) is none.
_START = r"(?:[A-Za-z]:[\\/]|\\\\|~[\w.-]*[\\/]|\.{1,2}[\\/]|/)"
_PATH = re.compile(rf"""(?<![\w/\\.:~)\]]){_START}[^\s'"`<>|;,()\[\]{{}}]+""")
#: in quotes a path may have spaces
_QUOTED_PATH = re.compile(rf"""(['"`]){_START}[^'"`]+\1""")
_ACTION = re.compile(r"[0-9A-Z_();]{0,80}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: lone surrogates cannot be sent as text
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def to_wire(error: BaseException, worker: str, function: str, correlation_id: str) -> dict[str, Any]:
    """The wire form of `error` for the peer that made the request; also writes the traceback to this worker's log.

    Args:
        error: the exception of a handler.
        worker: the name of this worker.
        function: the exposed function, the node of the graph or the kind of request that raised it.
        correlation_id: a fresh id that the log line contains.

    Returns:
        A value that `encode` takes and `from_wire` turns back into an exception.
    """
    word, form = _form_of(error)
    is_cancelled = type(error).__name__ == "CancelledError"
    path = error.path if isinstance(error, DistributedError) else ()
    value: dict[str, Any] = {
        "error": word,
        "type": _clean(type(error).__name__, NAME),
        "text": _text(error) or _clean(type(error).__name__, NAME),
        "worker": worker,
        "function": _clean(str(getattr(error, "_aiograd_function", function)), NAME),  # of a backward pass: the node that raised it
        "id": correlation_id,
        "code": "cancelled" if is_cancelled else "raised",
        "path": list(path),
    }
    if isinstance(error, DistributedError) and (path or isinstance(error, RemoteError)):  # it was forwarded: see Note [Contents of an error message]
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
    expected = is_cancelled or isinstance(error, DistributedError)  # an abandoned pass cancels its calls
    level = logging.DEBUG if expected else logging.WARNING
    if logger.isEnabledFor(level):
        story = "".join(traceback.format_exception(error)).rstrip().encode("utf-8", "replace").decode()  # a text may hold what no stream takes
        what = "%s: %s raised %s for a peer (correlation id %s)\n%s"
        logger.log(level, what, worker, function, value["type"], value["id"], story, extra={"worker": worker})
    return value


def from_wire(value: Any, peer: str) -> BaseException:
    """The exception that `peer` sent; its text gains a prefix and its `path` the peer's name.

    Args:
        value: the decoded result of `to_wire` on the peer; it is not trusted.
        peer: the name of the worker that sent it.

    Returns:
        An exception to raise; a `ProtocolError` if `value` is malformed.
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
    attributes = {name: _attribute(value, "." + name, kind) for name, kind in form.attributes.items()}
    if issubclass(form.error, RemoteError):
        attributes |= {"type_name": _name(value, "type")} | {name: _name(value, name) for name in ("worker", "function", "code")}
    error = form.error(text, **attributes)
    error.path, error.correlation_id = path, correlation_id
    if value.get("committed") is True:
        error.committed = True
    return error


def _form_of(error: BaseException) -> tuple[str, _Form]:
    word = next((_WORDS[cls] for cls in type(error).__mro__ if cls in _WORDS), "remote")
    return word, _FORMS[word]


def _text(error: BaseException) -> str:
    """The first line of the message, without paths."""
    if isinstance(error, OSError) and error.filename is not None:  # its message ends with the file's name
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
    """An attribute as a value that may be sent."""
    if kind is _Index:
        return attribute if type(attribute) is int and attribute in INDEXES else None
    if kind is _Action:
        return attribute if type(attribute) is str and _ACTION.fullmatch(attribute) else ""
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
    if kind is _Index:
        index = None if value.get(name, ...) is None else _part(value, name, int)
        if index is not None and index not in INDEXES:
            raise _NonsenseError(f"{name!r} is out of range")
        return index
    if kind is _Action:
        action = _part(value, name, str)
        if not _ACTION.fullmatch(action):
            raise _NonsenseError(f"{name!r} is no action of a pipeline schedule")
        return action
    if kind is int or kind is bool:
        return _part(value, name, kind)
    number: Any = value.get(name)
    if type(number) not in (int, float) or not 0 <= number < float("inf"):
        raise _NonsenseError(f"{name!r} is not a number of at least 0")
    return float(number)
