"""The messages between workers: their bytes, and the errors of values that are no messages.

After a change that is meant, write the golden file again: ``python -m tests.distributed.test_messages``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import WireMessage, encode, encode_answer, message, parse, parse_answer
from aiograd.distributed.kinds import Kind
from aiograd.distributed.messages.calls import AskWaits, CallHeader, CallResult, FunctionCall, Post, Relay, RelayedAnswer, RelayedMessage, SentTangent
from aiograd.distributed.messages.fields import TraceContext
from aiograd.distributed.messages.groups import (
    GIVEN_UP,
    Decision,
    GroupFail,
    GroupJoin,
    GroupLeave,
    GroupLeft,
    GroupOutcome,
    GroupPiece,
    GroupWithdraw,
    JoinRefused,
    Leaver,
    PieceContent,
    Vote,
)
from aiograd.distributed.messages.library import (
    LIBRARY,
    CallMethod,
    CreateAdapter,
    CreateObject,
    CreateOptimizer,
    DeleteObject,
    Dismiss,
    EndTransfer,
    GradientSizes,
    JoinRequest,
    LoadModule,
    LoadOptimizer,
    ModuleParameters,
    PutChunks,
    ReadModule,
    ReadMore,
    ReadObject,
    ReadOptimizer,
    ReportRequest,
    Restart,
    ScaleGradients,
    SetOptions,
    SetPeers,
    StateChunk,
    StatePart,
    StepOptimizer,
    TrainModule,
)
from aiograd.distributed.messages.passes import (
    CREATE,
    SMART,
    UP,
    Abort,
    Bundle,
    Commit,
    Gradient,
    GradientsTaken,
    Lease,
    Mark,
    Marked,
    PassOutcome,
    Release,
    Renew,
)
from aiograd.distributed.messages.requests import REQUESTS, MessageTable
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.payload import Packing, Unpacking
from aiograd.distributed.rpc import codec
from aiograd.distributed.rpc.codec import WireReference, WireTensor
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ProtocolError
from aiograd.tensors.core import make

GOLDEN = Path(__file__).with_name("messages.golden")
LIMITS = Limits()
KEY = bytes(range(16))
TRACE = TraceContext("00-" + "1" * 32 + "-" + "2" * 16 + "-01", True)
ARRAY = WireTensor(np.arange(3, dtype=np.float32), False)
HEADER = CallHeader(KEY, "a", (-1,), 3, True)
CONTENT = PieceContent(b'["barrier","",0,[]]', 1, 0, 2, [ARRAY])
REQUEST_EXAMPLES: list[WireMessage] = [
    FunctionCall("triple", [1, "x"], {"k": 2.0}, True, HEADER, TRACE),
    FunctionCall("triple", [1], {}, False, None),
    FunctionCall("triple", [ARRAY], {}, False, None, None, [SentTangent(0, 0, ARRAY)]),
    Mark(KEY, "a", 7, [1, 2], UP),
    Mark(KEY, "a", 7, [1, 2]),
    Gradient(KEY, "a", 7, Bundle(3, [ARRAY, None], 0), SMART | CREATE, ["b", "c"], [3, 4], (-5, -1), TRACE),
    Gradient(KEY, "a", 7, Bundle(3, [ARRAY], 9), CREATE, [], None, (-5,)),
    Gradient(KEY, "a", 7, Bundle(3, [ARRAY], 0), SMART, ["b"], None, None, TRACE),
    Gradient(KEY, "a", 7, Bundle(3, [ARRAY], 0), SMART, ["b"]),
    Commit(KEY, "a", 7),
    Abort(KEY, "a", 7, "DeadlineError"),
    PassOutcome(KEY, "a", 7),
    Release(KEY),
    Renew([Lease(KEY, 5)]),
    Relay(4, [RelayedMessage("b", encode(Commit(KEY, "a", 7)))]),
    AskWaits(False),
    AskWaits(True),
    Post(WireReference("b", KEY, KEY, "Thing"), [1, ARRAY], True, TRACE),
    Post(WireReference("b", KEY, KEY, "Thing"), [1], False),
    GroupJoin("g", ["a", "b"], KEY),
    GroupWithdraw("g", KEY, {"code": "X"}),
    GroupPiece(KEY, "g", 4, CONTENT),
    Vote(KEY, "g", 4),
    GroupOutcome(KEY, 4),
    GroupLeave(KEY, "g", 4),
    GroupLeft(KEY, "g", [Leaver(1, 4)]),
    GroupFail(KEY, "g", {"code": "X"}),
]
ANSWER_EXAMPLES: list[tuple[type[WireMessage], Any]] = [
    (FunctionCall, CallResult(4, 0)),
    (FunctionCall, CallResult(ARRAY, 6, [3])),
    (FunctionCall, CallResult(ARRAY, 0, None, [SentTangent(0, 0, ARRAY)])),
    (Mark, Marked(["b"], [1])),
    (Gradient, GradientsTaken(["b"], [Bundle(3, [ARRAY], 0)], False)),
    (AskWaits, WireTensor(np.frombuffer(b'{"waits":[]}', np.uint8), False)),
    (Commit, True),
    (Abort, True),
    (PassOutcome, "committed"),
    (Release, True),
    (Renew, True),
    (Relay, [RelayedAnswer("b", False, True)]),
    (Post, None),
    (GroupJoin, KEY),
    (GroupJoin, [KEY, KEY]),
    (GroupJoin, JoinRefused(GIVEN_UP, {"code": "X"})),
    (GroupWithdraw, True),
    (GroupPiece, CONTENT),
    (GroupPiece, None),
    (Vote, Decision("aborted", {"code": "X"})),
    (GroupOutcome, "undecided"),
    (GroupLeave, True),
    (GroupLeft, True),
    (GroupFail, True),
]

REFERENCE = WireReference("b", KEY, KEY, "Thing")
REF = Unpacking(lambda wire: RemoteRef(wire, *[lambda *args: None] * 3)).unpack(REFERENCE)  # type: ignore[arg-type, return-value]
NAMED = StateChunk(("w",), None, make(ARRAY.array))
SHARE = StateChunk((0, "m"), (2, 3), make(ARRAY.array))
LIBRARY_EXAMPLES: list[tuple[WireMessage, Any]] = [
    (CreateObject("Thing", [1], {"k": 2}), REF),
    (CallMethod(REF, "double", [1], {}), 2),
    (ReadObject(REF), "x"),
    (DeleteObject(REF), True),
    (CreateAdapter(REF, "aiograd.replica", [REF], {"accumulate": 1}), REF),
    (ReadMore(REF, KEY), StatePart([SHARE], False)),
    (PutChunks(REF, KEY, True, [NAMED, SHARE]), True),
    (EndTransfer(REF, KEY), True),
    (ModuleParameters(REF), {"w": REF}),
    (ReadModule(REF, KEY, (1, 2, 3)), StatePart([NAMED], True)),
    (LoadModule(REF, KEY, False, [NAMED]), True),
    (TrainModule(REF, False), True),
    (CreateOptimizer("SGD", [REF], {"lr": 0.5}), REF),
    (StepOptimizer(REF, 3), 3),
    (StepOptimizer(REF, 3, 1), 3),
    (GradientSizes(REF, 2.0), [NAMED.value]),
    (ScaleGradients(REF, make(np.array(2, np.float32))), True),
    (SetOptions(REF, {"lr": 0.5}), True),
    (ReadOptimizer(REF, KEY, (1, 2, 3)), StatePart([SHARE], False, {"taken": 1, "groups": []})),
    (LoadOptimizer(REF, KEY, True, [SHARE], {"taken": 1, "groups": []}), True),
    (SetPeers({"a": "http://a", "b": None}), True),
    (Dismiss(), True),
    (Restart(), True),
    (JoinRequest("http://a", "1.0"), True),
    (ReportRequest(4, True, 5, "12", 100), "{}"),
]


def _packed(value: Any) -> Any:
    return Packing(False, Encoding.PLAIN, {}).pack(value)


def _parse(example: WireMessage, value: Any) -> WireMessage:
    return REQUESTS.parse(example.form.kind, value) if example.form.kind else parse(type(example), value)


def _bytes(value: Any) -> str:
    return b"".join(map(bytes, codec.encode(value, LIMITS))).hex()


def _lines() -> Iterator[str]:
    for request in REQUEST_EXAMPLES:
        yield f"{int(request.form.kind):2} {request.form.name}: {_bytes(encode(request))}"
    for cls, answer in ANSWER_EXAMPLES:
        yield f"{int(cls.form.kind):2} answer to {cls.form.name}: {_bytes(encode_answer(cls, answer))}"
    for call, answer in LIBRARY_EXAMPLES:
        yield f" 1 {call.form.name}: {_bytes(encode(FunctionCall(call.form.name, _packed([*encode(call)]), {}, False, None)))}"
        yield f" 1 answer to {call.form.name}: {_bytes(encode(CallResult(_packed(encode_answer(type(call), answer)), 0)))}"


def test_the_bytes_of_messages_are_as_before() -> None:
    assert list(_lines()) == GOLDEN.read_text().splitlines()


def test_every_request_and_its_answer_have_an_example() -> None:
    requests = {request for words in REQUESTS.kinds.values() for request in words.values()}
    assert {type(request) for request in REQUEST_EXAMPLES} == {cls for cls, _ in ANSWER_EXAMPLES} == requests
    assert {type(call) for call, _ in LIBRARY_EXAMPLES} == {*LIBRARY.values()}
    assert {kind.name: int(kind) for kind in Kind} == {next(iter(words.values())).form.kind.name: int(kind) for kind, words in REQUESTS.kinds.items()}


@pytest.mark.parametrize("request_message", REQUEST_EXAMPLES, ids=lambda each: each.form.name)
def test_a_request_comes_back_from_its_bytes(request_message: WireMessage) -> None:
    value = codec.decode(bytearray.fromhex(_bytes(encode(request_message))), LIMITS)
    found = REQUESTS.parse(request_message.form.kind, value)
    assert type(found) is type(request_message) and _bytes(encode(found)) == _bytes(encode(request_message))


@pytest.mark.parametrize(("cls", "answer"), ANSWER_EXAMPLES)
def test_an_answer_comes_back_from_its_bytes(cls: type[WireMessage], answer: Any) -> None:
    value = codec.decode(bytearray.fromhex(_bytes(encode_answer(cls, answer))), LIMITS)
    found = parse_answer(cls, value, "b")
    assert type(found) is type(answer) and _bytes(encode_answer(cls, found)) == _bytes(encode_answer(cls, answer))


@pytest.mark.parametrize(("call", "answer"), LIBRARY_EXAMPLES, ids=lambda each: each.form.name if isinstance(each, WireMessage) else "")
def test_a_call_of_the_library_comes_back(call: WireMessage, answer: Any) -> None:
    cls = type(call)
    found = parse(cls, encode(call))
    assert encode(found) == encode(call)
    assert encode_answer(cls, parse_answer(cls, encode_answer(cls, answer), "b")) == encode_answer(cls, answer)


@pytest.mark.parametrize("request_message", [*REQUEST_EXAMPLES, *(call for call, _ in LIBRARY_EXAMPLES)], ids=lambda each: each.form.name)
def test_a_field_of_another_type_is_named(request_message: WireMessage) -> None:
    form = request_message.form
    value = form.encode(request_message)
    for i, (name, field) in enumerate(zip(form.names, form.forms, strict=True)):
        if field.classes is None or i >= len(value):
            continue
        wrong = (*value[:i], 2.5j, *value[i + 1 :])
        with pytest.raises(ProtocolError, match=rf"^a malformed {form.name}: field {name} is of type complex; expected ") as caught:
            _parse(request_message, (form.word, *wrong) if form.word else wrong)
        assert caught.value.code == form.code
    for wrong in (value[: form.required - 1] if value else None, (*value, *[0] * (len(form.names) - len(value) + 1)), list(value)):
        with pytest.raises(ProtocolError, match=f"^a malformed {form.name.split()[0]}"):
            _parse(request_message, (form.word, *wrong) if form.word and isinstance(wrong, tuple) else wrong)


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (Kind.COMMIT, (b"short", "a", 7), r"a malformed COMMIT: field key is b'short' of type bytes; expected a key of 16 bytes"),
        (Kind.MARK, (KEY, "a", 7, [1, "x"]), r"a malformed MARK: field edges\[1\] is 'x' of type str; expected int"),
        (Kind.MARK, (KEY, "a", 7, [1], 2), r"field direction is 2 of type int; expected 0 or 1"),
        (Kind.MARK, (KEY, "a", 7, [1], None), r"field direction is None; expected to be left out"),
        (Kind.MARK, (KEY, "a", True, [1]), r"field number is True; expected int"),
        (Kind.GRADIENT, (KEY, "a", 7, (3, [], 0), 64, []), r"field flags is 64 of type int; expected flags from 0 to 63"),
        (Kind.GRADIENT, (KEY, "a", 7, (3, [], 0), 4, [], None, (1,)), r"field place is of type tuple; expected 1 to 65 ints"),
        (Kind.GRADIENT, (KEY, "a", 7, (3, [1], 0), 4, []), r"field bundle.gradients\[0\] is 1 of type int; expected WireTensor or None"),
        (Kind.GRADIENT, (KEY, "a", 7, (3, [], 0), 2, [], None, None, ("x", True)), r"field trace.traceparent is 'x' .*; expected a W3C traceparent"),
        (Kind.CALL, ("f", [], {}, True, (KEY, "a", (-1,), -3, True)), r"field header.edge is -3 of type int; expected an int from 0"),
        (Kind.CALL, ("f", [], {}, True, (KEY, "x" * 200, (-1,), 0, True)), r"field header.origin is 'x{1,60} of type str; expected a name"),
        (Kind.RENEW, ([(KEY, 1), (KEY, -1)],), r"field leases\[1\].counter is -1 of type int; expected an int from 0"),
        (Kind.RELAY, (4, []), r"field messages is of type list; expected 1 message or more"),
        (Kind.COLLECTIVE, ("join", "g", ["a"], b""), r"a malformed COLLECTIVE join: field nonce is b'' of type bytes; expected 16 bytes"),
        (Kind.COLLECTIVE, ("shout",), r"a malformed COLLECTIVE: its first value is 'shout' of type str; expected one of join, withdraw, "),
        (Kind.COLLECTIVE, ([],), r"a malformed COLLECTIVE: its first value is of type list"),
        (Kind.COLLECTIVE, 3, r"a malformed COLLECTIVE: its first value is 3 of type int"),
        (Kind.COMMIT, None, r"a malformed COMMIT: it is None; expected a tuple \(key, initiator, number\)"),
        (99, (), "a request of unknown kind 99"),
    ],
)
def test_what_is_out_of_bounds_is_named(kind: int, value: Any, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        REQUESTS.parse(kind, value)


@pytest.mark.parametrize(
    ("cls", "value", "text"),
    [
        (Commit, 1, "worker b gave a malformed answer to COMMIT: it is 1 of type int; expected bool"),
        (Mark, (["b"],), r"answer to MARK: it is a tuple of 1 values; expected a tuple \(names, edges\)"),
        (GroupJoin, ("no", {}), "answer to COLLECTIVE join: field word is 'no' of type str; expected 'given up'"),
        (GroupJoin, [KEY, b""], r"answer to COLLECTIVE join: field \[1\] is b'' of type bytes; expected 16 bytes"),
        (Relay, [("b", False)], r"answer to RELAY: field \[0\] is a tuple of 2 values"),
    ],
)
def test_an_answer_that_does_not_fit_is_named(cls: type[WireMessage], value: Any, text: str) -> None:
    with pytest.raises(ProtocolError, match=text) as caught:
        parse_answer(cls, value, "b")
    assert caught.value.code == cls.form.code


@message(code="inner")
class Inner(WireMessage):
    number: int


@message(code="listed", wire=list)
class Listed(WireMessage):
    first: int
    second: int | None = None


@message(code="named", wire=dict)
class Named(WireMessage):
    first: int
    second: int | None = None


@message(code="all")
class Every(WireMessage):
    """One field of each kind of annotation."""

    pair: tuple[int, str]
    table: dict[str, Annotated[int, Bound("below 9", lambda number: number < 9)]]
    chain: tuple[Inner, ...]
    named: dict[str, Listed]
    maybe: list[Inner] | None = None


def test_every_kind_of_annotation() -> None:
    every = Every((1, "x"), {"k": 3}, (Inner(4),), {"n": Listed(6)}, [Inner(5)])
    assert encode(every) == ((1, "x"), {"k": 3}, ((4,),), {"n": [6]}, [(5,)]) and parse(Every, encode(every)) == every
    for value, text in (
        (((1,), {}, (), {}), r"field pair is a tuple of 1 values; expected a tuple \(int, str\)"),
        (((1, 2), {}, (), {}), r"field pair\[1\] is 2 of type int; expected str"),
        (((1, "x"), {"k": 9}, (), {}), r"field table\['k'\] is 9 of type int; expected below 9"),
        (((1, "x"), {}, (4,), {}), r"field chain\[0\] is 4 of type int; expected Inner \(number\)"),
        (((1, "x"), {}, (), {"n": (1,)}), r"field named\['n'\] is of type tuple; expected Listed \(first, second\)"),
        (((1, "x"), {}, (), {}, [("4",)]), r"field maybe\[0\].number is '4' of type str; expected int"),
    ):
        with pytest.raises(ProtocolError, match=f"a malformed Every: {text}"):
            parse(Every, value)


def test_lists_and_dicts_on_the_wire() -> None:
    for cls, short, whole in ((Listed, [1], [1, 2]), (Named, {"first": 1}, {"first": 1, "second": 2})):
        for value, made in ((short, cls(1)), (whole, cls(1, 2))):
            assert encode(made) == value and parse(cls, value) == made
    for cls, value, text in (
        (Listed, (1,), r"it is of type tuple; expected a list \(first, second\)"),
        (Listed, [], "it is a list of 0 values; expected a list"),
        (Named, {"second": 2}, r"it is without first; expected a dict \(first, second\)"),
        (Named, {"first": 1, "third": 2}, "it is without second; expected a dict"),
        (Named, {"first": "x"}, "field first is 'x' of type str; expected int"),
    ):
        with pytest.raises(ProtocolError, match=f"worker b sent a malformed {cls.__name__}: {text}"):
            parse(cls, value, "b")


def test_a_message_is_frozen_however_it_is_made() -> None:
    for made in (Abort(KEY, "a", 7, reason="x"), parse(Abort, (KEY, "a", 7, "x"))):
        assert repr(made) == f"Abort(key={KEY!r}, initiator='a', number=7, reason='x')" and made == Abort(KEY, "a", 7, "x") != Abort(KEY, "a", 7, "y")
        with pytest.raises(FrozenInstanceError):
            made.number = 8
        assert not hasattr(made, "__dict__") and made.pass_id == ("a", 7)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'reason'"):
        Abort(KEY, "a", 7)


def test_annotations_that_have_no_form_are_refused() -> None:
    for hint, text in (
        (set[int], "no type that a field"), (tuple[int, Inner], "a message of its own"),
        (Inner | tuple[int, ...], "are tuple on the wire"), (list[Inner] | Inner, "one type at most"),
        (Annotated[int | None, Bound("0", bool)], "a bound needs a type"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=text):
            message(code="bad")(type("Bad", (WireMessage,), {"__annotations__": {"field": hint}}))
    with pytest.raises(TypeError, match="field '_hidden' of Bad; expected an identifier"):
        message(code="bad")(type("Bad", (WireMessage,), {"__annotations__": {"_hidden": int}}))
    with pytest.raises(TypeError, match="two requests COMMIT of kind 4"):
        MessageTable(Commit, Commit)


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(_lines()) + "\n")
