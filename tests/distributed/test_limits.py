"""Limits: what they may be, and what is said of those that may not."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from aiograd.distributed.rpc.limits import MOST_OF, Limits, check_number
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.cli.worker import read_limits

COUNTS = [field.name for field in dataclasses.fields(Limits) if isinstance(field.default, int)]
SECONDS = [field.name for field in dataclasses.fields(Limits) if field.name not in COUNTS]


@pytest.mark.parametrize("value", [None, True, "5", [1], {}, 1j, b"5"])
def test_what_is_no_number_is_no_limit(value: Any) -> None:
    for name in COUNTS + SECONDS:
        if name == "lease" and value is None:
            assert Limits(lease=None).lease_seconds == 120
            continue
        with pytest.raises(ArgumentTypeError, match=rf"^Limits: {name}=.*: expected .* above 0 and at most .*, found {type(value).__name__}$"):
            Limits(**{name: value})


@pytest.mark.parametrize("value", [1.5, 2.0, math.inf, math.nan, np.float64(3)])
def test_what_counts_something_is_whole(value: Any) -> None:
    for name in COUNTS:
        with pytest.raises(ArgumentTypeError, match=rf"^Limits: {name}=.*: expected a whole number above 0"):
            Limits(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 1 << 63, 10**400, pytest.param(10**9000, id="10**9000")])
def test_limits_are_above_0_and_bounded(value: int) -> None:
    for name in COUNTS + SECONDS:
        if name == "shared_bytes" and value == 0:
            continue  # none at all
        with pytest.raises(ArgumentError, match=rf"^Limits: {name}=.*: expected .* above 0 and at most") as caught:
            Limits(**{name: value})
        assert len(str(caught.value)) < 300 and caught.type is ArgumentError


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 1e300])
def test_times_are_finite(value: float) -> None:
    for name in SECONDS:
        with pytest.raises(ArgumentError, match=rf"^Limits: {name}=.*: expected seconds above 0 and at most 1e\+09"):
            Limits(**{name: value})


@pytest.mark.parametrize("name", MOST_OF)
def test_limits_are_within_what_frames_and_arrays_have_room_for(name: str) -> None:
    assert getattr(Limits(**{name: MOST_OF[name]}), name) == MOST_OF[name]
    with pytest.raises(ArgumentError, match=f"at most {MOST_OF[name]:g}$".replace("+", r"\+")):
        Limits(**{name: MOST_OF[name] + 1})


def test_other_kinds_of_numbers_will_do() -> None:
    limits = Limits(tensors=np.int32(7), default_deadline=np.float32(2.5), heartbeat=Fraction(1, 4))  # type: ignore[arg-type]
    assert (limits.tensors, limits.default_deadline, limits.silence) == (7, 2.5, 0.75)
    check_number("timeout", 3, 3)


#: what may be given to ``aiograd worker --limits``, and what is said of it
WRONG = {
    "null": "found NoneType",
    "true": "found bool",
    "[]": "found list",
    '"x"': "found str",
    "1e400": "found float",
    "{": "Expecting property name",
    '{"frame_bytes": null}': "frame_bytes=None: expected a whole number",
    '{"frame_bytes": true}': "frame_bytes=True: expected a whole number",
    '{"frame_bytes": 1.5}': "frame_bytes=1.5: expected a whole number",
    '{"frame_bytes": 1e400}': "frame_bytes=inf: expected a whole number",
    '{"frame_bytes": [[]]}': "frame_bytes=[[]]: expected a whole number",
    '{"heartbeat": 1e400}': "heartbeat=inf: expected seconds above 0",
    '{"heartbeat": NaN}': "heartbeat=nan: expected seconds above 0",
    '{"heartbeat": null}': "heartbeat=None: expected seconds above 0",
    '{"heartbeat": "5"}': "heartbeat='5': expected seconds above 0",
    '{"no_such_limit": 1}': "no_such_limit",
    '{"default_deadline": 4000}': "default_deadline=4000 is above max_deadline",
    "[" * 50_000 + "]" * 50_000: "nested too deep",
    '{"frame_bytes": ' * 50_000 + "1" + "}" * 50_000: "nested too deep",
    '{"frame_bytes": ' + "9" * 4000 + "}": "expected a whole number above 0",
    '{"frame_bytes": ' + "9" * 5000 + "}": "digits",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30])
def test_limits_as_json_that_make_no_sense_are_one_error(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        read_limits(text)
    said = str(caught.value)
    assert said.startswith("--limits ") and WRONG[text] in said and 'expected a JSON object such as {"message_bytes": 1048576}' in said
    assert len(said) < 800 and "\n" not in said


def test_limits_as_json() -> None:
    given = {"message_bytes": 4096, "heartbeat": 0.25, "lease": None, "default_deadline": 5}
    assert read_limits(json.dumps(given)) == Limits(message_bytes=4096, heartbeat=0.25, default_deadline=5)
