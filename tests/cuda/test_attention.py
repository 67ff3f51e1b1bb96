"""Attention on a simulated CUDA device, against the host's row in double precision: by tiles, with masks, and every gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.operations import attention
from aiograd.cuda.operations.attention import backward_tile, forward_tile
from aiograd.errors import ArgumentTypeError, ShapeError
from aiograd.ops.op import ROWS
from tests.support import assert_raises
from tests.sweeps import swept
from tests.tolerance import tolerance

ROW = ROWS["scaled_dot_product_attention"]
INPUTS = ("q", "k", "v", "mask")

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]


def draw(shape: tuple[int, ...], dtype: str = "f4", seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def mask_of(kind: str, shape: tuple[int, ...], dtype: str) -> np.ndarray | None:
    """No mask, a boolean one in which a query sees nothing, or one to add."""
    if not kind:
        return None
    allowed = np.random.default_rng(7).random(shape) < 0.6
    allowed[..., -1, :] = False
    return allowed if kind == "allowed" else np.where(allowed, draw(shape, dtype, 5), -np.inf).astype(dtype)


def wide(array: np.ndarray | None) -> np.ndarray | None:
    return array if array is None or array.dtype == np.bool_ else array.astype(np.float64)


def near(device: CudaDevice, found: Any, wanted: np.ndarray, dtype: str) -> None:
    assert isinstance(found, CudaArray)
    assert found.shape == wanted.shape
    ours = device.to_host(found).astype(np.float64)
    assert np.linalg.norm(ours - wanted) <= tolerance(dtype) * max(np.linalg.norm(wanted), 1e-3)


def check(device: CudaDevice, arrays: Arrays, dtype: str, needs: tuple[bool, ...] = (True, True, True, False), **statics: Any) -> None:
    """The fused pair on the device against the row on the host: result, and gradients that are needed."""
    statics = {"is_causal": False, "scale": None, **statics}
    hosts = [wide(array) for array in arrays]
    wanted = ROW.forward(*hosts, **statics)
    fused = device.fused("scaled_dot_product_attention")
    assert fused is not None
    ours = [None if array is None else device.from_host(array) for array in arrays]
    out, shift = fused.forward(*ours, **statics)
    near(device, out, wanted, dtype)
    near(device, ROW(*ours, **statics), wanted, dtype)
    g = draw(wanted.shape, dtype, 9)
    grads = fused.joint[INPUTS](device.from_host(g), needs, *ours, out=out, shift=shift, **statics)
    expected = ROW.joint[INPUTS](g.astype(np.float64), needs, *hosts, **statics)
    leading = wanted.shape[:-2]
    for need, found, theirs in zip(needs, grads, expected, strict=True):
        if need:
            near(device, found, np.broadcast_to(theirs, (*leading, *theirs.shape[-2:])), dtype)
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("kind", ["", "allowed", "added"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries,keys", [(4, 4), (6, 5), (3, 9), (9, 3)])
def test_masks_and_ragged_tiles(device: CudaDevice, queries: int, keys: int, is_causal: bool, kind: str) -> None:
    arrays = (draw((2, queries, 3)), draw((2, keys, 3), seed=1), draw((2, keys, 5), seed=2), mask_of(kind, (queries, keys), "f4"))
    check(device, arrays, "f4", (True, True, True, kind == "added"), is_causal=is_causal)


@pytest.mark.parametrize("dtype", ["f8", "f2"])
@pytest.mark.parametrize("kind", ["", "added"])
def test_other_precisions(device: CudaDevice, dtype: str, kind: str) -> None:
    arrays = (draw((5, 4), dtype), draw((6, 4), dtype, 1), draw((6, 4), dtype, 2), mask_of(kind, (5, 6), dtype))
    check(device, arrays, dtype, (True, True, True, kind == "added"), scale=0.7)


@pytest.mark.parametrize(
    "q,k,v,mask",
    [
        ((2, 2, 3, 4), (2, 1, 5, 4), (2, 1, 5, 3), (1, 2, 3, 5)),
        ((3, 4), (2, 5, 4), (2, 5, 4), (5,)),
        ((2, 1, 2, 3, 4), (1, 3, 2, 5, 4), (2, 3, 1, 5, 4), (1, 1, 1, 1, 5)),
        ((1, 16), (1, 16), (1, 1), (1, 1)),
    ],
)
def test_leading_axes_broadcast(device: CudaDevice, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], mask: tuple[int, ...]) -> None:
    check(device, (draw(q), draw(k, seed=1), draw(v, seed=2), None), "f4")
    check(device, (draw(q), draw(k, seed=1), draw(v, seed=2), draw(mask, seed=3)), "f4", (True, True, True, True))


def test_only_what_is_needed_is_launched(device: CudaDevice) -> None:
    arrays = (draw((3, 4)), draw((5, 4), seed=1), draw((5, 4), seed=2), None)
    counts = []
    for needs in ((True, False, False, False), (False, True, False, False), (True, True, True, False)):
        before = device.driver.history.count("attention_grad")  # type: ignore[attr-defined]
        check(device, arrays, "f4", needs)
        counts.append(device.driver.history.count("attention_grad") - before)  # type: ignore[attr-defined]
    assert counts == [1, 1, 2]


def test_heads_beside_features_are_read_where_they_lie_and_so_is_the_result(device: CudaDevice) -> None:
    whole = device.from_host(draw((2, 5, 3, 2, 4)))
    q, k, v = (whole[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    device.synchronize()
    start = len(device.driver.history)  # type: ignore[attr-defined]
    out = ROW(q, k, v)
    joined = out.transpose(0, 2, 1, 3).reshape(2, 5, 8)
    device.synchronize()
    assert device.driver.history[start:] == ["attention"]  # type: ignore[attr-defined]
    hosts = [device.to_host(x).astype(np.float64) for x in (q, k, v)]
    near(device, joined, ROW(*hosts).transpose(0, 2, 1, 3).reshape(2, 5, 8), "f4")


def test_large_scores_do_not_overflow(device: CudaDevice) -> None:
    arrays = (100 * draw((5, 4)), 100 * draw((6, 4), seed=1), draw((6, 4), seed=2))
    wanted = ROW(*[array.astype(np.float64) for array in arrays])
    near(device, ROW(*[device.from_host(array) for array in arrays]), wanted, "f4")


def test_the_same_bits_every_time(device: CudaDevice) -> None:
    arrays = [device.from_host(draw((5, 4), seed=i)) for i in range(3)]
    assert len({device.to_host(ROW(*arrays, is_causal=True)).tobytes() for _ in range(3)}) == 1


def test_more_features_than_fit_are_put_together_from_products(device: CudaDevice) -> None:
    check(device, (draw((2, 3, 20)), draw((2, 4, 20), seed=1), draw((2, 4, 5), seed=2), mask_of("allowed", (3, 4), "f4")), "f4", is_causal=True)
    assert "attention" not in device.driver.history  # type: ignore[attr-defined]


def test_no_queries_no_keys_and_no_batches(device: CudaDevice) -> None:
    for lead, queries, keys in (((2,), 0, 5), ((0,), 3, 5), ((2,), 3, 0)):
        check(device, (draw((*lead, queries, 4)), draw((*lead, keys, 4)), draw((*lead, keys, 3)), None), "f4")


def test_arguments_that_do_not_fit(device: CudaDevice) -> None:
    q = device.from_host(draw((3, 4)))
    assert_raises(ShapeError, "expected q", lambda: ROW(q, q[:, :2], q))
    assert_raises(ArgumentTypeError, "mask has dtype", lambda: ROW(q, q, q, device.from_host(np.zeros((3, 3), np.int64))))


def test_tiles_fit_into_shared_memory(device: CudaDevice) -> None:
    class Large:
        properties = type("Properties", (), {"is_simulated": False, "shared_memory": 48 * 1024})

    large: Any = Large()
    for size, depth in ((4, 16), (4, 64), (4, 128), (4, 256), (8, 64), (8, 128)):
        assert forward_tile(large, size, depth, depth) is not None
        assert backward_tile(large, size, depth, depth) is not None
    assert forward_tile(large, 4, 64, 64) == (64, 32, 16, 8)
    assert backward_tile(large, 8, 1024, 1024) is None


@pytest.mark.parametrize(
    "forward,backward", swept([((16, 16, 16, 8), (8, 8, 8, 8)), ((32, 32, 16, 8), (16, 16, 16, 8)), ((64, 32, 16, 8), (32, 32, 16, 8))])
)
def test_tiles_of_real_devices(
    device: CudaDevice, forward: tuple[int, ...], backward: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "forward_tile", lambda *args: forward)
    monkeypatch.setattr(attention, "backward_tile", lambda *args: backward)
    monkeypatch.setattr(attention, "_padded", lambda features, least: 16 if features <= 16 else 32)
    queries, keys = forward[0] + 3, forward[1] + 2
    arrays = (draw((queries, 11)), draw((keys, 11), seed=1), draw((keys, 19), seed=2), mask_of("added", (queries, keys), "f4"))
    check(device, arrays, "f4", (True, True, True, True), is_causal=True)


async def gradients(arrays: Arrays, place: str | None, **statics: Any) -> list[np.ndarray]:
    tensors = [None if x is None else ag.tensor(x, device=place, requires_grad=x.dtype != np.bool_) for x in arrays]
    out = ROW(*tensors, **statics)
    weight = np.cos(np.arange(out.size)).reshape(out.shape).astype(arrays[0].dtype)
    await (out * ag.tensor(weight, device=place)).sum().backward()
    return [(await found).to("cpu").numpy() for found in (out.detach(), *[x.grad for x in tensors if x is not None and x.requires_grad])]


@pytest.mark.parametrize("kind", ["", "allowed", "added"])
async def test_tensors_have_the_gradients_of_the_host(device: CudaDevice, kind: str) -> None:
    arrays: Arrays = (draw((2, 2, 5, 4)), draw((2, 1, 6, 4), seed=1), draw((6, 4), seed=2), mask_of(kind, (5, 6), "f4"))
    ours = await gradients(arrays, "cuda:0", is_causal=True)
    theirs = await gradients(tuple(wide(array) for array in arrays), None, is_causal=True)  # type: ignore[arg-type]
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.shape == wanted.shape
        assert np.linalg.norm(found - wanted) <= 2e-6 * np.linalg.norm(wanted)
    assert device.statistics().fallbacks == {}
