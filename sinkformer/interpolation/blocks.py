"""The blocks of a constructed network, as exact numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from sinkformer.errors import ModelError
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.rationals import fraction, rational
from sinkformer.interpolation.vectors import Functional, Row, Space, Vector, combination

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

Kind = Literal["hardmax", "softmax"]


@dataclass(frozen=True, eq=False)
class Block:
    """One block: ``x -> eta x + sum_k W_k relu(<U, x> + b_k)``, then ``x_i -> rho x_i + beta sum_l pi_il x_l``.

    The neurons of a block share one functional U. The attention's scores are ``<A x_i, x_l>`` with ``A = alpha I + p q^T``.

    Attributes:
        phase: what the block does.
        eta: factor of the identity in the feed-forward layer.
        rho: factor of the identity in the attention layer.
        beta: factor of the attended value.
        alpha: factor of the identity in A.
        functional: U.
        biases: the b_k.
        columns: the W_k; their rows of the data are targets.
        p: left vector of the rank-one part of A.
        q: right vector.
        causal: token i attends to the tokens ``l <= i`` only.
    """

    phase: str
    eta: Rational
    rho: Rational
    beta: Rational
    alpha: Rational
    functional: Functional = field(default_factory=dict)
    biases: tuple[Rational, ...] = ()
    columns: tuple[Vector, ...] = ()
    p: Functional = field(default_factory=dict)
    q: Functional = field(default_factory=dict)
    causal: bool = False

    @property
    def width(self) -> int:
        """Number of neurons."""
        return len(self.biases)

    @property
    def attends(self) -> bool:
        """Whether the attention layer does anything."""
        return self.beta != 0 or self.rho != 1

    @property
    def pools(self) -> bool:
        """Whether every token attends to all tokens that it sees alike: A = 0."""
        return self.alpha == 0 and not (self.p and self.q)

    def attending(self, rho: Rational, beta: Rational, alpha: Rational, p: Functional, q: Functional) -> Block:
        """The same feed-forward layer, followed by this attention."""
        return replace(self, rho=rho, beta=beta, alpha=alpha, p=p, q=q)

    def pieces(self) -> list[tuple[Rational | None, Rational | None, Vector, Vector]]:
        """The feed-forward layer as a piecewise affine map of ``s = <U, x>``.

        Returns:
            For every piece ``(lower, upper, slope, offset)``: where ``lower <= s <= upper``, x becomes
            ``eta x + slope s + offset``. None is an infinite end.
        """
        neurons = sorted(zip(self.biases, self.columns, strict=True), key=lambda neuron: -neuron[0])
        one = rational(1)
        kinks = [-bias for bias, _ in neurons]
        ends = [None, *kinks, None]
        slope: Vector = {}
        offset: Vector = {}
        found: list[tuple[Rational | None, Rational | None, Vector, Vector]] = [(None, ends[1], slope, offset)]
        for k, (bias, column) in enumerate(neurons):
            slope = combination([(one, slope), (one, column)])
            offset = combination([(one, offset), (bias, column)])
            found.append((ends[k + 1], ends[k + 2], slope, offset))
        return [piece for piece in found if piece[0] is None or piece[1] is None or piece[0] < piece[1]]


def feed_forward(
    phase: str, eta: Rational | int, functional: Functional, neurons: Sequence[tuple[Rational, Vector]]
) -> Block:
    """A block whose attention is the identity; a neuron is a bias and a column."""
    biases, columns = tuple(bias for bias, _ in neurons), tuple(column for _, column in neurons)
    return Block(phase, rational(eta), rational(1), rational(0), rational(0), functional, biases, columns)


def identity() -> Block:
    """The block that does nothing."""
    return feed_forward("identity", 1, {}, ())


def check_blocks(blocks: Sequence[Block], pairs: SequencePairs) -> None:
    """Whether blocks are maps of R^d at all: a column for every bias, coordinates below d, tokens that are in the data.

    Raises:
        ModelError: one is not.
    """
    for number, block in enumerate(blocks):
        if len(block.biases) != len(block.columns):
            raise ModelError(
                f"expected a column for every bias in block {number}, received {len(block.biases)} biases and "
                f"{len(block.columns)} columns; construct the network again"
            )
        coordinates = [*block.functional, *block.p, *block.q]
        bases = [basis for column in block.columns for basis in column]
        wrong = [basis for basis in coordinates if not _is_coordinate(basis, pairs)]
        wrong += [basis for basis in bases if not (_is_coordinate(basis, pairs) or _is_target(basis, pairs))]
        if wrong:
            raise ModelError(
                f"expected coordinates below {pairs.d} and tokens of the targets in block {number}, received {wrong[0]}; "
                "construct the network again"
            )


def _is_coordinate(basis: int | Row, pairs: SequencePairs) -> bool:
    return isinstance(basis, int) and 0 <= basis < pairs.d


def _is_target(basis: int | Row, pairs: SequencePairs) -> bool:
    if not isinstance(basis, Row) or basis.side != "Y" or not 0 <= basis.sequence < pairs.N:
        return False
    return 0 <= basis.token < len(pairs.Y[basis.sequence])


@dataclass(frozen=True)
class ExactBlock:
    """A block with every entry of its matrices, for checks that share no code with the construction.

    ``FF(x) = eta x + W relu(U x + b)``; ``SA_i(X) = rho x_i + beta sum_l pi_il x_l``, scores ``<(alpha I + p q^T) x_i, x_l>``.

    Attributes:
        phase: what the block does.
        kind: ``"hardmax"`` or ``"softmax"``.
        tau: temperature of the softmax.
        eta: a fraction.
        U: ``(width, d)`` rows of fractions.
        b: ``(width)``.
        W: ``(d, width)``.
        rho: a fraction.
        beta: a fraction.
        alpha: a fraction.
        p: ``(d)``.
        q: ``(d)``.
        causal: token i attends to the tokens ``l <= i`` only.
    """

    phase: str
    kind: Kind
    tau: Fraction
    eta: Fraction
    U: tuple[tuple[Fraction, ...], ...]
    b: tuple[Fraction, ...]
    W: tuple[tuple[Fraction, ...], ...]
    rho: Fraction
    beta: Fraction
    alpha: Fraction
    p: tuple[Fraction, ...]
    q: tuple[Fraction, ...]
    causal: bool = False


class ExactBlocks(Sequence[ExactBlock]):
    """The blocks of a network with all their entries, written out when asked for."""

    def __init__(self, blocks: Sequence[Block], space: Space, kind: Kind, tau: Rational):
        self._blocks, self._space, self._tau = blocks, space, fraction(tau)
        self._kind: Kind = kind

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def __getitem__(self, index):
        """Block ``index``, or a list of blocks for a slice."""
        if isinstance(index, slice):
            return [self[k] for k in range(len(self))[index]]
        block, dense = self._blocks[index], self._space.dense
        functional = dense(block.functional)
        columns = tuple(map(dense, block.columns))
        return ExactBlock(
            block.phase,
            self._kind,
            self._tau,
            fraction(block.eta),
            (functional,) * block.width,
            tuple(map(fraction, block.biases)),
            tuple(zip(*columns, strict=True)) if columns else ((),) * self._space.pairs.d,
            fraction(block.rho),
            fraction(block.beta),
            fraction(block.alpha),
            dense(block.p),
            dense(block.q),
            block.causal,
        )
