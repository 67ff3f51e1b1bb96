"""Tables of "Zero Bubble Pipeline Parallelism" (Qi et al., arXiv 2401.10241)."""

from __future__ import annotations

from typing import NamedTuple

from aiograd.pipeline.costs import Costs


class Case(NamedTuple):
    """A line of tables 5 and 9."""

    hidden: int
    heads: int
    ranks: int
    microbatches: int
    #: milliseconds of F, I, W and a transfer
    times: tuple[float, float, float, float]
    #: bubble rates
    one_f_one_b: float
    interleaved: float
    chunks: int
    zb_h1: float
    zb_h2: float
    zb_1p: float
    zb_2p: float

    @property
    def costs(self) -> Costs:
        """With the memory of table 1, in bytes by sequence length and batch size."""
        return Costs(*self.times, activation_memory=34 * self.hidden + 5 * self.heads * 1024, weight_memory=32 * self.hidden)

    @property
    def work(self) -> float:
        return self.microbatches * sum(self.times[:3])


CASES = (
    Case(2304, 24, 8, 24, (18.522, 18.086, 9.337, 0.601), 0.2431, 0.1055, 3, 0.1585, 0.1083, 0.1585, 0.0433),
    Case(2304, 24, 8, 32, (18.513, 18.086, 9.331, 0.626), 0.1985, 0.0818, 3, 0.1242, 0.0837, 0.1242, 0.0039),
    Case(2304, 24, 8, 64, (18.546, 18.097, 9.321, 0.762), 0.1240, 0.0443, 3, 0.0674, 0.0444, 0.0674, 0.0026),
    Case(4096, 32, 8, 24, (29.718, 29.444, 19.927, 0.527), 0.2347, 0.0808, 4, 0.1323, 0.0698, 0.1323, 0.0029),
    Case(4096, 32, 8, 32, (29.802, 29.428, 19.530, 0.577), 0.1898, 0.0628, 4, 0.1045, 0.0559, 0.1045, 0.0022),
    Case(4096, 32, 8, 64, (29.935, 29.621, 19.388, 0.535), 0.1091, 0.0320, 4, 0.0554, 0.0294, 0.0554, 0.0010),
)

#: table 8, 16 ranks: microbatches -> bubble rates of 1F1B, ZB-H1, ZB-H2, ZB-V. Its times are not printed.
LARGER = {48: (0.2668, 0.1536, 0.0823, 0.0697), 64: (0.2206, 0.1198, 0.0630, 0.0533), 128: (0.1390, 0.0637, 0.0325, 0.0274)}
