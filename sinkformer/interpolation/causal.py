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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from sinkformer.errors import ConfigError, DatasetError
from sinkformer.interpolation.blocks import Block, Kind, feed_forward
from sinkformer.interpolation.construction import Interpolant
from sinkformer.interpolation.datasets import Key, SequencePairs
from sinkformer.interpolation.following import Following, Form, UndecidedError
from sinkformer.interpolation.ledger import Entry, Ledger, entry
from sinkformer.interpolation.phases.groups import Group, ramps_below
from sinkformer.interpolation.phases.projection import ceiling
from sinkformer.interpolation.phases.reduction import Line, reduce_to_line
from sinkformer.interpolation.phases.separation import Move, Round
from sinkformer.interpolation.phases.targets import interpolate
from sinkformer.interpolation.rationals import library, rational
from sinkformer.interpolation.vectors import Row, vector
from sinkformer.interpolation.verification import Verdict

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

Assignment = Sequence[Sequence[int]]
"""For every sequence the number of a target for each of its tokens."""

_SHARES = 16  # rho is tried in multiples of one over it, and finer ones if all of them merge places
_KINKS = 64
_BITS = 128
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
    pairs = _pairs(X, Y)
    if attention not in get_args(Kind):
        raise ConfigError(
            f"expected attention to be one of {', '.join(map(repr, get_args(Kind)))}, received {attention!r}"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"expected seed as a non-negative int, received {seed!r}")
    trie = Trie(pairs)
    found = _feasible(pairs, trie)
    goals = _goals(pairs, trie, assign(pairs) if assignment is None else assignment)
    top = ceiling(pairs)
    line, reduced = reduce_to_line(pairs, top, pairs.scale, rational(1, 16), seed)
    separating, places, separated = _separate(trie, line, goals)
    groups, grouped = _groups(places, goals, top)
    moving, moved = interpolate(ramps_below(groups, [{group.target: rational(1)} for group in groups]), 2, top)
    blocks = tuple(replace(block, causal=True) for block in (*separating, *moving))
    ledger = Ledger((found, reduced, separated, grouped, moved))
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
    common, chosen = _common(pairs, trie), []
    used: list[frozenset[Key]] = []
    for v, parent in enumerate(trie.parents):
        before = used[parent] if parent >= 0 else frozenset()
        order = pairs.Y[trie.members[v][0]].keys
        fresh = next((key for key in order if key in common[v] and key not in before), None)
        chosen.append(chosen[parent] if fresh is None else fresh)  # a root has something fresh
        used.append(before | {chosen[v]})
    return [[y.keys.index(chosen[v]) for v in path] for y, path in zip(pairs.Y, trie.paths, strict=True)]


def check_tokens(built: Interpolant, assignment: Assignment) -> Verdict:
    """Whether token i of ``X_j`` ends at target ``assignment[j][i]`` of ``Y_j``, for all i and j: more than equality of sets.

    Works for any ``Interpolant``. Exact; a softmax of scores that differ is enclosed to 128 bits, and undecided where these are
    not enough.

    Raises:
        ConfigError: no assignment of targets to tokens.
    """
    pairs = built.pairs
    wanted = list(_numbers(pairs, assignment))
    run = Following(pairs, built.kind, rational(built.tau), _BITS)
    try:
        with library().ctx.workprec(_BITS):
            for block in built.blocks:
                run.step(block)
    except UndecidedError as reason:
        return Verdict("undecided", str(reason), _BITS)
    bits = _BITS if run.enclosed else None
    for j, i, k in wanted:
        number = run.sequences[j][i]
        token = run.tokens[number]
        if not isinstance(token, Form) or not token.exact:
            return Verdict("undecided", f"{run.place(number)} is known by an enclosure only", bits)
        if run.space.dense(token.point) != pairs.Y[j].row(k):
            return Verdict("refuted", f"{run.place(number)} does not end at Y[{j}][{k}]", bits)
    return Verdict("proved", f"all {pairs.M} tokens end at the targets assigned to them", bits)


