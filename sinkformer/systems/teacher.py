"""A random Sinkhorn Transformer as a target, built so that its modulus of continuity can be written down.

Encoder, for one side (its own parameters on each): tokens in R^16, bounded by tanh; layers l = 1, ..., L of attention over
the measure with 4 heads, whose queries and keys are normalised, so that logits stay in [-beta, beta]:

    z_0(x) = tanh(W x + b)
    z_l(mu, x) = tanh(z_{l-1} + sum_h O_h  int V_h y e^{l_h(z_{l-1}, y)} dmu_{l-1}(y) / int e^{l_h(z_{l-1}, y)} dmu_{l-1}(y))
    l_h(z, y) = beta <N(Q_h z), N(K_h y)>,   N(v) = v / sqrt(|v|^2 + 1/4),   mu_{l-1}: mu moved by z_{l-1}(mu, .)
    Q(mu, x) = S z_L(mu, x)

and c(x, y) = -<Q(mu, x), K(nu, y)>.

Modulus. Let z_{l-1} be s-Lipschitz in x and t-Lipschitz in mu (for W1), and write |.| for spectral norms, B = sqrt(16) for the
bound of a token. N is 2-Lipschitz, tanh 1-Lipschitz. One head, with logits l(z, y) and values v(y):

- in z: the derivative of the tilted mean is the covariance of v and the derivative of l, at most |V| B * 2 beta |Q|;
- in the measure: with h, h' the tilted means of m, m' and phi(y) = (v(y) - h') e^l, h - h' = int phi d(m - m') / int e^l dm,
  where phi / int e^l dm is e^{2 beta} (|V| + 2 |V| B * 2 beta |K|)-Lipschitz;
- and W1(mu_{l-1}, mu'_{l-1}) <= (s + t) W1(mu, mu').

So with p = 1 + sum_h |O_h| |V_h| B 2 beta |Q_h| and q = sum_h |O_h| |V_h| e^{2 beta} (1 + 4 B beta |K_h|) a layer has the
constants s' = p s and t' = p t + q (s + t). From (|W|, 0), L layers give (s, t), the encoder has (|S| s, |S| t) and the
bound |S| B; and the cost has the L and the M of :mod:`sinkformer.systems.entropic`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sinkformer._numerics import safe_log
from sinkformer._typing import Features, Points
from sinkformer.costs import NegativeDot
from sinkformer.errors import ConfigError
from sinkformer.measures import Measure
from sinkformer.systems.base import check_dims, check_positive
from sinkformer.systems.entropic import EntropicSystem

_WIDTH, _HEADS, _KEY, _RANK = 16, 4, 2, 8
_BOUND, _SOFTNESS = math.sqrt(_WIDTH), 0.25


class _Layer(NamedTuple):
    """Parameters of one layer."""

    query: Tensor  # Q (heads, key, width)
    key: Tensor  # K (heads, key, width)
    value: Tensor  # V (heads, width / heads, width)
    out: Tensor  # O (heads, width, width / heads)


@dataclass(frozen=True)
class RandomTeacher(EntropicSystem):
    """Entropic transport with the features of two random transformer encoders.

    What a point is, depends on its cloud through layers of sharp attention. A Sinkhorn Transformer has the same form, so
    the system is within reach of one, but its parameters are not. The architecture and its modulus are described in the
    module.

    Args:
        seed: of all parameters; the same seed gives the same system, and the global generator is neither read nor moved.
        dims: coordinates of source and target points.
        epsilon: entropy, > 0, in the units of the cost, whose standard deviation is of order one.
        logit_scale: beta, the largest attention logit, > 0.
        layers: L >= 1; with the second, hardly anything of the features of a point is its own.

    Raises:
        ConfigError: an argument outside its range.
    """

    seed: int = 0
    dims: tuple[int, int] = (2, 2)
    epsilon: float = 0.1
    logit_scale: float = 4.0
    layers: int = 2

    name = "teacher"
    cost = NegativeDot()

    def __post_init__(self):
        """Check the arguments."""
        check_dims(self.dims)
        check_positive(epsilon=self.epsilon, logit_scale=self.logit_scale)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"expected a seed >= 0, received {self.seed!r}")
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 1:
            raise ConfigError(f"expected layers >= 1, received {self.layers!r}")

    @cached_property
    def _encoders(self) -> tuple[_Encoder, _Encoder]:
        generator = torch.Generator().manual_seed(self.seed)
        source, target = (_Encoder(d, self.logit_scale, self.layers, generator) for d in self.dims)
        return source, target

    def source_features(self, mu: Measure, at: Points) -> Features:
        """Q(mu, x), ``(*batch, k, 8)``."""
        return self._encoders[0](mu, at)

    def target_features(self, nu: Measure, at: Points) -> Features:
        """K(nu, y), ``(*batch, k, 8)``."""
        return self._encoders[1](nu, at)

    def constants(self, half_width: float) -> tuple[float, float]:
        """From the spectral norms of the parameters; the same on every domain, since tokens are bounded by tanh."""
        (s, t, bound), (s_target, t_target, bound_target) = (encoder.constants() for encoder in self._encoders)
        return max(s * bound_target, s_target * bound), max(t * bound_target, t_target * bound)


class _Encoder:
    """Random in-context map (mu, x) -> R^8."""

    def __init__(self, d: int, beta: float, layers: int, generator: torch.Generator):
        def normal(*shape: int, std: float) -> Tensor:
            return std * torch.randn(*shape, generator=generator, dtype=torch.float64)

        inner, part = _WIDTH**-0.5, _WIDTH // _HEADS
        self.beta = beta
        self.enter, self.bias = normal(_WIDTH, d, std=1.5 * d**-0.5), normal(_WIDTH, std=0.5)
        self.layers = [
            _Layer(
                query=normal(_HEADS, _KEY, _WIDTH, std=2 * inner),
                key=normal(_HEADS, _KEY, _WIDTH, std=2 * inner),
                value=normal(_HEADS, part, _WIDTH, std=1.5 * inner),
                out=normal(_HEADS, _WIDTH, part, std=0.5 * part**-0.5),
            )
            for _ in range(layers)
        ]
        self.leave = normal(_RANK, _WIDTH, std=2 * inner)

    def __call__(self, mu: Measure, at: Points) -> Features:
        # Atoms first, other points behind them: all see the same measure.
        points = mu.points if at is mu.points else torch.cat([mu.points, at], -2)
        log_weights = safe_log(mu.weights).unsqueeze(-2).unsqueeze(-2)
        z = torch.tanh(points @ self.enter.T + self.bias)
        for layer in self.layers:
            queries, keys, values = (_through_heads(z, w) for w in layer[:3])
            keys, values = keys[..., : mu.n, :], values[..., : mu.n, :]
            logits = self.beta * _bounded(queries) @ _bounded(keys).mT + log_weights
            mixed = (torch.softmax(logits, -1) @ values).transpose(-3, -2).flatten(-2)
            z = torch.tanh(z + mixed @ layer.out.transpose(-3, -2).flatten(-2).T)
        return z[..., -at.shape[-2] :, :] @ self.leave.T

    def constants(self) -> tuple[float, float, float]:
        """Lipschitz constants in x and in mu, and the bound, of the features."""
        s, t = _norm(self.enter), 0.0
        for layer in self.layers:
            reach = [_norm(o) * _norm(v) for o, v in zip(layer.out, layer.value, strict=True)]
            p = 1 + sum(r * _BOUND * 2 * self.beta * _norm(q) for r, q in zip(reach, layer.query, strict=True))
            q = sum(r * (1 + 4 * _BOUND * self.beta * _norm(k)) for r, k in zip(reach, layer.key, strict=True))
            s, t = p * s, p * t + math.exp(2 * self.beta) * q * (s + t)
        size = _norm(self.leave)
        return size * s, size * t, size * _BOUND


def _bounded(v: Tensor) -> Tensor:
    """N(v) = v / sqrt(|v|^2 + 1/4), of norm below one."""
    return v * (v.square().sum(-1, keepdim=True) + _SOFTNESS).rsqrt()


def _through_heads(z: Tensor, w: Tensor) -> Tensor:
    """Tokens ``(*batch, k, width)`` through one matrix for each head, ``(*batch, heads, k, size)``."""
    return (z @ w.flatten(0, 1).T).unflatten(-1, w.shape[:2]).transpose(-3, -2)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, ord=2))
