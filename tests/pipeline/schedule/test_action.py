"""The text of actions: what is written is read back, and nothing else is read."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline import Action, ActionKind

K = ActionKind
NUMBERS = st.integers(0, 999_999_999)
SIMPLE = st.one_of(
    st.builds(Action, NUMBERS, st.sampled_from([kind for kind in K if kind.has_microbatch and kind is not K.OVERLAP_F_B]), NUMBERS),
    st.builds(Action, NUMBERS, st.sampled_from([K.UNSHARD, K.RESHARD, K.REDUCE_GRAD])),
)
FORWARDS = st.builds(Action, NUMBERS, st.just(K.F), NUMBERS)
BACKWARDS = st.builds(Action, NUMBERS, st.sampled_from([K.B, K.I]), NUMBERS)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("1F0", Action(1, K.F, 0)),
        ("2I1", Action(2, K.I, 1)),
        ("0W3", Action(0, K.W, 3)),
        ("0B3", Action(0, K.B, 3)),
        ("1UNSHARD", Action(1, K.UNSHARD)),
        ("3RESHARD", Action(3, K.RESHARD)),
        ("0REDUCE_GRAD", Action(0, K.REDUCE_GRAD)),
        ("2SEND_B2", Action(2, K.SEND_B, 2)),
        ("1RECV_F1", Action(1, K.RECV_F, 1)),
        ("12SEND_F345", Action(12, K.SEND_F, 345)),
        ("(0F7;7B3)OVERLAP_F_B", Action.overlap(Action(0, K.F, 7), Action(7, K.B, 3))),
        (" 1F0\t", Action(1, K.F, 0)),
        ("", None),
        ("   ", None),
    ],
)
def test_text_is_read(text, action):
    assert Action.parse(text) == action
    assert (str(action), repr(action)) == (text.strip(),) * 2 or action is None


@given(st.one_of(SIMPLE, st.builds(Action.overlap, FORWARDS, BACKWARDS)))
def test_what_is_written_is_read_back(action):
    assert Action.parse(str(action)) == action
    assert hash(Action.parse(repr(action))) == hash(action)


@pytest.mark.parametrize(
    "text",
    [
        "0Foo", "F0", "0", "0F", "0F0x", "x0F0", "0 F0", "0F 0", "00F1", "0F01", "-1F0", "0F-1", "0f0", "0X0", "٣F0", "0F" + "9" * 5000, "0F0 0F1",
        "0F0\n1F0", "1UNSHARD0", "1RESHARD2", "0REDUCE_GRAD1", "0SEND_F", "0SEND0", "0OVERLAP_F_B0", "OVERLAP_F_B", "()OVERLAP_F_B",
        "(0F0)OVERLAP_F_B", "(0F0;1B0", "(0F0;1B0)", "(0F0;1B0)F", "(0F0;1B0)OVERLAP_F_Bx",
        "0(0F0;1B0)OVERLAP_F_B", "(0F0;1B0;2B0)OVERLAP_F_B", "(0B0;1F0)OVERLAP_F_B", "(0F0;1W0)OVERLAP_F_B",
        "(0F0;)OVERLAP_F_B", "((0F0;1B0)OVERLAP_F_B;2B0)OVERLAP_F_B",
    ],
)  # fmt: skip
def test_everything_else_is_refused(text):
    with pytest.raises(ArgumentError) as refused:
        Action.parse(text)
    assert len(str(refused.value)) < 400


@given(st.text(alphabet="0123456789FIWB();_ SENDRCVOLAP\n", max_size=24))
def test_text_is_read_exactly_or_refused(text):
    try:
        action = Action.parse(text)
    except ArgumentError:
        return
    assert (str(action) if action else "") == text.strip()


@pytest.mark.parametrize("text", [None, 3, b"0F0"])
def test_text_is_a_str(text):
    with pytest.raises(ArgumentTypeError, match=type(text).__name__):
        Action.parse(text)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((-1, K.F, 0), "stage -1"),
        ((0, K.F, -1), "microbatch -1"),
        ((0, K.F), "needs a microbatch"),
        ((0, K.UNSHARD, 0), "about the whole stage"),
        ((0, K.OVERLAP_F_B, 0), "has parts"),
        ((0, K.F, 0, (Action(0, K.F, 0), Action(1, K.B, 0))), "no other kind"),
        ((0, K.OVERLAP_F_B, 0, (Action(0, K.F, 0), Action(1, K.W, 0))), "with 1W0"),
        ((0, K.OVERLAP_F_B, 1, (Action(0, K.F, 0), Action(1, K.B, 0))), "of its forward 0F0"),
        ((1, K.OVERLAP_F_B, 0, (Action(0, K.F, 0), Action(1, K.B, 0))), "of its forward 0F0"),
    ],
)
def test_impossible_actions_are_refused(arguments, reason):
    with pytest.raises(ArgumentError, match=re.escape(reason)):
        Action(*arguments)


@pytest.mark.parametrize("arguments", [("0", K.F, 0), (0, "F", 0), (0, K.F, "0"), (0, K.F, 0.0), (True, K.F, 0)])
def test_actions_of_other_types_are_refused(arguments):
    with pytest.raises(ArgumentTypeError, match="an int, an ActionKind and an int or None"):
        Action(*arguments)


def test_an_action_is_a_value():
    action = Action(0, K.F, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        action.stage = 2
    assert {action: 1}[Action(0, K.F, 1)] == 1
    assert action != Action(0, K.B, 1)


def test_kinds_are_told_apart():
    assert {kind for kind in K if kind.is_compute} == {K.F, K.I, K.W, K.B, K.OVERLAP_F_B}
    assert {kind for kind in K if kind.is_backward} == {K.I, K.W, K.B}
    assert {kind for kind in K if kind.is_send} == {K.SEND_F, K.SEND_B}
    assert {kind for kind in K if kind.is_receive} == {K.RECV_F, K.RECV_B}
    assert {kind for kind in K if not kind.has_microbatch} == {K.UNSHARD, K.RESHARD, K.REDUCE_GRAD}


def test_computations():
    forward, backward = Action(0, K.F, 7), Action(7, K.B, 3)
    assert forward.computations == (forward,)
    assert Action.overlap(forward, backward).computations == (forward, backward)
    assert Action(0, K.SEND_F, 7).computations == () == Action(0, K.UNSHARD).computations


@pytest.mark.parametrize(("text", "other"), [("0SEND_F3", "1RECV_F3"), ("2SEND_B1", "1RECV_B1")])
def test_the_other_end_of_a_transfer(text, other):
    assert str(Action.parse(text).other_end) == other
    assert str(Action.parse(other).other_end) == text


@pytest.mark.parametrize("text", ["0F0", "0UNSHARD", "0SEND_B1", "0RECV_F1"])
def test_what_has_no_other_end(text):
    with pytest.raises(ArgumentError, match="no other end"):
        _ = Action.parse(text).other_end
