"""``construct``: runs the phases, keeps the ledger, pads to the theorem's number of blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from math import nextafter
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from sinkformer.errors import ConfigError, DTypeError, NonFiniteError, SinkformerError
from sinkformer.interpolation.blocks import Block, Kind, identity
from sinkformer.interpolation.comparison import theorem_blocks
from sinkformer.interpolation.datasets import SequencePairs, number
from sinkformer.interpolation.exporting import unit_roundoff
from sinkformer.interpolation.interpolants import Interpolant
from sinkformer.interpolation.ledger import Entry, Ledger, entry
from sinkformer.interpolation.phases.collapse import collapse
from sinkformer.interpolation.phases.groups import Group, cut, knots, lattice, ramps_below
from sinkformer.interpolation.phases.leaders import select_leaders
from sinkformer.interpolation.phases.projection import ceiling, project
from sinkformer.interpolation.phases.reduction import reduce_to_line
from sinkformer.interpolation.phases.separation import Statistic, separate
from sinkformer.interpolation.phases.targets import interpolate, ramps_at
from sinkformer.interpolation.rationals import floor_power, fraction, nearest, rational
from sinkformer.interpolation.vectors import vector

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

Method = Literal["auto", "paper", "direct", "two-pass", "knots"]
Request = Literal["for_float", "for_float32", "for_exact"]

# What a request asks of the weights: an error of max |Y|, in units of the roundoff of the format.
_FLOAT_ERROR = 1000


def construct(
    X: Iterable[Any] | SequencePairs,
    Y: Iterable[Any] | None = None,
    *,
    attention: Kind = "hardmax",
    method: Method = "auto",
    request: Request = "for_float",
    statistic: Statistic = "mean",
    tau: float | Fraction | None = None,
    seed: int = 0,
) -> Interpolant:
    """Write down a transformer that maps every sequence X_j to Y_j, as sets, exactly (arXiv 2502.02270).

    Methods, with K the number of all target tokens, N of pairs, and S <= ceil(N / 4) the blocks that separate the sequences:

    - ``"paper"``: the four phases of the paper, padded to its number of blocks: Theorem 1.6, hardmax, ``2K + 2N + 1``;
      Theorem 1.8, softmax at every temperature up to tau*, ``2K + 3N``. Needs ``d >= 2``.
    - ``"direct"``: ours. Neighbourhoods on a line go to their targets, two in a block: ``max(1, S) + ceil(K / 2)`` blocks, any d,
      hardmax and softmax at every temperature.
    - ``"two-pass"``: first to an even lattice, one neighbourhood a block, then to the targets, two a block:
      ``max(1, S) + K + ceil(K / 2)`` blocks, which survive rounding to floats where the data do.
    - ``"knots"``: piecewise linear maps with four knots a block. The fewest blocks, for exact work.
    - ``"auto"``: for exact work the smaller of direct and knots; for floats the first of direct and two-pass whose predicted
      error is at most 1000 roundings of max |Y|, and else the one with the smaller prediction (``predicted_error`` tells).

    Args:
        X: N sequences ``(n_j, d)``, or ``SequencePairs``.
        Y: N targets ``(m_j, d)`` with ``m_j <= n_j``; None if X is ``SequencePairs``.
        attention: ``"hardmax"`` or ``"softmax"``.
        method: see above.
        request: what ``"auto"`` is for: ``"for_float"``, weights in float64; ``"for_float32"``; or ``"for_exact"``.
        statistic: what separates the sequences, the ``"mean"``, or the ``"max"`` of the paper (paper, hardmax only).
        tau: temperature of the softmax; by default tau*, or 1 where every temperature will do. Where it is above tau*,
            the scores of the collapse are scaled instead.
        seed: of the candidates for the functional that tells the tokens apart.

    Raises:
        ShapeError, NonFiniteError, DTypeError, DatasetError: of ``SequencePairs``.
        ConfigError: an unknown option, or options that contradict each other.
        MissingExtraError: python-flint is not installed.
    """
    pairs = pairs_of(X, Y)
    wanted = None if tau is None else _temperature(tau)
    _check(pairs, attention, method, request, statistic, wanted, seed)
    if method == "auto":
        return _smallest(pairs, attention, request, wanted, seed)
    return _build(pairs, attention, method, statistic, wanted, seed)


def _temperature(tau: Any) -> Rational:
    try:
        value = number(tau)
    except NonFiniteError:
        value = Fraction(0)
    except DTypeError as error:
        raise ConfigError(f"tau: {error}") from None
    if value > 0 and not isinstance(tau, str):
        return rational(value)
    received = str(tau) if isinstance(tau, Fraction) else repr(tau)
    raise ConfigError(
        f"expected a positive, finite temperature tau, received {received}; hardmax is the limit tau -> 0"
    )


def pairs_of(X: Iterable[Any] | SequencePairs, Y: Iterable[Any] | None) -> SequencePairs:
    """The data, given as sequences or as ``SequencePairs``.

    Raises:
        ShapeError, NonFiniteError, DTypeError, DatasetError: of ``SequencePairs``.
        ConfigError: ``SequencePairs`` and ``Y``, or neither.
    """
    if isinstance(X, SequencePairs):
        if Y is not None:
            raise ConfigError(
                "expected SequencePairs alone, received Y too; give X and Y as sequences, or only the pairs"
            )
        return X
    if Y is None:
        raise ConfigError("expected Y, received None; give the targets, or SequencePairs")
    return SequencePairs(X, Y)


def _check(
    pairs: SequencePairs, attention: str, method: str, request: str, statistic: str, tau: Rational | None, seed: int
) -> None:
    for name, value, allowed in (
        ("attention", attention, get_args(Kind)),
        ("method", method, get_args(Method)),
        ("request", request, get_args(Request)),
        ("statistic", statistic, get_args(Statistic)),
    ):
        check_choice(name, value, allowed)
    check_seed(seed)
    if tau is not None and attention == "hardmax":
        raise ConfigError(f"expected no temperature for hardmax, received tau={fraction(tau)}; use attention='softmax'")
    if method == "paper" and pairs.d < 2:
        raise ConfigError(
            "the construction of the paper needs d >= 2, received d = 1; use method='direct', or add a coordinate"
        )
    if statistic == "max" and (method != "paper" or attention == "softmax"):
        raise ConfigError(
            "the maximum as the separating statistic belongs to method='paper' with hardmax, received "
            f"method={method!r}, attention={attention!r}; use statistic='mean'"
        )


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError if an option is none of those allowed."""
    if value not in allowed:
        raise ConfigError(f"expected {name} to be one of {', '.join(map(repr, allowed))}, received {value!r}")