class Trie:
    """The prefixes of all sources, every one once, those of a prefix before it.

    Attributes:
        parents: for every node the number of the prefix without its last token; -1 if it has no other token.
        depths: its number of tokens.
        members: the sequences that begin with it, in order.
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


def _common(pairs: SequencePairs, trie: Trie) -> list[set[Key]]:
    """For every node the targets that all sequences through it have."""
    return [set.intersection(*(set(pairs.Y[j].keys) for j in members)) for members in trie.members]


def _feasible(pairs: SequencePairs, trie: Trie) -> Entry:
    """Condition (c) of the proposition, at every node."""
    sides: list[tuple[int, int]] = []
    for v, common in enumerate(_common(pairs, trie)):
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
    given = [list(numbers) for numbers in assignment]
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
    t, gathered = _gather(trie, t, goals)
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
    return _blocks(line, rounds), t, found


def _gather(trie: Trie, t: list[Rational], goals: list[Row]) -> tuple[list[Rational], list[Round]]:
    """Further rounds, as many as make the network shortest; none where every one costs more than it saves.

    Rho is zero, or as small as it may be if that would bring two targets to one place.
    """
    rounds: list[Round] = []
    best, kept, needed = (t, 0), _ramp_blocks(t, goals), -(-len(set(goals)) // 2)
    while len(rounds) < best[1] + _PATIENCE and len(rounds) + 1 + needed < kept:
        phi = trie.means(t)
        rho = next((rho for rho in _shares() if not _mixed(_pooled(t, phi, rho), goals)), None)
        if rho is None:
            break
        t = _pooled(t, phi, rho)
        rounds.append(Round(Move(), rho))
        if len(rounds) + _ramp_blocks(t, goals) < kept:
            best, kept = (t, len(rounds)), len(rounds) + _ramp_blocks(t, goals)
    return best[0], rounds[: best[1]]


def _ramp_blocks(t: Sequence[Rational], goals: Sequence[Row]) -> int:
    return -(-len(_runs(t, goals)) // 2)


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
    raise AssertionError("two prefixes are the same, which a trie excludes")


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


def _blocks(line: Line, rounds: list[Round]) -> list[Block]:
    """The first block carries the reduction to the line, too."""
    first = rounds[0] if rounds else Round(Move(), rational(1))
    blocks: list[Block] = []
    for k, step in enumerate([first, *rounds[1:]]):
        neurons = [(-kink, vector(slope)) for kink, slope in step.move.neurons]
        if k == 0:
            shifted = [(bias + line.offset, column) for bias, column in neurons]
            block = feed_forward("reduction", 0, line.functional, [(line.offset, vector(rational(1))), *shifted])
        else:
            block = feed_forward("separation", 1, {0: rational(1)} if neurons else {}, neurons)
        blocks.append(block.attending(step.rho, 1 - step.rho, rational(0), {}, {}) if rounds else block)
    return blocks


def _groups(places: list[Rational], goals: list[Row], floor: Rational) -> tuple[list[Group], Entry]:
    """Neighbours with one target, from the top down."""
    runs = _runs(places, goals)
    tops = [floor, *(top for _, top, _ in runs)]
    groups = [Group(bottom, top, below, goal) for (bottom, top, goal), below in zip(runs, tops, strict=False)]
    narrowest = min(group.bottom - group.below for group in groups)
    found = entry(
        "groups",
        0,
        "no place holds two targets",
        {"nodes": len(places), "groups": len(groups), "narrowest gap": narrowest},
        "0 < narrowest gap",
        (rational(0), narrowest),
    )
    return groups[::-1], found


def _runs(places: Sequence[Rational], goals: Sequence[Row]) -> list[tuple[Rational, Rational, Row]]:
    """Neighbours with one target, in increasing order: the lowest, the highest, the target."""
    runs: list[tuple[Rational, Rational, Row]] = []
    for t, goal in sorted(set(zip(places, goals, strict=True))):
        if runs and runs[-1][2] == goal:
            runs[-1] = (runs[-1][0], t, goal)
        else:
            runs.append((t, t, goal))
    return runs


def _pairs(X: Iterable[Any] | SequencePairs, Y: Iterable[Any] | None) -> SequencePairs:
    if isinstance(X, SequencePairs) and Y is None:
        return X
    if isinstance(X, SequencePairs) or Y is None:
        raise ConfigError("expected X and Y as sequences, or SequencePairs alone; give one or the other")
    return SequencePairs(X, Y)
