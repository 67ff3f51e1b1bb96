"""Bessel functions of orders 0 and 1 on arrays.

Note [Chebyshev series]
    Each function is a Chebyshev series on two intervals, of coefficients that interpolate it in 40 digits:

    ==============  =============================================  ==========================================================
    I               ``exp(-x) I0(x)``, ``exp(-x) I1(x) / x``       ``sqrt(x) exp(-x) I(x)`` of ``8 / x``
    J               ``J0``, ``J1 / x`` of ``x**2``                 ``sqrt(2 / (pi x)) (P cos(t) - Q sin(t))``, P and ``x Q`` of
                                                                   ``(8 / x)**2``, t being x - pi/4 or x - 3 pi/4
    Y               less their logarithm, of ``x**2``              ``sqrt(2 / (pi x)) (P sin(t) + Q cos(t))``
    interval        0 to 8                                         8 to infinity
    ==============  =============================================  ==========================================================

    Absolute errors of J and Y are some 1e-15; relative ones grow at the zeros. The sine and cosine of t are made of the sine and cosine of x, since
    subtracting pi/4 from a large x would lose digits.

Source: the division at 8 and the modulus and phase of Hankel's expansion are as in Abramowitz and Stegun, chapter 9. The coefficients
were computed anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from aiograd.ops.masking import where
from aiograd.ops.op import Op, define
from aiograd.running.types import Array

# lowest order first
# fmt: off
I0_NEAR = (
    0.33839763720473803, -0.3046826723431984, 0.17162090152220877, -0.09490109704804764, 0.04930528423967071, -0.02373741480589947,
    0.010546460394594998, -0.004324309995050576, 0.0016394756169413357, -0.0005763755745385824, 0.00018850288509584165, -5.754195010082104e-05,
    1.6448448070728896e-05, -4.4167383584587505e-06, 1.1173875391201037e-06, -2.670793853940612e-07, 6.046995022541919e-08, -1.300025009986248e-08,
    2.6598237246823866e-09, -5.189795601635263e-10, 9.675809035373237e-11, -1.726826291441556e-11, 2.95505266312964e-12, -4.856446783111929e-13,
    7.676185498604936e-14, -1.1685332877993451e-14, 1.715391285555133e-15, -2.431279846547955e-16, 3.3307945188222384e-17, -4.4153416464793395e-18,
    5.669178006921496e-19,
)
I0_FAR = (
    0.4022452055070544, 0.0033691164782556943, 6.889758346916825e-05, 2.8913705208347567e-06, 2.0489185894690638e-07, 2.266668990498178e-08,
    3.3962320257083865e-09, 4.94060238822497e-10, 1.1889147107846439e-11, -3.1499165279632416e-11, -1.3215811840447713e-11, -1.7941785315068062e-12,
    7.180124451383666e-13, 3.8527783827421426e-13, 1.54008621752141e-14, -4.150569347287222e-14, -9.554846698828307e-15, 3.8116806693526224e-15,
    1.7725601330565263e-15, -3.425485619677219e-16, -2.8276239805165836e-16, 3.461222867697461e-17, 4.46562142029676e-17, -4.830504485944182e-18,
    -7.233180487874754e-18, 9.921475412173699e-19, 1.193650890845982e-18,
)
I1_NEAR = (
    0.12629359322181682, -0.17641651835783406, 0.1026436586898471, -0.05294598120809499, 0.024726449030626516, -0.010564084894626197,
    0.004156422944312888, -0.0015135724506312532, 0.0005122859561685758, -0.00016176081582589674, 4.781565107550054e-05, -1.3273163656039436e-05,
    3.4702513081376785e-06, -8.568720264695455e-07, 2.0032947535521353e-07, -4.445059128796328e-08, 9.381537386495773e-09, -1.8872497517228294e-09,
    3.625590281552117e-10, -6.663489723502027e-11, 1.1736186298890901e-11, -1.9839743977649436e-12, 3.223793365945575e-13, -5.042185504727912e-14,
    7.600684294735408e-15, -1.1055969477353862e-15, 1.5536319577362005e-16, -2.111421214358166e-17, 2.7779141127610464e-18, -3.541581772542136e-19,
)
I1_FAR = (
    0.38928811750914005, -0.009761097491361469, -0.00011058893876262371, -3.882564808877691e-06, -2.512236237870209e-07, -2.6314688468895196e-08,
    -3.835380385964237e-09, -5.589743462196584e-10, -1.8974958123505413e-11, 3.2526035830154884e-11, 1.4125807436613782e-11, 2.0356285441470896e-12,
    -7.198551776245908e-13, -4.0835511110921974e-13, -2.1015418427726643e-14, 4.272440016711951e-14, 1.0420276984128802e-14,
    -3.8144030724370075e-15, -1.8803547755107825e-15, 3.3082023109209285e-16, 2.96262899764595e-16, -3.209525921993424e-17, -4.6503053684893586e-17,
    4.414348323071708e-18, 7.517296310842105e-18, -9.314178867326884e-19, -1.242193275194891e-18,
)
J0_NEAR = (
    0.15772797147489012, -0.008723442352852221, 0.2651786132033368, -0.37009499387264977, 0.15806710233209725, -0.034893769411408884,
    0.004819180069467605, -0.00046062616620627504, 3.246032882100508e-05, -1.7619469077621507e-06, 7.608163592418782e-08, -2.679253530557673e-09,
    7.848696314479465e-11, -1.9438346867370164e-12, 4.125320595634374e-14, -7.588508125447546e-16, 1.2218515873961411e-17,
)
Y0_NEAR = (
    -0.03314611320328494, -0.2744743055297453, 0.17903431407718265, 0.26156734625504663, -0.17730201278114358, 0.04719668959576339,
    -0.007287962479552079, 0.0007531135932577742, -5.632079141056987e-05, 3.206532537654801e-06, -1.44072332740187e-07, 5.248794787330516e-09,
    -1.5837552541812015e-10, 4.02633081830612e-12, -8.747341203310769e-14, 1.6434898714919468e-15, -2.6977881152566837e-17, 3.9032584173475982e-19,
)
P0 = (
    0.9994603493475187, -0.0005365220468132117, 3.0751847875194745e-06, -5.1705945376060975e-08, 1.6306464635151382e-09, -7.86409137723707e-11,
    5.168262387349193e-12, -4.3045788699253914e-13, 4.3265957431549404e-14, -5.069034095935236e-15, 6.748072215733873e-16, -1.0011513723467786e-16,
    1.6305919233744186e-17, -2.880866169482871e-18,
)
Q0 = (
    -0.12444683684269607, 0.0005470815954089319, -5.9315987288485175e-06, 1.4377965798375193e-07, -5.817532749493056e-09, 3.376097523734991e-10,
    -2.565397936797308e-11, 2.404916100281365e-12, -2.6690625482579414e-13, 3.4041800321963686e-14, -4.87994410531204e-15, 7.729703176242605e-16,
    -1.3348852171502517e-16, 2.4865952389390515e-17, -4.952892629886516e-18, 1.0473158973776097e-18, -2.336930172211422e-19,
)
J1_NEAR = (
    0.08104484632565812, -0.1489751450676521, 0.1609992623572097, -0.08268049176681791, 0.022213639654966037, -0.003646940600769276,
    0.0004050337728354822, -3.255554866857259e-05, 1.9858774049915165e-06, -9.521984756750436e-08, 3.687133759097148e-09, -1.178026622695885e-10,
    3.160154580348003e-12, -7.221755239651773e-14, 1.4232144003513942e-15, -2.4441972916190464e-17, 3.6912682997929334e-19,
)
Y1_NEAR = (
    0.0025380132357417816, -0.01608717304766875, -0.09591204536083074, 0.08445197259652346, -0.028328123944594365, 0.005289897544167113,
    -0.0006414551451326356, 5.505982873338744e-05, -3.53808001868935e-06, 1.7707804556154404e-07, -7.11055004989928e-09, 2.344337905911516e-10,
    -6.4651518414115946e-12, 1.51429151205002e-13, -3.0511859694473254e-15, 5.34668038572867e-17, -8.224911372021585e-19,
)
P1 = (
    1.0009030408600137, 0.0008989898330859408, -3.987284300488908e-06, 6.177633960644299e-08, -1.8718907491063067e-09, 8.816898659582339e-11,
    -5.704863640395645e-12, 4.699195515230542e-13, -4.6842237839904895e-14, 5.452674896044717e-15, -7.221180842274018e-16, 1.0667689114335412e-16,
    -1.7312313216116335e-17, 3.0492991197665872e-18,
)
Q1 = (
    0.3742222965562826, -0.0007702178839325664, 7.3108922063643636e-06, -1.676782510726674e-07, 6.583354662120443e-09, -3.749090950541556e-10,
    2.8121750359748866e-11, -2.61145253946232e-12, 2.8774212663332235e-13, -3.649001916061838e-14, 5.206626366226707e-15, -8.215318025458595e-16,
    1.4141084390211833e-16, -2.626761589838529e-17, 5.2192649196714085e-18, -1.101261718787959e-18,
)
# fmt: on

_J = ((J0_NEAR, Y0_NEAR, P0, Q0), (J1_NEAR, Y1_NEAR, P1, Q1))
_I = ((I0_NEAR, I0_FAR), (I1_NEAR, I1_FAR))


def _series(coefficients: tuple[float, ...], t: Array) -> Array:
    """The Chebyshev series of ``2 t - 1``, t in [0, 1], by Clenshaw's recurrence."""
    twice = 4.0 * t - 2.0
    b1 = b2 = np.zeros_like(t)
    for c in coefficients[:0:-1]:
        b1, b2 = twice * b1 - b2 + c, b1
    return 0.5 * twice * b1 - b2 + coefficients[0]