def check_seed(seed: Any) -> None:
    """Raise ConfigError if a seed is not a whole number >= 0."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"expected seed as a whole number >= 0, received {seed!r}; give one, such as 0")


def _smallest(pairs: SequencePairs, kind: Kind, request: Request, tau: Rational | None, seed: int) -> Interpolant:
    """The method with the fewest blocks that meets the request; if none does, the one that comes nearest."""
    if request == "for_exact":
        return min((_build(pairs, kind, m, "mean", tau, seed) for m in ("direct", "knots")), key=lambda built: built.L)
    dtype = torch.float32 if request == "for_float32" else torch.float64
    enough = _FLOAT_ERROR * unit_roundoff(dtype)
    found: list[tuple[float, Interpolant]] = []
    for method in ("direct", "two-pass"):
        built = _build(pairs, kind, method, "mean", tau, seed)
        found.insert(0, (built.predicted_error(dtype), built))
        if found[0][0] <= enough:
            return built
    return min(found, key=lambda pair: pair[0])[1]


def _build(
    pairs: SequencePairs, kind: Kind, method: str, statistic: Statistic, tau: Rational | None, seed: int
) -> Interpolant:
    if method == "paper":
        return _paper(pairs, kind, statistic, tau, seed)
    return _direct(pairs, kind, method, tau, seed)


def _paper(pairs: SequencePairs, kind: Kind, statistic: Statistic, tau: Rational | None, seed: int) -> Interpolant:
    line, reduced = reduce_to_line(pairs, rational(0), rational(1), rational(1, 2), seed)
    separating, tokens, separated = separate(line, statistic, pool=False)
    leading, places, led = select_leaders(pairs, tokens)
    leading[-1], star, collapsed = collapse(leading[-1], tokens, places)
    projecting, stops, gap, projected = project(pairs, places)
    moving, moved = interpolate(ramps_at(stops, gap), 1, ceiling(pairs))
    used = [*separating, *leading, projecting, *moving]
    length = theorem_blocks(N=pairs.N, K=pairs.K, kind=kind)
    padding = entry("padding", length - len(used), "identity blocks, to the number of the theorem", {"used": len(used)})
    entries = (reduced, separated, led, collapsed, projected, moved, padding)
    blocks = (*used, *[identity()] * (length - len(used)))
    return _at_temperature(pairs, kind, "paper", blocks, entries, star, tau)


def _direct(pairs: SequencePairs, kind: Kind, method: str, tau: Rational | None, seed: int) -> Interpolant:
    blocks, entries = {"direct": _one_pass, "two-pass": _two_pass, "knots": _by_knots}[method](pairs, seed)
    return _at_temperature(pairs, kind, method, tuple(blocks), tuple(entries), None, tau)


def _one_pass(pairs: SequencePairs, seed: int) -> tuple[list[Block], list[Entry]]:
    top = ceiling(pairs)
    blocks, entries, groups = _grouped(pairs, top, pairs.scale, rational(1, 16), seed)
    last, moved = interpolate(ramps_below(groups, [{group.target: rational(1)} for group in groups]), 2, top)
    return [*blocks, *last], [*entries, moved]


def _two_pass(pairs: SequencePairs, seed: int) -> tuple[list[Block], list[Entry]]:
    """The lattice lies between the targets and the box."""
    scale, top = pairs.scale, ceiling(pairs)
    blocks, entries, groups = _grouped(pairs, top + scale / 2, 4 * scale, rational(1, 4), seed)
    stops, gap = lattice(groups, top, scale)
    spreading, spread = interpolate(ramps_below(groups, [vector(stop.t) for stop in stops]), 1, stops[0].t, "lattice")
    last, moved = interpolate(ramps_at(stops, gap), 2, top)
    return [*blocks, *spreading, *last], [*entries, spread, moved]


def _by_knots(pairs: SequencePairs, seed: int) -> tuple[list[Block], list[Entry]]:
    blocks, entries, groups = _grouped(pairs, ceiling(pairs), pairs.scale, rational(1, 16), seed)
    last, moved = knots(groups, max(y.largest_first for y in pairs.Y))
    return [*blocks, *last], [*entries, moved]


def _grouped(
    pairs: SequencePairs, floor: Rational, unit: Rational, start: Rational, seed: int
) -> tuple[list[Block], list[Entry], list[Group]]:
    """Neighbourhoods on a line above the floor, in decreasing order."""
    line, reduced = reduce_to_line(pairs, ceiling(pairs), unit, start, seed)
    blocks, tokens, separated = separate(line, "mean", pool=pairs.m == 1)
    groups, grouped = cut(pairs, tokens, floor)
    return blocks, [reduced, separated, grouped], groups


def _at_temperature(
    pairs: SequencePairs,
    kind: Kind,
    method: str,
    blocks: tuple[Block, ...],
    entries: tuple[Entry, ...],
    star: Rational | None,
    tau: Rational | None,
) -> Interpolant:
    """The network at the temperature that was asked for: above tau* its scores are scaled by a power of two."""
    if kind == "softmax" and star is not None and tau is not None and tau > star:
        alpha = floor_power(tau / star)
        alpha = alpha if alpha * star >= tau else 2 * alpha
        blocks = tuple(replace(block, alpha=alpha) if block.alpha != 0 else block for block in blocks)
        entries = tuple(_scaled(found, alpha) if found.phase == "collapse" else found for found in entries)
        star = alpha * star
    if tau is None:
        tau = rational(1) if star is None else _rounded_down(star)
    ledger = Ledger(entries)
    if not ledger.holds:
        raise SinkformerError(f"a phase does not satisfy its inequality, which is a defect of sinkformer:\n{ledger}")
    limit = fraction(star) if kind == "softmax" and star is not None else None
    return Interpolant(pairs, kind, fraction(tau), limit, method, blocks, ledger)


def _scaled(found: Entry, alpha: Rational) -> Entry:
    factor = fraction(alpha)
    constants = {**found.constants, "alpha": factor, "tau*": found.constants["tau*"] * factor}  # type: ignore[operator]
    return replace(
        found,
        constants=constants,
        larger=None if found.larger is None else found.larger * factor,
    )


def _rounded_down(value: Rational) -> Rational:
    """The largest float that is at most a positive value, exactly."""
    found = nearest(value)
    return rational(found if rational(found) <= value else nextafter(found, 0.0))
