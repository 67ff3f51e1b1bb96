"""The cases of `tests/gpu/test_rows.py` on a simulated device: what a GPU is tried on is right where there is none."""

from __future__ import annotations

import pytest

from aiograd.cuda.device import CudaDevice
from aiograd.ops.op import ROWS
from tests.cuda.on_both import row_agrees
from tests.cuda.samples import DOMAINS, DTYPES, NOT_ON_DEVICES, ROW_CASES, SAMPLES, VARIETIES, domain_of
from tests.sweeps import swept


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "dtype"), swept(ROW_CASES, keep=100))
def test_rows_agree_with_the_host(name: str, dtype: str, device: CudaDevice) -> None:
    for variety in range(min(VARIETIES, domain_of(name).varieties)):
        row_agrees(device, name, variety, dtype)


def test_every_row_has_its_cases() -> None:
    assert ROWS.keys() - NOT_ON_DEVICES == (DOMAINS.keys() | SAMPLES.keys()) - NOT_ON_DEVICES
    assert not DOMAINS.keys() & SAMPLES.keys()
    assert len(ROW_CASES) == len(DTYPES) * len(ROWS.keys() - NOT_ON_DEVICES)