def _in_float64(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """`function` computed in float64, with results in the dtype of its argument; float64 of integers."""

    def compute(x: Array, /) -> Array:
        if x.dtype.kind == "c":
            raise TypeError("complex numbers, expected real ones")
        wanted = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
        with np.errstate(all="ignore"):
            return np.asarray(function(np.asarray(x, np.float64)), wanted)

    return compute


def _modified(order: int, *, scaled: bool) -> Callable[[Array], Array]:
    near, far = _I[order]

    def function(x: Array) -> Array:
        size = np.absolute(x)
        small = size <= 8.0
        value = np.where(small, _series(near, np.where(small, size, 8.0) / 8.0) * (x if order else 1.0), 0.0)
        large = np.where(small, 8.0, size)
        beyond = _series(far, 8.0 / large) / np.sqrt(large) * (np.sign(x) if order else 1.0)
        value = np.where(small, value, beyond)
        if scaled:
            return value
        half = np.exp(0.5 * size)  # in two steps, so that a representable result does not overflow on the way
        return value * half * half

    return _in_float64(function)


def _waves(order: int, size: Array) -> tuple[Array, Array, Array]:
    """P, Q and their factors: the amplitude, for arguments of at least 8."""
    _, _, p, q = _J[order]
    t = (8.0 / size) ** 2
    return _series(p, t), _series(q, t) / size, np.sqrt(1.0 / (math.pi * size))


def _turned(order: int, size: Array) -> tuple[Array, Array]:
    """The cosine and sine of t, times the root of 2."""
    cos, sin = np.cos(size), np.sin(size)
    return (cos + sin, sin - cos) if order == 0 else (sin - cos, -(sin + cos))


def _first_kind(order: int) -> Callable[[Array], Array]:
    def function(x: Array) -> Array:
        size = np.absolute(x)
        small = size <= 8.0
        near = _series(_J[order][0], (np.where(small, size, 8.0) / 8.0) ** 2) * (x if order else 1.0)
        large = np.where(small, 8.0, size)
        p, q, amplitude = _waves(order, large)
        cos, sin = _turned(order, large)
        far = np.where(np.isinf(large), 0.0, amplitude * (p * cos - q * sin)) * (np.sign(x) if order else 1.0)
        return np.where(small, near, far)

    return _in_float64(function)


def _second_kind(order: int) -> Callable[[Array], Array]:
    first = _first_kind(order)

    def function(x: Array) -> Array:
        small = x <= 8.0
        inside = np.where(small, x, 8.0)
        smooth = _series(_J[order][1], (inside / 8.0) ** 2)
        if order == 0:
            near = smooth + (2.0 / math.pi) * np.log(inside) * first(inside)
            near = np.where(inside == 0, -np.inf, near)
        else:
            near = smooth * inside + (2.0 / math.pi) * (np.log(inside) * first(inside) - 1.0 / inside)
            near = np.where(inside == 0, -np.inf, near)
        large = np.where(small, 8.0, x)
        p, q, amplitude = _waves(order, large)
        cos, sin = _turned(order, large)
        far = np.where(np.isinf(large), 0.0, amplitude * (p * sin + q * cos))
        return np.where(x < 0, np.nan, np.where(small, near, far))

    return _in_float64(function)


def _over(y: Array, x: Array, turn: float) -> Array:
    """``y / x`` of I1 (`turn` 1) or J1 (-1): near 0 by a series, since the derivatives of the quotient cancel there."""
    near = np.absolute(x) < 0.25
    square = where(near, x, 0)
    square = square * square * (0.25 * turn)
    series = 0.5 * (1 + square * (1 / 2) * (1 + square * (1 / 6) * (1 + square * (1 / 12) * (1 + square * (1 / 20) * (1 + square * (1 / 30))))))
    return where(near, series, y / where(near, 1, x))


def _i1e_vjp(g: Array, x: Array, out: Array) -> Array:
    size = np.absolute(x)
    shrink = np.exp(-where(size < 0.25, size, 0))  # the series gives I1(x) / x, without the factor of the scaled function
    return g * (i0e(x) - _over(out, x, 1.0) * shrink - np.sign(x) * out)


i0: Op = define("bessel_i0", _modified(0, scaled=False), x=lambda g, x: g * i1(x), jvp="rule", cost=150.0, numpy=(np.i0,))
i1: Op = define("bessel_i1", _modified(1, scaled=False), x=lambda g, x, out: g * (i0(x) - _over(out, x, 1.0)), jvp="rule", cost=200.0)
i0e: Op = define("bessel_i0e", _modified(0, scaled=True), x=lambda g, x, out: g * (i1e(x) - np.sign(x) * out), jvp="rule", cost=150.0)
i1e: Op = define(
    "bessel_i1e", _modified(1, scaled=True), x=_i1e_vjp, jvp="rule", cost=200.0
)
j0: Op = define("bessel_j0", _first_kind(0), x=lambda g, x: -(g * j1(x)), jvp="rule", cost=200.0)
j1: Op = define("bessel_j1", _first_kind(1), x=lambda g, x, out: g * (j0(x) - _over(out, x, -1.0)), jvp="rule", cost=250.0)
y0: Op = define("bessel_y0", _second_kind(0), x=lambda g, x: -(g * y1(x)), jvp="rule", cost=300.0)
y1: Op = define("bessel_y1", _second_kind(1), x=lambda g, x, out: g * (y0(x) - out / x), jvp="rule", cost=350.0)
