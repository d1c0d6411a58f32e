"""Verification: is ``T(X_j) = Y_j``, as sets, for every pair? Exact, and never torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from sinkformer.interpolation.blocks import Block, Kind, check_blocks
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.following import Box, Following, Form, Interval, UndecidedError
from sinkformer.interpolation.rationals import library, rational
from sinkformer.interpolation.vectors import Row

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

_ATTEMPTS = (
    (128, False),
    (128, True),
    (512, True),
    (2048, True),
    (8192, True),
)  # bits, and whether weights are enclosed


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check; true if the equality is proved.

    Attributes:
        status: ``"proved"``, ``"refuted"``, or ``"undecided"``.
        reason: why, in words.
        precision: bits of the enclosures that decided; None if all was rational.
    """

    status: Literal["proved", "refuted", "undecided"]
    reason: str
    precision: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Texts and a number, for JSON."""
        return asdict(self)

    def __bool__(self) -> bool:
        """Whether the equality is proved."""
        return self.status == "proved"

    def __str__(self) -> str:
        """One line."""
        how = "rational arithmetic" if self.precision is None else f"enclosures of {self.precision} bits"
        return f"{self.status} ({how}): {self.reason}"


@dataclass(frozen=True, eq=False)
class Certificate:
    """A network and the data it shall interpolate, both exact.

    Attributes:
        pairs: the data.
        blocks: the network.
        kind: ``"hardmax"`` or ``"softmax"``.
        tau: temperature of the softmax.

    Raises:
        ModelError: blocks that are no maps of R^d, or name tokens that are not in the data.
    """

    pairs: SequencePairs
    blocks: Sequence[Block]
    kind: Kind
    tau: Rational

    def __post_init__(self):
        """Check that the blocks are maps of R^d: nothing may hide from the verification."""
        check_blocks(self.blocks, self.pairs)

    def check(self) -> Verdict:
        """Whether ``T(X_j) = Y_j`` as sets, for all j (arXiv 2502.02270, Theorems 1.6 and 1.8).

        Hardmax, and a softmax of equal scores, is rational arithmetic: proved or refuted. Any other softmax is enclosed, more
        and more tightly, until the equality is proved, or a token is certainly off its targets, or 8192 bits do not
        decide. A proof is never wrong.

        The answer is kept: a second call costs nothing.

        Raises:
            MissingExtraError: python-flint is not installed.
        """
        return self._verdict

    @cached_property
    def _verdict(self) -> Verdict:
        return self.decided(lambda run, bits: _compared(run, self.pairs, bits))

    def decided(self, compare: Callable[[Following, int | None], Verdict]) -> Verdict:
        """Follow all tokens to the end, with ever tighter enclosures until ``compare`` decides.

        Args:
            compare: the verdict on a finished run, and the bits of its enclosures, None if all is rational.

        Raises:
            MissingExtraError: python-flint is not installed.
        """
        verdict = Verdict("undecided", "nothing was checked")
        for bits, sharp in _ATTEMPTS:
            with library().ctx.workprec(bits):
                verdict = self._attempt(bits, sharp, compare)
            if verdict.status != "undecided":
                break
        return verdict

    def _attempt(self, bits: int, sharp: bool, compare: Callable[[Following, int | None], Verdict]) -> Verdict:
        run = Following(self.pairs, self.kind, self.tau, bits, sharp)
        for number, block in enumerate(self.blocks):
            try:
                run.step(block)
            except UndecidedError as reason:
                return Verdict("undecided", f"block {number} ({block.phase}): {reason}", bits)
        return compare(run, bits if run.enclosed else None)


def _compared(run: Following, pairs: SequencePairs, bits: int | None) -> Verdict:
    """The final tokens against the targets."""
    open_end: str | None = None
    for j, sequence in enumerate(run.sequences):
        rows = {pairs.Y[j].row(k): k for k in range(len(pairs.Y[j]))} if _strays(run, j) else {}
        reached: set[int] = set()
        for number in sequence:
            token = run.tokens[number]
            if isinstance(token, Form) and token.exact:
                k = _target(run, token, j, rows)
                if k is None:
                    return Verdict("refuted", f"{run.place(number)} ends at none of the targets Y[{j}]", bits)
                reached.add(k)
            elif leaves_out(run, token, map(pairs.Y[j].row, range(len(pairs.Y[j])))):
                return Verdict("refuted", f"{run.place(number)} certainly ends at none of the targets Y[{j}]", bits)
            else:
                open_end = f"{run.place(number)} ends in an enclosure that does not say whether it is a target"
        if open_end is None and len(reached) < len(pairs.Y[j]):
            missing = min(set(range(len(pairs.Y[j]))) - reached)
            return Verdict("refuted", f"no token of X[{j}] ends at Y[{j}][{missing}]", bits)
    if open_end is not None:
        return Verdict("undecided", open_end, bits)
    return Verdict("proved", f"all {pairs.N} sequences equal their targets, {pairs.K} tokens, as sets", bits)


def _strays(run: Following, j: int) -> bool:
    """Whether some token of a sequence is not written as one of its targets."""
    return any(_written(run.tokens[number], j) is None for number in run.sequences[j])


def _written(token: Form | Box, j: int) -> int | None:
    """The target, if the token is written as one."""
    if isinstance(token, Form) and token.exact and len(token.point) == 1:
        basis, coefficient = next(iter(token.point.items()))
        if isinstance(basis, Row) and basis.side == "Y" and basis.sequence == j and coefficient == 1:
            return basis.token
    return None


def _target(run: Following, token: Form, j: int, rows: dict[tuple[Fraction, ...], int]) -> int | None:
    written = _written(token, j)
    return written if written is not None else rows.get(run.space.dense(token.point))


def leaves_out(run: Following, token: Form | Box, points: Iterable[Sequence[Fraction]]) -> bool:
    """Whether the enclosure of a token excludes every one of these points."""
    sides = _sides(run, token)
    zero = (rational(0), rational(0))
    for point in points:
        ends = [sides.get(i, zero) for i in range(len(point))]
        if all(low <= rational(value) <= high for value, (low, high) in zip(point, ends, strict=True)):
            return False
    return True


def _sides(run: Following, token: Form | Box) -> dict[int | Row, Interval]:
    if isinstance(token, Box):
        return token.sides
    point, direction = run.space.coordinates(token.point), run.space.coordinates(token.direction)
    zero = rational(0)
    low, high = token.theta or (zero, zero)
    found: dict[int | Row, Interval] = {}
    for i in point.keys() | direction.keys():
        ends = sorted(point.get(i, zero) + end * direction.get(i, zero) for end in (low, high))
        found[i] = (ends[0], ends[1])
    return found
