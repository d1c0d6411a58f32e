"""Causal interpolation: every token sees itself and the tokens before it (ours; the attention of the paper sees all tokens).

The output at token i is then a function of the prefix ``(x_1, ..., x_i)``, and sequences are ordered. The prefixes of all
sources are the nodes v of a tree: let |v| be the length of a prefix, J(v) the sequences that begin with it, and A(v) the
intersection of their targets ``Y_j``. Along a path from the root J(v) shrinks, and A(v) grows.

**Proposition.** These are equivalent:

(a) some causal map T, a transformer of any kind and size among them, has ``{T_1(X_j), ..., T_n(X_j)} = Y_j`` for all j;

(b) there is a target f(v) in A(v) for every node, such that on the path of every j all of ``Y_j`` occurs;

(c) for every node v and every j in J(v): A(v) is not empty, and ``m_j <= |A(v)| + n_j - |v|``.

*Proof.* (a) implies (b): f(v) is the output of T at the last token of v. It is the same for all j in J(v), thus in A(v).
(b) implies (c): the first |v| tokens of j have targets in A(v), because A grows along the path, and each of the other
``n_j - |v|`` adds one target at most. (c) implies (b): from the root down, let f(v) be an element of A(v) that no node above v
has, if there is one, and otherwise any. Then the number of targets on the path down to v is ``c(v) = min(c(above v) + 1,
|A(v)|)``, since all of them are in A(v). So at the end of j it is the smallest of ``n_j`` and all ``|A(v)| + n_j - |v|``, thus
at least ``m_j``; they are in ``Y_j``, thus all of it. (b) implies (a) by the construction below.

The choice in the last step does not matter, so that the greedy assignment decides, without search, whether there is one.

**Construction.** A functional carries the tokens to a line, node v to ``t(v) = <a, x_|v|> + o``. A *round* is causal mean
pooling, attention with ``A = 0``: ``t(v) -> rho t(v) + (1 - rho) phi(v)``, where phi(v) is the mean of t over the prefixes of
v. It is the same for hardmax and softmax, at every temperature. Nodes in one place part if their means differ; nodes in two
places v, w stay apart unless ``rho / (1 - rho) = (phi(w) - phi(v)) / (t(v) - t(w))``, which excludes finitely many rho. If no two
nodes in one place have different means, a feed-forward step ``t -> t - relu(t - c) / 2`` precedes the round in its block.

**Lemma.** While some place holds two nodes, there is a c after which a round parts two nodes of one place. Hence the rounds end,
after ``S <= V - D`` of them, for V nodes and D different tokens.

*Proof.* If there is none, nodes v, w in one place have the same measure, uniform on the places of their prefixes, as for sets
in ``phases.separation``. The nodes of one path are always in different places: at first because the tokens of a sequence
differ, and later because rounds merge nothing. So the measures say that ``|v| = |w|``, and that every prefix of v shares its
place with one of w, which by the same argument has the same length. Places only become finer, thus v and w have the same token
at every length: ``v = w``. The first round has D places, and each adds at least one.

Measures instead of means would need two rounds: the first knows the set of tokens of a prefix, and with it the length; the second
all pairs of a token and its place, which is the prefix. Means do as well for data in general position: no round if no token
follows two different prefixes, one if no two prefixes with the same last token are the same set, else two.

Separation stops as soon as no place holds two different targets. Then ramps carry the line to the targets, from the top down,
two in a block; neighbours with one target share a ramp. R ramps cost ``ceil(R / 2)`` blocks, where R is between the number of
different targets and V: a causal network pays for prefixes, ``construct`` for the K targets. G further rounds are added where
they save more blocks than they cost: *gathering*, with rho = 0. They have the eigenvalues 1/m and the eigenvectors
``binom(i - 1, m - 1)`` on a path, m = 1, 2, ...; so after k of them ``t_i = t_1 + (t_2 - t_1) (i - 1) / 2^k + O(3^-k)``. If
sources begin with different tokens, each comes to be alone around its first one, in order, and ``R = K`` in the end. If they
all begin with one token, their nodes stay interleaved. In all, ``L = max(1, S + G) + ceil(R / 2) <= max(1, S) + ceil(V / 2)``.

``SequencePairs`` forbids sources that are equal as sets and differ in order. Causal networks could tell them apart; to give such
data, mark the order in a coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from sinkformer.errors import ConfigError, DatasetError, SinkformerError
from sinkformer.interpolation.blocks import Block, Kind
from sinkformer.interpolation.construction import check_choice, check_seed, pairs_of
from sinkformer.interpolation.datasets import Key, SequencePairs
from sinkformer.interpolation.following import Following, Form
from sinkformer.interpolation.interpolants import Interpolant
from sinkformer.interpolation.ledger import Entry, Ledger, entry
from sinkformer.interpolation.phases.groups import grouped, ramps_below
from sinkformer.interpolation.phases.projection import ceiling
from sinkformer.interpolation.phases.reduction import Line, reduce_to_line
from sinkformer.interpolation.phases.separation import Move, Round, blocks_of
from sinkformer.interpolation.phases.targets import interpolate
from sinkformer.interpolation.rationals import rational
from sinkformer.interpolation.vectors import Row
from sinkformer.interpolation.verification import Verdict, leaves_out

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

Assignment = Sequence[Sequence[int]]
"""For every sequence the number of a target for each of its tokens."""

_SHARES = 16  # rho is tried in multiples of one over it, and finer ones if all of them merge places
_KINKS = 64
_PATIENCE = 12  # rounds of gathering that do not pay, before it is given up


def construct_causal(
    X: Iterable[Any] | SequencePairs,
    Y: Iterable[Any] | None = None,
    *,
    attention: Kind = "hardmax",
    assignment: Assignment | None = None,
    seed: int = 0,
) -> Interpolant:
    """Write down a causal transformer with ``{T_1(X_j), ..., T_n(X_j)} = Y_j`` for all j, exactly.

    Token i attends to the tokens ``l <= i`` only; the order of the tokens of a source counts. The network is the same for hardmax
    and for softmax at every temperature, and works for any d.

    Args:
        X: N sequences ``(n_j, d)``, or ``SequencePairs``.
        Y: N targets ``(m_j, d)`` with ``m_j <= n_j``; None if X is ``SequencePairs``.
        attention: ``"hardmax"`` or ``"softmax"``.
        assignment: which target every token goes to, as ``assign`` returns it; found if None. For a token to predict the next
            one, Y_j holds the different tokens that follow. ``check_tokens`` proves that it is respected.
        seed: of the candidates for the functional that tells the tokens apart.

    Returns:
        An ``Interpolant`` of method ``"causal"``, with ``max(1, S + G) + ceil(R / 2)`` blocks of width 4 or less: S and G rounds
        of separation and gathering, R ramps, as in its ledger.

    Raises:
        ShapeError, NonFiniteError, DTypeError, DatasetError: of ``SequencePairs``.
        DatasetError: no causal map whatever has these targets, or not with this assignment.
        ConfigError: an unknown option, or no assignment of targets to tokens.
        MissingExtraError: python-flint is not installed.
    """
    pairs = pairs_of(X, Y)
    check_choice("attention", attention, get_args(Kind))
    check_seed(seed)
    trie = Trie(pairs)
    found = _feasible(pairs, trie)
    goals = _goals(pairs, trie, _assigned(pairs, trie) if assignment is None else assignment)
    top = ceiling(pairs)
    line, reduced = reduce_to_line(pairs, top, pairs.scale, rational(1, 16), seed)
    separating, places, separated = _separate(trie, line, goals)
    groups, cut = grouped(_runs(places, goals), top, "no place holds two targets", {"nodes": len(trie)})
    moving, moved = interpolate(ramps_below(groups, [{group.target: rational(1)} for group in groups]), 2, top)
    blocks = tuple(replace(block, causal=True) for block in (*separating, *moving))
    ledger = Ledger((found, reduced, separated, cut, moved))
    return Interpolant(pairs, attention, Fraction(1), None, "causal", blocks, ledger)


def assign(pairs: SequencePairs) -> list[list[int]]:
    """The number of a target for every token of every sequence, the same for equal prefixes, such that all targets occur.

    From the first token on, a token takes a target that none before it has, if the sequences that share its prefix have one in
    common.

    Raises:
        DatasetError: there is no such assignment, thus no causal map with these targets.
    """
    trie = Trie(pairs)
    _feasible(pairs, trie)
    return _assigned(pairs, trie)


def check_tokens(built: Interpolant, assignment: Assignment) -> Verdict:
    """Whether token i of ``X_j`` ends at target ``assignment[j][i]`` of ``Y_j``, for all i and j: more than equality of sets.

    Works for any ``Interpolant``, by the arithmetic of ``Certificate.check``.

    Raises:
        ConfigError: no assignment of targets to tokens.
        MissingExtraError: python-flint is not installed.
    """
    pairs = built.pairs
    wanted = list(_numbers(pairs, assignment))

    def compare(run: Following, bits: int | None) -> Verdict:
        open_end: str | None = None
        for j, i, k in wanted:
            number = run.sequences[j][i]
            token, target = run.tokens[number], pairs.Y[j].row(k)
            if isinstance(token, Form) and token.exact:
                off = run.space.dense(token.point) != target
            else:
                off = leaves_out(run, token, [target])
                open_end = f"{run.place(number)} ends in an enclosure that does not say whether it is Y[{j}][{k}]"
            if off:
                return Verdict("refuted", f"{run.place(number)} does not end at Y[{j}][{k}]", bits)
        if open_end is not None:
            return Verdict("undecided", open_end, bits)
        return Verdict("proved", f"all {pairs.M} tokens end at the targets assigned to them", bits)

    return built.certificate.decided(compare)


class Trie:
    """The prefixes of all sources, every one once, those of a prefix before it.

    Attributes:
        parents: for every node the number of the prefix without its last token; -1 if it has no other token.
        depths: its number of tokens.
        members: the sequences that begin with it, in order.
        common: the targets that all of them have.
        paths: for every sequence the nodes of its tokens.
    """

    def __init__(self, pairs: SequencePairs):
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.members: list[list[int]] = []
        self.paths: list[list[int]] = []
        known: dict[tuple[int, Key], int] = {}
        for j, x in enumerate(pairs.X):
            path, v = [], -1
            for depth, key in enumerate(x.keys, 1):
                parent, v = v, known.setdefault((v, key), len(known))
                if v == len(self.parents):
                    self.parents.append(parent)
                    self.depths.append(depth)
                    self.members.append([])
                self.members[v].append(j)
                path.append(v)
            self.paths.append(path)
        targets = [frozenset(y.keys) for y in pairs.Y]
        self.common = [frozenset.intersection(*(targets[j] for j in members)) for members in self.members]

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self.parents)

    def means(self, values: Sequence[Rational]) -> list[Rational]:
        """For every node the mean of the values of its prefixes, itself included."""
        sums: list[Rational] = []
        for value, parent in zip(values, self.parents, strict=True):
            sums.append(value if parent < 0 else sums[parent] + value)
        return [total / depth for total, depth in zip(sums, self.depths, strict=True)]


# -- targets for the nodes


def _feasible(pairs: SequencePairs, trie: Trie) -> Entry:
    """Condition (c) of the proposition, at every node."""
    sides: list[tuple[int, int]] = []
    for v, common in enumerate(trie.common):
        if not common:
            raise DatasetError(_nothing_in_common(pairs, trie.members[v], trie.depths[v]))
        for j in trie.members[v]:
            needed, left = len(pairs.Y[j]), len(pairs.X[j]) - trie.depths[v]
            if needed > len(common) + left:
                raise DatasetError(_too_few(pairs, trie.members[v], trie.depths[v], j, len(common)))
            sides.append((needed, len(common) + left + 1))
    needed, room = min(sides, key=lambda pair: pair[1] - pair[0])
    return entry(
        "prefixes",
        0,
        "sequences with a common prefix have common targets, enough for it",
        {"nodes": len(trie), "of tokens": pairs.M},
        "m_j < |A(v)| + n_j - |v| + 1",
        (rational(needed), rational(room)),
    )


def _assigned(pairs: SequencePairs, trie: Trie) -> list[list[int]]:
    """What ``assign`` returns, where condition (c) holds."""
    chosen: list[Key] = []
    used: list[frozenset[Key]] = []
    for v, parent in enumerate(trie.parents):
        before = used[parent] if parent >= 0 else frozenset()
        order = pairs.Y[trie.members[v][0]].keys
        fresh = next((key for key in order if key in trie.common[v] and key not in before), None)
        chosen.append(chosen[parent] if fresh is None else fresh)  # a root has something fresh
        used.append(before | {chosen[v]})
    return [[y.keys.index(chosen[v]) for v in path] for y, path in zip(pairs.Y, trie.paths, strict=True)]


def _nothing_in_common(pairs: SequencePairs, members: list[int], depth: int) -> str:
    def apart(pair: tuple[int, int]) -> bool:
        return set(pairs.Y[pair[0]].keys).isdisjoint(pairs.Y[pair[1]].keys)

    named = next(filter(apart, combinations(members, 2)), members)
    return (
        f"expected sequences that begin alike to have a target in common, received {_names(named)} with {_tokens(depth)} in "
        f"common and no target: no causal transformer has two outputs for one prefix; {_REMEDY}"
    )


def _too_few(pairs: SequencePairs, members: list[int], depth: int, j: int, common: int) -> str:
    left = len(pairs.X[j]) - depth
    return (
        f"expected room for all targets of X[{j}], received {_names(members)}, which begin with the same {_tokens(depth)} and "
        f"have {common} of their targets in common: these tokens and the {left} that follow in X[{j}] reach at most "
        f"{common + left} of its {len(pairs.Y[j])} targets, in any causal transformer; {_REMEDY}"
    )


_REMEDY = "begin the sequences with different tokens, or use construct, where every token sees the whole sequence"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _names(members: Sequence[int]) -> str:
    shown = ", ".join(f"X[{j}]" for j in members[:4])
    return shown if len(members) <= 4 else f"{shown} and {len(members) - 4} more"


def _numbers(pairs: SequencePairs, assignment: Assignment) -> Iterator[tuple[int, int, int]]:
    """All ``(sequence, token, target)``, checked."""
    remedy = "give every sequence a list with the number of a target for each of its tokens, and leave no target out"
    try:
        given = [list(numbers) for numbers in assignment]
    except TypeError:
        raise ConfigError(f"expected an assignment as lists of numbers, received {assignment!r}; {remedy}") from None
    if len(given) != pairs.N:
        raise ConfigError(f"expected an assignment for {pairs.N} sequences, received {len(given)}; {remedy}")
    for j, (x, y, numbers) in enumerate(zip(pairs.X, pairs.Y, given, strict=True)):
        if len(numbers) != len(x):
            raise ConfigError(f"expected {len(x)} numbers in assignment[{j}], received {len(numbers)}; {remedy}")
        for k in numbers:
            if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 0 <= k < len(y):
                raise ConfigError(
                    f"expected numbers from 0 to {len(y) - 1} in assignment[{j}], received {k!r}; {remedy}"
                )
        missing = set(range(len(y))) - set(numbers)
        if missing:
            raise ConfigError(
                f"expected all targets of Y[{j}] in assignment[{j}], received none of number {min(missing)}; {remedy}"
            )
        yield from ((j, i, int(k)) for i, k in enumerate(numbers))


def _goals(pairs: SequencePairs, trie: Trie, assignment: Assignment) -> list[Row]:
    """The target of every node, equal targets of different sequences under one name."""
    goals: dict[int, Row] = {}
    names: dict[Key, Row] = {}
    for j, i, k in _numbers(pairs, assignment):
        v = trie.paths[j][i]
        row = Row("Y", j, k)
        goal = names.setdefault(pairs.Y[j].keys[k], row)
        if goals.setdefault(v, goal) != goal:
            first = trie.members[v][0]
            raise DatasetError(
                f"expected one target for one prefix, received two for the first {_tokens(i + 1)} of X[{first}] and X[{j}]: "
                f"{assignment[first][i]} of Y[{first}] and {k} of Y[{j}]; assign finds targets that fit, if there are any"
            )
    return [goals[v] for v in range(len(trie))]


# -- separation


def _separate(trie: Trie, line: Line, goals: list[Row]) -> tuple[list[Block], list[Rational], Entry]:
    """Blocks after which no place of the line holds nodes of two targets, and where they are."""
    t = [line.tokens[members[0]][depth - 1] for members, depth in zip(trie.members, trie.depths, strict=True)]
    bound = len(trie) - len(set(t))
    rounds: list[Round] = []
    while _mixed(t, goals):
        move, phi = Move(), trie.means(t)
        if _parted(t, phi) == len(set(t)):
            move = _bend(trie, t)
            t = list(map(move, t))
            phi = trie.means(t)
        rho = _share(t, phi)
        t = _pooled(t, phi, rho)
        rounds.append(Round(move, rho))
    separated = len(rounds)
    _, t, gathered = min(_gathered(trie, t, goals), key=itemgetter(0))
    rounds += gathered
    found = entry(
        "separation",
        max(1, len(rounds)),
        "the tokens of a sequence differ",
        {
            "S": separated,
            "bound": bound,
            "gathering": len(gathered),
            "moves": sum(bool(r.move.neurons) for r in rounds),
            "smallest rho": min((r.rho for r in rounds), default=1),
        },
        "0 < distance of two places",
        (rational(0), _narrowest(t)),
    )
    return blocks_of(line, rounds), t, found


def _gathered(trie: Trie, t: list[Rational], goals: list[Row]) -> Iterator[tuple[int, list[Rational], list[Round]]]:
    """After 0, 1, 2, ... rounds of gathering: the blocks of these and the ramps, the places, the rounds. While more may pay.

    Rho is zero, or as small as it may be if that would bring two targets to one place.
    """
    rounds: list[Round] = []
    fewest, least, patience = _ramp_blocks(t, goals), math.ceil(len(set(goals)) / 2), _PATIENCE
    yield fewest, t, rounds
    while patience and len(rounds) + 1 + least < fewest:
        phi = trie.means(t)
        rho = next((rho for rho in _shares() if not _mixed(_pooled(t, phi, rho), goals)), None)
        if rho is None:
            return
        t, rounds = _pooled(t, phi, rho), [*rounds, Round(Move(), rho)]
        blocks = len(rounds) + _ramp_blocks(t, goals)
        yield blocks, t, rounds
        patience = _PATIENCE if blocks < fewest else patience - 1
        fewest = min(fewest, blocks)


def _ramp_blocks(t: Sequence[Rational], goals: Sequence[Row]) -> int:
    return math.ceil(len(_runs(t, goals)) / 2)


def _shares() -> list[Rational]:
    return [rational(above, _SHARES) for above in range(_SHARES // 2)]


def _mixed(t: Sequence[Rational], goals: Sequence[Row]) -> bool:
    """Whether some place has two targets."""
    return len(set(zip(t, goals, strict=True))) > len(set(t))


def _pooled(t: Sequence[Rational], phi: Sequence[Rational], rho: Rational) -> list[Rational]:
    return [rho * x + (1 - rho) * mean for x, mean in zip(t, phi, strict=True)]


def _parted(t: Sequence[Rational], phi: Sequence[Rational]) -> int:
    """The number of places after a round that merges none."""
    return len(set(zip(t, phi, strict=True)))


def _bend(trie: Trie, t: list[Rational]) -> Move:
    """``t -> t - relu(t - c) / 2``, with the c of those tried after which the means part most nodes that share a place."""
    places = sorted(set(t))
    step = max(1, len(places) // _KINKS)

    def parted(kink: Rational) -> int:
        return _parted(t, trie.means([max(x - kink, rational(0)) for x in t]))

    for kinks in (places[::step], places):
        best = max(kinks, key=parted)
        if parted(best) > len(places):
            return Move(((best, rational(-1, 2)),))
    raise SinkformerError("no kink parts two prefixes, which is a defect of sinkformer: those of a trie differ")


def _share(t: Sequence[Rational], phi: Sequence[Rational]) -> Rational:
    """Rho that merges no places, of few bits, and among these the one with the widest smallest distance."""
    places = set(zip(t, phi, strict=True))
    below = _SHARES
    while True:
        best: tuple[Rational, Rational] | None = None
        for above in range(1, below):
            rho = rational(above, below)
            moved = {rho * x + (1 - rho) * mean for x, mean in places}
            if len(moved) == len(places):
                best = max(best or (rational(0), rho), (_narrowest(moved), rho))
        if best is not None:
            return best[1]
        below *= 2


def _narrowest(values: Iterable[Rational]) -> Rational:
    """Smallest distance of two different values; one if there are no two."""
    return min((b - a for a, b in pairwise(sorted(set(values)))), default=rational(1))


def _runs(places: Sequence[Rational], goals: Sequence[Row]) -> list[tuple[Rational, Rational, Row]]:
    """Neighbours with one target, in increasing order: the lowest, the highest, the target."""
    runs: list[tuple[Rational, Rational, Row]] = []
    for t, goal in sorted(set(zip(places, goals, strict=True))):
        if runs and runs[-1][2] == goal:
            runs[-1] = (runs[-1][0], t, goal)
        else:
            runs.append((t, t, goal))
    return runs
