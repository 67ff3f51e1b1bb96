"""Tables of "Zero Bubble Pipeline Parallelism" (Qi et al., arXiv 2401.10241)."""

from __future__ import annotations

from typing import NamedTuple

from aiograd.pipeline.schedule.costs import Costs


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


class Rates(NamedTuple):
    """A line of table 8, whose times are not printed; layers are spread so that ranks have two stages where schedules take several."""

    ranks: int
    microbatches: int
    one_f_one_b: float
    interleaved: float
    zb_h1: float
    zb_h2: float
    zb_v: float

    @property
    def costs(self) -> Costs:
        """The costs that the rates of ZB-H1 and ZB-H2 imply, if F takes as long as I, in units of F + I + W."""
        p, m = self.ranks, self.microbatches
        bubbles = [m * rate / (1 - rate) / (p - 1) - 1 for rate in (self.zb_h1, self.zb_h2)]
        # (p − 1)(1 − 2W + 4Tc) and (p − 1)(1 − 3W + 2Tc) are the bubbles of ZB-H1 and ZB-H2 with F + I + W = 1.
        weights, transfer = (bubbles[0] - 2 * bubbles[1]) / 4, (3 * bubbles[0] - 2 * bubbles[1]) / 8
        return Costs((1 - weights) / 2, (1 - weights) / 2, weights, transfer)


LARGER = (
    Rates(16, 48, 0.2668, 0.1499, 0.1536, 0.0823, 0.0697), Rates(16, 64, 0.2206, 0.1169, 0.1198, 0.0630, 0.0533),
    Rates(16, 128, 0.1390, 0.0621, 0.0637, 0.0325, 0.0274), Rates(24, 72, 0.2699, 0.1519, 0.1439, 0.0628, 0.0638),
    Rates(24, 96, 0.2229, 0.1184, 0.1121, 0.0480, 0.0483), Rates(24, 192, 0.1403, 0.0630, 0.0595, 0.0247, 0.0250),
    Rates(32, 96, 0.2676, 0.1509, 0.1429, 0.0629, 0.0593), Rates(32, 128, 0.2204, 0.1177, 0.1111, 0.0478, 0.0451),
    Rates(32, 256, 0.1362, 0.0626, 0.0593, 0.0251, 0.0236),
)  # fmt: skip
