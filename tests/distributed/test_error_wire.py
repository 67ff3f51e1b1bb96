"""Errors between workers: what crosses, what comes out, and what a peer cannot do with them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from aiograd import errors
from aiograd.distributed.error_wire import HOPS, TEXT, from_wire, to_wire
from aiograd.distributed.rpc.codec import decode, encode
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import (
    CommitUnknown,
    ContextNotFoundError,
    DistributedError,
    GraphError,
    Overloaded,
    PipelineError,
    ProtocolError,
    RemoteError,
    RemotePipelineError,
    StepError,
    WorkerLostError,
)

LIMITS = Limits()


def cross(error: BaseException, worker: str = "w1", function: str = "f", correlation_id: str = "c0ffee") -> BaseException:
    """One hop, through the codec, from `worker`."""
    message = bytearray().join(encode(to_wire(error, worker, function, correlation_id), LIMITS))
    return from_wire(decode(message, LIMITS), worker)


def distributed_errors() -> list[type[DistributedError]]:
    found, stack = [], [DistributedError]
    while stack:
        cls = stack.pop()
        found.append(cls)
        stack += cls.__subclasses__()
    return sorted((cls for cls in found if cls.__module__ == errors.__name__), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", distributed_errors())
def test_every_distributed_error_comes_out_as_its_class(cls: type[DistributedError]) -> None:
    error = cross(cls("the matter"))
    assert type(error) is cls
    assert str(error) == "Error on Node w1: the matter"
    assert error.path == ("w1",)
    assert error.correlation_id == "c0ffee"


def test_attributes_cross() -> None:
    lost = cross(WorkerLostError("gone", worker="w7", stage="CALL", is_gone=True))
    assert isinstance(lost, WorkerLostError)
    assert (lost.worker, lost.stage, lost.is_gone) == ("w7", "CALL", True)
    step = cross(StepError("half", step=7, applied=("w1",), failed=("w2", "w3")))
    assert isinstance(step, StepError)
    assert (step.step, step.applied, step.failed) == (7, ("w1",), ("w2", "w3"))
    unknown = cross(CommitUnknown("?", workers=("w2", "w3")))
    assert isinstance(unknown, CommitUnknown)
    assert unknown.workers == ("w2", "w3")
    full = cross(Overloaded("full", retry_after=2))
    assert isinstance(full, Overloaded)
    assert full.retry_after == 2.0
    broken = cross(ProtocolError("bad", code="crc"))
    assert isinstance(broken, ProtocolError)
    assert broken.code == "crc"
    done = RemoteError("hook failed")
    done.committed = True
    assert cross(done).committed  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields", [{"stage": 1, "microbatch": 3, "action": "1F3", "rank": 0}, {"stage": 2, "action": "2UNSHARD", "rank": 10**9 - 1}, {}]
)
def test_a_stage_that_failed_crosses_with_its_fields(fields: dict[str, Any]) -> None:
    near = cross(PipelineError("failed", **fields), "w2", "run")
    far = cross(near, "w1", "relay", "f00")
    for error in (near, far):
        assert isinstance(error, RemotePipelineError) and isinstance(error, PipelineError)
        assert {name: getattr(error, name) for name in ("stage", "microbatch", "action", "rank")} == {
            "stage": None, "microbatch": None, "action": "", "rank": None, **fields,
        }  # fmt: skip
        assert (error.worker, error.function, error.type_name, error.correlation_id) == ("w2", "run", "PipelineError", "c0ffee")
    assert str(near) == "Error on Node w2: failed"
    assert str(far) == "Error on Node w1: Error on Node w2: failed"


def test_fields_of_a_stage_that_are_none_stay_at_home() -> None:
    error = cross(PipelineError("failed", stage=-1, microbatch=True, action="/home/me/secret", rank=10**9))
    assert isinstance(error, RemotePipelineError)
    assert (error.stage, error.microbatch, error.action, error.rank) == (None, None, "", None)


def test_other_errors_become_remote_errors() -> None:
    error = cross(GraphError("no way"), "w1", "double")
    assert isinstance(error, RemoteError)
    assert (error.worker, error.function, error.code, error.type_name, error.correlation_id) == ("w1", "double", "raised", "GraphError", "c0ffee")
    cancelled = cross(asyncio.CancelledError())
    assert isinstance(cancelled, RemoteError)
    assert cancelled.code == "cancelled"


def test_subclasses_travel_as_the_class_that_both_sides_know() -> None:
    class Special(ContextNotFoundError):
        pass

    assert type(cross(Special("x"))) is ContextNotFoundError


def test_the_origin_survives_several_hops() -> None:
    first = cross(KeyError("weights"), "w2", "lookup", "one")
    second = cross(first, "w1", "relay", "two")
    assert isinstance(second, RemoteError)
    assert (second.worker, second.function, second.type_name, second.correlation_id) == ("w2", "lookup", "KeyError", "one")
    assert second.path == ("w1", "w2")
    assert str(second) == "Error on Node w1: Error on Node w2: lookup: KeyError: 'weights'"
    lost = cross(cross(WorkerLostError("gone", worker="w9"), "w2", "f", "one"), "w1", "g", "two")
    assert isinstance(lost, WorkerLostError)
    assert (lost.worker, lost.path, lost.correlation_id) == ("w9", ("w1", "w2"), "one")


def test_a_long_chain_keeps_its_near_end() -> None:
    error: BaseException = ValueError("deep")
    for hop in range(3 * HOPS):
        error = cross(error, f"w{hop}")
    assert isinstance(error, RemoteError)
    assert len(error.path) == HOPS
    assert error.path[0] == f"w{3 * HOPS - 1}"


@pytest.mark.parametrize(
    ("message", "crossed"),
    [
        ("one\ntwo\nthree", "one"),
        ("\n  second line is first  \n", "second line is first"),
        ("cannot open /etc/aiograd/secret.key now", "cannot open <path> now"),
        ("no '/home/user/data set.csv' there", "no '<path>' there"),
        (r"cannot open C:\Users\me\secret.key", "cannot open <path>"),
        (r"\\server\share\x", "<path>"),
        ("see ~/keys/a and ./b and ../c/d", "see <path> and <path> and <path>"),
        ("shapes (3, 4)/(2,) and/or 1/2, 4 / 2", "shapes (3, 4)/(2,) and/or 1/2, 4 / 2"),
        ("x" * 1000, "x" * (TEXT - 3) + "..."),
        ("bell\x07 and \x1b[31mred", "bell  and  [31mred"),
        ("lone \ud800 surrogate", "lone ? surrogate"),
        ("", ""),
    ],
)
def test_only_a_clean_first_line_crosses(message: str, crossed: str) -> None:
    assert str(cross(ValueError(message))) == f"Error on Node w1: f: ValueError{crossed and f': {crossed}'}"


def test_file_errors_lose_the_name_of_the_file() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open("no such file of mine.txt")
    assert str(cross(caught.value)) == "Error on Node w1: f: FileNotFoundError: [Errno 2] No such file or directory"


def test_a_message_that_cannot_be_made() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert "could not be made: RuntimeError" in str(cross(Broken()))


GOOD: dict[str, Any] = to_wire(WorkerLostError("gone", worker="w7"), "w1", "f", "id")


STAGE = to_wire(PipelineError("failed", stage=1, microbatch=0, action="1F0", rank=1), "w1", "run", "c0ffee")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "lost",
        [GOOD],
        {},
        {**GOOD, "error": "ValueError"},
        {**GOOD, "error": 3},
        {**GOOD, "text": b"gone"},
        {**GOOD, ".worker": None},
        {**GOOD, "path": "w1"},
        {**GOOD, "path": [1]},
        {**GOOD, "id": 1},
        {name: part for name, part in GOOD.items() if name != ".stage"},
        {**GOOD, "error": "overloaded", ".retry_after": float("nan")},
        {**GOOD, "error": "overloaded", ".retry_after": -1},
        {**GOOD, "error": "overloaded", ".retry_after": True},
        {**GOOD, "error": "commit_unknown", ".workers": [None]},
        *({**STAGE, name: wrong} for name in (".stage", ".microbatch", ".rank") for wrong in (-1, 10**9, 2**63 - 1, True, 1.0, "1", [1])),
        *({**STAGE, ".action": wrong} for wrong in (None, 1, "1F0 ", "rm -rf", "1" * 81, "\n", b"1F0")),
        *({part: value for part, value in STAGE.items() if part != name} for name in (".stage", ".action", "worker")),
        {**GOOD, "error": "remote", "function": 1},
    ],
)
def test_nonsense_becomes_a_protocol_error(value: Any) -> None:
    error = from_wire(value, "w1")
    assert isinstance(error, ProtocolError)
    assert error.code == "failure"
    assert str(error).startswith("Error on Node w1: ")


def test_texts_of_a_peer_are_cut_and_cleaned() -> None:
    error = from_wire({**GOOD, "text": "\x1b]0;owned\x07" + "y" * 100_000, ".worker": "z" * 1000, "path": ["p" * 1000] * 1000}, "w1")
    assert isinstance(error, WorkerLostError)
    assert "\x1b" not in str(error)
    assert len(str(error)) < 20_000
    assert len(error.worker) <= 200
    assert len(error.path) == HOPS
    assert all(len(name) <= 200 for name in error.path)


def test_the_traceback_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aiograd.distributed")
    try:
        raise ValueError("secret of w1\nsecond line")
    except ValueError as error:
        value = to_wire(error, "w1", "f", "c0ffee")
    assert "second line" not in repr(value)
    assert "Traceback" not in repr(value)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "c0ffee" in record.getMessage()
    assert "second line" in record.getMessage() and "Traceback" in record.getMessage()


def test_a_cancelled_call_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aiograd.distributed")
    assert to_wire(asyncio.CancelledError(), "w1", "f", "c0ffee")["code"] == "cancelled"
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


def test_the_log_holds_nothing_that_a_stream_cannot_take(caplog: pytest.LogCaptureFixture) -> None:
    to_wire(ValueError("lone \ud800 surrogate"), "w1", "f", "c0ffee")
    (record,) = caplog.records
    record.getMessage().encode("utf-8")
