"""The laws of functions of measures, as checks to run on your own encoders and coupling models.

A function of (mu, x), or of (mu, nu), is a function of *measures* only if it obeys these laws:

====  ================  ==================================================================================
id    name              statement
====  ================  ==================================================================================
I1    permutation       relabelling the atoms permutes the answers
I2    padding           atoms of weight zero, wherever they lie, change nothing at the other atoms, nor any gradient
I3    splitting         (x, w) may be written as (x, s w), (x, (1 - s) w)
I4    off the support   the map is defined at every point, and agrees with itself at the atoms
I5    weak continuity   a small change in W1(mu, mu') + |x - x'| gives a small change of the answer
I6    scale             weights enter through w / sum w only; ``Measure`` sees to it, by refusing any others
====  ================  ==================================================================================

``check_encoder(encoder, dim)`` and ``check_coupling_model(model, dim)`` raise an ``AssertionError`` that names the law and
the deviation, and return the largest deviation of each law; I6 needs no check, since it is ``Measure`` that keeps it.
Plain functions: call them from any test framework.

Example:
    >>> from sinkformer import Encoder, testing
    >>> testing.check_encoder(Encoder(3, 8), 3)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sinkformer.couplings import Coupling
from sinkformer.measures import Measure

EncoderFunction = Callable[..., Tensor]
CouplingFunction = Callable[[Measure, Measure], Coupling]

# Deviations relative to the size of the answer: sums in another order, nothing else.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


def random_measure(
    n: int, dim: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float64, zeros: int = 0
) -> Measure:
    """Measure with n normally distributed atoms of random positive weights, ``zeros`` of them (the first) of weight zero."""
    points = torch.randn(n, dim, generator=generator, dtype=dtype)
    weights = torch.rand(n, generator=generator, dtype=dtype) + 0.05
    weights[:zeros] = 0
    return Measure.normalized(points, weights)


def check_encoder(
    encoder: EncoderFunction,
    dim: int,
    *,
    dtype: torch.dtype = torch.float64,
    lipschitz: float = 1e4,
    n: int = 6,
    seed: int = 0,
) -> dict[str, float]:
    """Check the laws I1 to I5 on an encoder.

    Args:
        encoder: called as ``encoder(mu)`` and ``encoder(mu, at)``; gives ``(*batch, n, r)`` and ``(*batch, k, r)``. A
            module is converted to ``dtype`` for the check only by you: pass ``encoder.double()``.
        dim: coordinates of a point.
        dtype: dtype to check in.
        lipschitz: largest accepted ratio |change of the answer| / |change of the input| in I5.
        n: atoms of the measures used.
        seed: of the random measures.

    Returns:
        Largest relative deviation of every law; for I5 the largest ratio seen.

    Raises:
        AssertionError: a law is broken; names it and the deviation.
    """
    generator = torch.Generator().manual_seed(seed)
    mu = random_measure(n, dim, generator=generator, dtype=dtype)
    probes = torch.randn(3, dim, generator=generator, dtype=dtype)
    found: dict[str, float] = {}
    value, off = encoder(mu), encoder(mu, probes)
    _require(bool(torch.isfinite(value).all()), "I1 permutation", "the answer is not finite")
    tolerance = _TOLERANCES[dtype]

    order = torch.randperm(n, generator=generator)
    shuffled = Measure(mu.points[order], mu.weights[order])
    _compare(found, "I1 permutation", tolerance, encoder(shuffled), value[order])
    _compare(found, "I1 permutation", tolerance, encoder(shuffled, probes), off)

    for far in (0.0, 1e3, 1e12, float("nan")):
        points = torch.cat([torch.full((2, dim), far, dtype=dtype), mu.points]).requires_grad_()
        padded = Measure(points, torch.cat([mu.weights.new_zeros(2), mu.weights]))
        answer = encoder(padded)[2:]
        _compare(found, "I2 padding", tolerance, answer, value)
        _compare(found, "I2 padding", tolerance, encoder(padded, probes), off)
        (gradient,) = torch.autograd.grad(answer.sum(), points)
        _require(bool((gradient[:2] == 0).all()), "I2 padding", "an atom of weight zero receives a gradient")
        _require(bool(torch.isfinite(gradient).all()), "I2 padding", "a gradient is not finite")

    split = mu.split(1, 0.3)
    _compare(found, "I3 splitting", tolerance, encoder(split)[:n], value)
    _compare(found, "I3 splitting", tolerance, encoder(split)[n], value[1])
    _compare(found, "I3 splitting", tolerance, encoder(split, probes), off)

    _compare(found, "I4 off the support", tolerance, encoder(mu, mu.points), value)
    weightless = Measure(torch.cat([mu.points, probes]), torch.cat([mu.weights, mu.weights.new_zeros(3)]))
    _compare(found, "I4 off the support", tolerance, encoder(weightless)[n:], off)

    step = 1e-6 if dtype == torch.float64 else 1e-3
    found["I5 weak continuity"] = 0.0
    for _ in range(3):
        move = torch.randn(n, dim, generator=generator, dtype=dtype)
        moved = Measure(mu.points + step * move, mu.weights)
        changes = {"moving atoms": (encoder(moved, probes), step * float((mu.weights * move.norm(dim=-1)).sum()))}
        # A new atom far away, of little mass: small in W1, whatever the number of atoms does.
        far_point = 10 * torch.randn(1, dim, generator=generator, dtype=dtype)
        weights = torch.cat([mu.weights * (1 - step), mu.weights.new_full((1,), step)])
        reach = float((mu.weights * (mu.points - far_point).norm(dim=-1)).sum())
        changes["a little mass far away"] = (
            encoder(Measure(torch.cat([mu.points, far_point]), weights), probes),
            step * reach,
        )
        shift = torch.randn(3, dim, generator=generator, dtype=dtype)
        changes["moving the probe"] = (encoder(mu, probes + step * shift), step * float(shift.norm(dim=-1).min()))
        for what, (answer, distance) in changes.items():
            ratio = float((answer - off).detach().norm(dim=-1).max()) / distance
            found["I5 weak continuity"] = max(found["I5 weak continuity"], ratio)
            _require(ratio <= lipschitz, "I5 weak continuity", f"{what} changes the answer {ratio:.3g} times as much")

    return found


def check_coupling_model(
    model: CouplingFunction,
    dim: int,
    *,
    target_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, float]:
    """Check the laws I1, I2 and I3 on a function of two measures that returns a coupling.

    Args:
        model: called as ``model(mu, nu)``.
        dim: coordinates of a source point.
        target_dim: coordinates of a target point; ``dim`` if None.
        dtype: dtype to check in; a solver's tolerance must be well below 1e-9 in float64.
        seed: of the random measures.

    Returns:
        Largest deviation of every law, in mass.

    Raises:
        AssertionError: a law is broken; names it and the deviation.
    """
    generator = torch.Generator().manual_seed(seed)
    mu = random_measure(5, dim, generator=generator, dtype=dtype)
    nu = random_measure(7, target_dim or dim, generator=generator, dtype=dtype)
    tolerance = _TOLERANCES[dtype]
    found: dict[str, float] = {}
    plan = model(mu, nu).to_dense()

    rows, columns = torch.randperm(5, generator=generator), torch.randperm(7, generator=generator)
    shuffled = model(
        Measure(mu.points[rows], mu.weights[rows]), Measure(nu.points[columns], nu.weights[columns])
    ).to_dense()
    _compare(found, "I1 permutation", tolerance, shuffled, plan[rows][:, columns])

    for far in (1e3, float("nan")):
        padded = Measure(
            torch.cat([mu.points, mu.points.new_full((2, dim), far)]), torch.cat([mu.weights, mu.weights.new_zeros(2)])
        )
        answer = model(padded, nu).to_dense()
        _compare(found, "I2 padding", tolerance, answer[:5], plan)
        _require(bool((answer[5:] == 0).all()), "I2 padding", "an atom of weight zero receives mass")

    answer = model(mu.split(2, 0.25), nu).to_dense()
    _compare(found, "I3 splitting", tolerance, answer[2], 0.25 * plan[2])
    _compare(found, "I3 splitting", tolerance, answer[5], 0.75 * plan[2])
    _compare(found, "I3 splitting", tolerance, answer[[0, 1, 3, 4]], plan[[0, 1, 3, 4]])

    # The same on the target side, on columns.
    padded = Measure(
        torch.cat([nu.points, nu.points.new_full((2, nu.d), 1e3)]), torch.cat([nu.weights, nu.weights.new_zeros(2)])
    )
    answer = model(mu, padded).to_dense()
    _compare(found, "I2 padding", tolerance, answer[:, :7], plan)
    _require(bool((answer[:, 7:] == 0).all()), "I2 padding", "an atom of weight zero receives mass")
    answer = model(mu, nu.split(2, 0.25)).to_dense()
    _compare(found, "I3 splitting", tolerance, answer[:, 2], 0.25 * plan[:, 2])
    _compare(found, "I3 splitting", tolerance, answer[:, 7], 0.75 * plan[:, 2])

    return found


def _compare(found: dict[str, float], law: str, tolerance: float, answer: Tensor, expected: Tensor) -> None:
    answer, expected = answer.detach(), expected.detach()
    deviation = float((answer - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
    found[law] = max(found.get(law, 0.0), deviation)
    _require(deviation <= tolerance, law, f"relative deviation {deviation:.3g}, tolerance {tolerance:.1g}")


def _require(condition: bool, law: str, what: str) -> None:
    if not condition:
        raise AssertionError(f"law {law} is broken: {what}")
