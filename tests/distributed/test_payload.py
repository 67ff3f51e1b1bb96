"""Payloads: trees of values, Tensors and references ↔ what the codec knows. Without any network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiograd as ag
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.payload import Packing, Unpacking, UnsendableError, device_tensors, explain
from aiograd.distributed.rpc.codec import WireReference, WireTensor, decode, encode
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ArgumentTypeError, LimitError
from tests.distributed.workers import leaf, values
from tests.toy_device import ToyDevice

LIMITS = Limits()


def packing(records: bool = True, encoding: Encoding = Encoding.PLAIN) -> Packing:
    return Packing(records, encoding, {})


def reference(wire: WireReference) -> RemoteRef:
    def unused(*_: Any) -> Any:
        raise NotImplementedError

    return RemoteRef(wire, unused, unused, unused)


def across(value: Any, packer: Packing) -> tuple[Any, Unpacking]:
    message = bytearray().join(encode(packer.pack(value), LIMITS))
    unpacking = Unpacking(reference)
    return unpacking.unpack(decode(message, LIMITS)), unpacking


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(plain)
def test_plain_values_pass_unchanged(value: Any) -> None:
    assert across([value], packing())[0] == [value]


def test_differentiable_tensors_are_listed_once_in_order_on_both_sides() -> None:
    x, y, plain = leaf(1), leaf(2, 3), ag.tensor([4.0])
    z = x * 2
    packer = packing()
    back, unpacking = across([y, {"a": (plain, z)}, z, [y, x]], packer)
    assert [id(t) for t in packer.differentiable] == [id(y), id(z), id(x)]
    assert [values(t) for t in unpacking.differentiable] == [[2, 3], [2], [1]]
    assert back[0] is back[3][0] is unpacking.differentiable[0] and back[1]["a"][1] is back[2]
    assert not any(t.requires_grad for t in unpacking.differentiable), "they join a graph later, at their recv node"


def test_nothing_is_differentiable_where_nothing_is_recorded() -> None:
    packer = packing(records=False)
    back, unpacking = across([leaf(1)], packer)
    assert packer.differentiable == unpacking.differentiable == [] and values(back[0]) == [1]


def test_a_parameter_arrives_as_a_tensor() -> None:
    (back,), _ = across([ag.nn.Parameter([1.0])], packing())
    assert type(back) is ag.Tensor


def test_references_cross() -> None:
    ref = reference(WireReference("b", b"i" * 16, b"e" * 16, "Thing"))
    (back, same), _ = across([ref, ref], packing())
    assert back == ref == same and type(back) is RemoteRef and hash(back) == hash(ref)
    assert back != reference(WireReference("b", b"i" * 16, b"f" * 16, "Thing")) and back != 3


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "?", "c8"])
def test_only_floats_of_full_width_are_sent_in_reduced_precision(dtype: str) -> None:
    tensor = ag.tensor(np.ones(3, dtype))
    wire = packing(encoding=Encoding.FLOAT16).pack(tensor)
    assert wire.encoding is (Encoding.FLOAT16 if dtype in ("f4", "f8") else Encoding.PLAIN)
    (back,), _ = across([tensor], packing(encoding=Encoding.FLOAT16))
    assert back.dtype == tensor.dtype and (back.numpy() == 1).all()


def test_device_tensors_are_found_and_their_host_copies_sent() -> None:
    with ToyDevice() as toy:
        here, there = leaf(1), leaf(2).detach().to(toy.name)
        tree = {"a": [here, (there, 3)], "b": "text"}
        assert device_tensors(tree) == [there]
        packer = Packing(True, Encoding.PLAIN, {id(there): np.array([7.0], np.float32)})
        assert values(across(tree, packer)[0]["a"][1][0]) == [7]


def test_the_wire_tensor_is_no_copy() -> None:
    x = leaf(1, 2)
    wire = packing().pack(x)
    assert type(wire) is WireTensor and np.shares_memory(wire.array, x._data) and wire.requires_grad


def test_explanations_name_the_place() -> None:
    bad = {1, 2}
    with pytest.raises(UnsendableError) as caught:
        packing().pack({"a": [1, ({"b": bad},)]})
    error = explain(caught.value, "calling f on b", [("argument 0", 3), ("argument 'x'", {"a": [1, ({"b": bad},)]})])
    assert isinstance(error, ArgumentTypeError)
    assert str(error).startswith("calling f on b: argument 'x'['a'][1][0]['b'] has type set; what can be sent is None, bool,")
    assert isinstance(explain(RecursionError(), "calling f on b", []), LimitError)
    assert "a value has type set" in str(explain(UnsendableError(bad), "calling f on b", []))
