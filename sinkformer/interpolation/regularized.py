"""Training with a Tikhonov penalty, and what exact interpolation says about the result (arXiv 2502.02270).

    J_eps(theta) = L(theta) + eps |theta|^2,        L(theta) = (1 / N) sum_j dist_H(T_theta(X_j), Y_j)^2

Let theta* be any parameters of the same architecture. A global minimiser theta_eps cannot be worse than theta*:

    L(theta_eps) + eps |theta_eps|^2 <= L(theta*) + eps |theta*|^2,

and the right-hand side is eps |theta*|^2 if theta* interpolates the data exactly. So trained parameters whose J, or even whose
loss alone, is above this *threshold* are certainly no global minimiser: the optimiser is stuck. Below it nothing follows:
the threshold is only as sharp as theta* is small, and that of a constructed network is huge.

J_eps(theta_eps) / eps tends to the smallest |theta|^2 among interpolating parameters, so J is linear in eps; the loss is
bounded by eps |theta*|^2 and is of smaller order, eps^2 in regular cases. A fitted slope of log L against log eps below one
is a sign, and no proof, of an optimiser that is stuck, since the bound is about small eps and exact minima.

A minimiser exists for softmax, where J is continuous and grows at infinity. Hardmax is discontinuous, and no gradient reaches
its matrix A.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from sinkformer.errors import ConfigError, DTypeError, NonFiniteError, ShapeError
from sinkformer.interpolation.layers import TokenTransformer
from sinkformer.measures import Measure, check_compatible
from sinkformer.metrics import hausdorff

# Largest loss of an interpolating model, relative to the squared size of the points: rounding through many blocks.
_INTERPOLATES = {torch.float64: 1e-16, torch.float32: 1e-6}


@dataclass(frozen=True)
class Run:
    """What training at one eps ended with: the parameters of smallest J that were seen.

    Attributes:
        epsilon: weight of the penalty.
        loss: L(theta), in squared units of the points.
        squared_norm: |theta|^2, over all parameters.
        threshold: J_eps(theta*), that is eps |theta*|^2 up to the rounding of L(theta*).
        model: the trained model.
    """

    epsilon: float
    loss: float
    squared_norm: float
    threshold: float
    model: TokenTransformer

    @property
    def objective(self) -> float:
        """J_eps(theta)."""
        return self.loss + self.epsilon * self.squared_norm

    @property
    def loss_above_threshold(self) -> bool:
        """The weaker test: L(theta) > J_eps(theta*). It excludes a global minimum."""
        return self.loss > self.threshold

    @property
    def excluded(self) -> bool:
        """The stronger test: J_eps(theta) > J_eps(theta*). It excludes a global minimum."""
        return self.objective > self.threshold

    @property
    def verdict(self) -> str:
        """Which of the two tests excludes a global minimum."""
        if self.loss_above_threshold:
            return "not a global minimum (by its loss)"
        return "not a global minimum (by J)" if self.excluded else "not excluded"


@dataclass(frozen=True)
class Fit:
    """Least-squares line log y = slope log eps + intercept.

    Attributes:
        slope, intercept: of the line, natural logarithms.
        residual: root mean square of what is left, in log y.
    """

    slope: float
    intercept: float
    residual: float


@dataclass(frozen=True)
class Tikhonov:
    """Training runs over a list of eps, in its order.

    Attributes:
        runs: one for each eps.
        interpolant_loss: L(theta*).
        interpolant_squared_norm: |theta*|^2.
    """

    runs: tuple[Run, ...]
    interpolant_loss: float
    interpolant_squared_norm: float

    @property
    def loss_fit(self) -> Fit | None:
        """Line through log L against log eps, over the runs with L > 0; None for fewer than two different eps."""
        return _fitted([(run.epsilon, run.loss) for run in self.runs])

    @property
    def objective_fit(self) -> Fit | None:
        """The same for J, which is linear in eps (slope one) at exact minima of small eps."""
        return _fitted([(run.epsilon, run.objective) for run in self.runs])

    def __str__(self) -> str:
        """A table, then the two slopes."""
        rows: list[tuple[str, ...]] = [("eps", "loss", "|theta|^2", "J", "threshold", "verdict")]
        for run in self.runs:
            numbers = (run.epsilon, run.loss, run.squared_norm, run.objective, run.threshold)
            rows.append((*(f"{number:.3e}" for number in numbers), run.verdict))
        widths = [max(len(row[k]) for row in rows) for k in range(5)]
        lines = []
        for row in rows:
            cells = [f"{cell:>{width}}" for cell, width in zip(row[:5], widths, strict=True)]
            lines.append("  ".join([*cells, row[5]]))
        lines.append(
            f"interpolating model: loss {self.interpolant_loss:.1e}, |theta*|^2 {self.interpolant_squared_norm:.6g}"
        )
        for name, fit in (("loss", self.loss_fit), ("J", self.objective_fit)):
            if fit is not None:
                lines.append(f"slope of log {name} against log eps: {fit.slope:.2f} (residual {fit.residual:.2f})")
        return "\n".join(lines)


def tikhonov(
    model: TokenTransformer,
    sources: Measure,
    targets: Measure,
    *,
    interpolant: TokenTransformer,
    epsilons: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
    steps: int = 2000,
    rate: float = 1e-3,
    progress: bool = False,
) -> Tikhonov:
    """Train copies of a model at several eps and hold them against the threshold of an interpolating model.

    Full-batch Adam with a cosine schedule, every eps from the same initial parameters, without random numbers: the same
    arguments give the same result. Of all steps the parameters with the smallest J are kept.

    Args:
        model: initial parameters, float32 or float64; not changed.
        sources: the sequences X_j, a batch ``(N,)`` of measures.
        targets: the sets Y_j, a batch ``(N,)``; of their weights only the zeros matter.
        interpolant: theta*, of the same architecture (``config``) as ``model``, with loss zero up to rounding.
        epsilons: weights of the penalty, > 0. The penalty is a term of the loss.
        weight_decays: instead of ``epsilons``, values w as ``torch.optim.Adam(weight_decay=w)`` takes them. Adam adds w theta to
            the gradient, which is the penalty with eps = w / 2.
        steps: of the optimiser, for each eps.
        rate: learning rate of the first step.
        progress: show a bar.

    Returns:
        The runs, with their verdicts and slopes; ``print`` shows a table.

    Raises:
        ConfigError: not exactly one of ``epsilons`` and ``weight_decays``, values outside their range, an interpolant of another
            architecture, or one that does not interpolate the data.
        ShapeError: not a batch with one axis, or measures that do not fit each other or the model.
        DTypeError: wrong types, or two dtypes.
        NonFiniteError: training diverged; names eps and the step.
    """
    values = _epsilons(epsilons, weight_decays)
    _check(model, sources, targets, interpolant, steps, rate)
    sources, targets = sources.detach(), targets.detach()
    with torch.no_grad():
        best_loss, best_norm = float(_loss(interpolant, sources, targets)), float(_squared_norm(interpolant))
    _check_interpolates(best_loss, sources, targets)
    runs = []
    with tqdm(total=len(values) * steps, desc="Tikhonov", unit="step", disable=not progress) as bar:
        for epsilon in values:
            bar.set_postfix(eps=f"{epsilon:.1e}", refresh=False)
            trained = copy.deepcopy(model)
            with torch.enable_grad():
                loss, norm = _train(trained.requires_grad_(), sources, targets, epsilon, steps, rate, bar)
            runs.append(Run(epsilon, loss, norm, best_loss + epsilon * best_norm, trained))
    return Tikhonov(tuple(runs), best_loss, best_norm)


def _train(
    model: TokenTransformer, sources: Measure, targets: Measure, epsilon: float, steps: int, rate: float, bar: tqdm
) -> tuple[float, float]:
    """Train in place; loss and squared norm of the parameters of smallest J, which the model ends with."""
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    smallest, found, best = math.inf, (math.inf, math.inf), parameters
    for step in range(steps + 1):
        try:
            loss, norm = _loss(model, sources, targets), _squared_norm(model)
        except NonFiniteError as error:
            raise NonFiniteError(f"step {step} of the training at eps={epsilon:g}: {error}") from error
        objective = loss + epsilon * norm
        value = float(objective.detach())
        if not math.isfinite(value):
            raise NonFiniteError(
                f"expected a finite J, received {value} in step {step} of the training at eps={epsilon:g}; "
                f"lower the learning rate or scale the data down"
            )
        if value < smallest:
            smallest, found = value, (float(loss.detach()), float(norm.detach()))
            best = [t.detach().clone() for t in parameters]
        if step < steps:
            optimizer.zero_grad()
            objective.backward()
            optimizer.step()
            schedule.step()
            bar.update()
    with torch.no_grad():
        for t, kept in zip(parameters, best, strict=True):
            t.copy_(kept)
    return found


def _loss(model: TokenTransformer, sources: Measure, targets: Measure) -> Tensor:
    return hausdorff(model(sources), targets).square().mean()


def _squared_norm(model: TokenTransformer) -> Tensor:
    return torch.stack([t.square().sum() for t in model.parameters()]).sum()


def _fitted(pairs: list[tuple[float, float]]) -> Fit | None:
    pairs = [(x, y) for x, y in pairs if y > 0]
    if len({x for x, _ in pairs}) < 2:
        return None
    x, y = np.log(np.array(pairs)).T
    slope, intercept = np.polyfit(x, y, 1)
    residual = float(np.sqrt(np.mean((y - slope * x - intercept) ** 2)))
    return Fit(float(slope), float(intercept), residual)


# Checks -----------------------------------------------------------------------------------------------------------------


def _epsilons(epsilons: Sequence[float] | None, weight_decays: Sequence[float] | None) -> list[float]:
    if (epsilons is None) == (weight_decays is None):
        raise ConfigError("expected either epsilons or weight_decays, received both or neither; give one of them")
    values = [float(x) for x in epsilons] if epsilons is not None else [float(w) / 2 for w in weight_decays or ()]
    if not values or not all(0 < x < math.inf for x in values):
        raise ConfigError(
            f"expected at least one penalty, all positive and finite, received eps={values}; give powers of ten, say"
        )
    return values


def _check(
    model: TokenTransformer, sources: Measure, targets: Measure, interpolant: TokenTransformer, steps: int, rate: float
) -> None:
    for name, theta in (("model", model), ("interpolant", interpolant)):
        if not isinstance(theta, TokenTransformer):
            raise DTypeError(f"expected {name} as a TokenTransformer, received {type(theta).__name__}")
    if model.config != interpolant.config:
        raise ConfigError(
            "expected an interpolant of the model's architecture, since the threshold compares parameters of one family; "
            "received two different configurations, see .config"
        )
    check_compatible(sources, targets)
    if len(sources.batch_shape) != 1 or not len(sources):
        raise ShapeError(
            f"expected a batch (N,) of sequences, N >= 1, received batch shape {tuple(sources.batch_shape)}"
        )
    if sources.dtype not in _INTERPOLATES:
        raise DTypeError(
            f"expected sources and targets in float32 or float64, received {sources.dtype}; "
            f"convert them, and the models, with .to(torch.float64)"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"expected steps as a whole number >= 1, received {steps!r}; give an int, such as 2000")
    if not 0 < rate < math.inf:
        raise ConfigError(f"expected a learning rate, positive and finite, received {rate!r}; try 1e-3")


def _check_interpolates(loss: float, sources: Measure, targets: Measure) -> None:
    live = (mu.points * (mu.weights > 0).unsqueeze(-1) for mu in (sources, targets))
    limit = _INTERPOLATES[targets.dtype] * max(float(points.square().sum(-1).max()) for points in live)
    if not loss <= limit:
        raise ConfigError(
            f"expected an interpolant with loss zero up to rounding (<= {limit:.1e} here), received loss {loss:.3e}; "
            f"its threshold would prove nothing about interpolation"
        )
