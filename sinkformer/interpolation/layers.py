"""The transformer of exact sequence interpolation, as ordinary torch modules (arXiv 2502.02270, section 1).

A block is a feed-forward layer on every token, then one head of attention:

    FF(x)    = eta x + W relu(U x + b)
    SA(X)_i  = rho x_i + V sum_l pi_il x_l,         scores s_il = <A x_i, x_l>

    hardmax:  pi_il = w_l / (sum of w over C_i)  for l in C_i = argmax s_i., else 0
    softmax:  pi_il = w_l exp(s_il / tau) / sum_k w_k exp(s_ik / tau)

with w the weights of the tokens. Uniform weights are the paper's sequences; a token of double weight is one that is there
twice; weight zero is padding, which nobody sees, or a probe, which is moved like the others. The parts of the theorem have
V = beta I and A = alpha I + p q^T, of which no d x d matrix is ever made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sinkformer._numerics import FLOAT_DTYPES
from sinkformer._typing import Points
from sinkformer.errors import ConfigError, DeviceError, DTypeError, ModelError, NonFiniteError, ShapeError
from sinkformer.interpolation.blocks import Kind
from sinkformer.measures import Measure

Number: TypeAlias = "float | Tensor"

_FORMAT_VERSION = 1
_CONFIG_FILE, _WEIGHTS_FILE = "config.json", "model.safetensors"


class _Layer(nn.Module):
    """What moves the points of a measure and keeps their weights."""

    @property
    def dim(self) -> int | None:
        """Number d of coordinates."""
        raise NotImplementedError

    def _move(self, mu: Measure) -> Measure:
        raise NotImplementedError

    def forward(self, x: Any) -> Any:
        """Move every token.

        Args:
            x: a measure, ``(*batch, n)`` atoms in d coordinates; or points ``(*batch, n, d)``, all of the same weight. In the
                dtype of the parameters.

        Returns:
            Of the same kind and shape: the measure with the same weights, or the points.

        Raises:
            ShapeError: points of another dimension.
            DTypeError: neither measure nor floating-point tensor, or of another dtype than the parameters.
            NonFiniteError: a score or a moved token is beyond the range of the dtype.
        """
        moved = self._move(self._entered(x))
        return moved if isinstance(x, Measure) else moved.points

    def _entered(self, x: Any) -> Measure:
        mu = x if isinstance(x, Measure) else Measure.uniform(x)
        dtype = next(self.parameters()).dtype
        if mu.dtype != dtype:
            raise DTypeError(
                f"expected points of the layer's dtype, {dtype}, received {mu.dtype}; "
                f"convert them with .to({dtype}), or the layer with .to({mu.dtype})"
            )
        if self.dim is not None and mu.d != self.dim:
            raise ShapeError(
                f"expected points with {self.dim} coordinates, received {mu.d}; "
                f"build the layer for d = {mu.d}, or project the points"
            )
        return mu.pushforward(mu.points)  # clears what padding may hold after a change of dtype


class FeedForward(_Layer):
    """eta x + W relu(U x + b), on every token by itself.

    Args:
        eta: weight of the token itself, a number.
        W: ``(d, width)``, one column for each neuron; the width may be zero.
        U: ``(width, d)``, one row for each neuron.
        b: ``(width,)``.

    All are copied into parameters of the dtype of ``W``.

    Raises:
        ShapeError, DTypeError, NonFiniteError: parameters that do not fit, or are not finite.
    """

    def __init__(self, eta: Number, W: Tensor, U: Tensor, b: Tensor):
        """Check and copy."""
        super().__init__()
        if not isinstance(W, Tensor) or W.dim() != 2 or W.shape[0] < 1:
            received = tuple(W.shape) if isinstance(W, Tensor) else type(W).__name__
            raise ShapeError(f"expected W as a tensor of shape (d, width), d >= 1, received {received}")
        d, width = W.shape
        like = _like(W, U, b, eta)
        self.eta = _parameter("eta", eta, (), like)
        self.W = _parameter("W", W, (d, width), like)
        self.U = _parameter("U", U, (width, d), like)
        self.b = _parameter("b", b, (width,), like)

    @property
    def dim(self) -> int:
        """Number d of coordinates."""
        return self.W.shape[0]

    @property
    def width(self) -> int:
        """Number of neurons."""
        return self.W.shape[1]

    def _move(self, mu: Measure) -> Measure:
        x = mu.points
        return mu.pushforward(self.eta * x + torch.relu(x @ self.U.mT + self.b) @ self.W.mT)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"dim={self.dim}, width={self.width}"


class Attention(_Layer):
    """rho x_i + V sum_l pi_il x_l: one head, with scores <A x_i, x_l>.

    Args:
        rho: weight of the token itself, a number.
        V: a number beta, for V = beta I; or a matrix ``(d, d)``.
        A: a number alpha, for A = alpha I; a triple ``(alpha, p, q)``, for A = alpha I + p q^T with p, q ``(d,)``; or a matrix
            ``(d, d)``.
        kind: ``"hardmax"`` or ``"softmax"``. Hardmax takes the mean over all tokens whose floating-point scores equal the
            largest one exactly.
        tau: temperature of the softmax, > 0; no parameter.
        causal: token i sees the tokens l <= i only, in the order of the atoms. Such a layer depends on their order.

    All are copied into parameters of the dtype of the tensors among them, float64 if all are numbers. A number alpha becomes
    the triple ``(alpha, 0, 0)`` in a :class:`Block`, which knows d.

    With rho = 1 and V = beta I, beta = 0, no score is computed unless gradients are: the values are the same.

    Raises:
        ShapeError, DTypeError, NonFiniteError: parameters that do not fit, or are not finite.
        ConfigError: an unknown kind, or a temperature that is not positive.
    """

    # Exactly one of beta and value is there, and one of alpha and matrix; p and q as soon as d is known.
    beta: nn.Parameter
    value: nn.Parameter | None
    alpha: nn.Parameter
    matrix: nn.Parameter | None
    p: nn.Parameter | None
    q: nn.Parameter | None

    def __init__(
        self,
        rho: Number,
        V: Number,
        A: Number | tuple[Number, Tensor, Tensor],
        *,
        kind: Kind = "hardmax",
        tau: float = 1.0,
        causal: bool = False,
    ):
        """Check and copy."""
        super().__init__()
        _check_options(kind, tau, causal)
        self.kind: Kind = kind
        self.tau, self.causal = float(tau), causal
        for name in ("beta", "value", "alpha", "p", "q", "matrix"):
            self.register_parameter(name, None)
        if isinstance(A, tuple) and len(A) != 3:
            raise ShapeError(
                f"expected A as a number, a triple (alpha, p, q) or a matrix, received a tuple of {len(A)}; "
                f"for A = alpha I give the number alone"
            )
        parts = A if isinstance(A, tuple) else (A,)
        like = _like(rho, V, *parts)
        shaped = [t for t in (V, *parts) if isinstance(t, Tensor) and t.dim()]
        d = shaped[0].shape[0] if shaped else 0
        self.rho = _parameter("rho", rho, (), like)
        if isinstance(V, Tensor) and V.dim():
            self.value = _parameter("V", V, (d, d), like)
        else:
            self.beta = _parameter("V", V, (), like)
        if isinstance(A, Tensor) and A.dim():
            self.matrix = _parameter("A", A, (d, d), like)
            return
        self.alpha = _parameter("A", parts[0], (), like)
        if isinstance(A, tuple):
            self.p, self.q = _parameter("p", A[1], (d,), like), _parameter("q", A[2], (d,), like)
        elif d:
            self._fill(d)

    def _fill(self, d: int, dtype: torch.dtype | None = None) -> None:
        """Give a layer that was made of numbers alone its dimension: p = q = 0 in R^d, and a dtype if one is given."""
        if dtype is not None:
            self.to(dtype)
        if self.matrix is None and self.p is None:
            self.p, self.q = (nn.Parameter(self.rho.detach().new_zeros(d)) for _ in range(2))

    @property
    def dim(self) -> int | None:
        """Number d of coordinates; None for a layer made of numbers alone, which serves every d."""
        for t in (self.matrix, self.value, self.p):
            if t is not None:
                return t.shape[0]
        return None

    @property
    def V(self) -> Tensor:
        """V as a matrix ``(d, d)``."""
        return self.value if self.value is not None else self.beta * self._identity()

    @property
    def A(self) -> Tensor:
        """A as a matrix ``(d, d)``."""
        if self.matrix is not None:
            return self.matrix
        multiple = self.alpha * self._identity()
        return multiple if self.p is None or self.q is None else multiple + torch.outer(self.p, self.q)

    def _identity(self) -> Tensor:
        if self.dim is None:
            raise ShapeError(
                "expected a layer that knows its dimension, received one made of numbers alone; "
                "give A as (alpha, p, q), or put the layer into a Block"
            )
        return torch.eye(self.dim, dtype=self.rho.dtype, device=self.rho.device)

    def weights(self, mu: Measure) -> Tensor:
        """Attention weights pi, ``(*batch, n, n)``; the row of a token that sees any mass sums to one, of others to zero."""
        if self.kind == "softmax" and self.tau < torch.finfo(mu.dtype).tiny:
            raise ConfigError(
                f"expected a temperature in the range of {mu.dtype}, received tau={self.tau:g}; "
                f"use kind='hardmax', or .to(torch.float64)"
            )
        live = mu.weights > 0
        seen = live.unsqueeze(-2)
        if self.causal:
            seen = seen & seen.new_ones(mu.n, mu.n).tril()
        scores = self._scores(mu.points)
        if not bool(torch.isfinite(scores.detach().sum())):
            scores = _checked(scores, seen & live.unsqueeze(-1))
        if not bool(seen.all()):
            scores = scores.masked_fill(~seen, -torch.inf)
        # Finite also for a token that sees nobody.
        largest = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
        if self.kind == "hardmax":
            shares = (scores == largest) * mu.weights.unsqueeze(-2)
        else:
            shares = scores.sub(largest).div_(self.tau).exp_() * mu.weights.unsqueeze(-2)
        total = shares.sum(-1, keepdim=True)
        return shares / torch.where(total > 0, total, 1.0)

    def _scores(self, x: Points) -> Tensor:
        if self.matrix is not None:
            return x @ self.matrix.mT @ x.mT
        queries, keys = self.alpha * x, x
        if self.p is not None and self.q is not None:
            # alpha <x_i, x_l> + <q, x_i> <p, x_l>, as one product.
            queries = torch.cat([queries, (x @ self.q).unsqueeze(-1)], -1)
            keys = torch.cat([keys, (x @ self.p).unsqueeze(-1)], -1)
        return queries @ keys.mT

    def _move(self, mu: Measure) -> Measure:
        if not torch.is_grad_enabled() and self._is_identity():
            return mu
        mixed = self.weights(mu) @ mu.points
        mixed = self.beta * mixed if self.value is None else mixed @ self.value.mT
        return mu.pushforward(self.rho * mu.points + mixed)

    def _is_identity(self) -> bool:
        return self.value is None and float(self.rho) == 1 and float(self.beta) == 0

    def extra_repr(self) -> str:
        """What is no parameter."""
        temperature = f", tau={self.tau:g}" if self.kind == "softmax" else ""
        return f"dim={self.dim}, kind={self.kind!r}{temperature}, causal={self.causal}"


class Block(_Layer):
    """A feed-forward layer, then attention; both of one dimension and dtype.

    Args:
        feedforward: the first.
        attention: the second; one that was made of numbers alone takes dimension and dtype of the first.

    Raises:
        ShapeError, DTypeError: layers that do not fit.
    """

    def __init__(self, feedforward: FeedForward, attention: Attention):
        """Check."""
        super().__init__()
        if not isinstance(feedforward, FeedForward) or not isinstance(attention, Attention):
            raise DTypeError(
                f"expected a FeedForward and an Attention, received {type(feedforward).__name__} and "
                f"{type(attention).__name__}"
            )
        dtype = feedforward.W.dtype
        if attention.dim is None:
            attention._fill(feedforward.dim, dtype)
        if attention.dim != feedforward.dim:
            raise ShapeError(
                f"expected layers of one dimension, received {feedforward.dim} and {attention.dim}; "
                f"build both for the same d"
            )
        if attention.rho.dtype != dtype:
            raise DTypeError(
                f"expected layers of one dtype, received {dtype} and {attention.rho.dtype}; convert one of them with .to()"
            )
        self.feedforward, self.attention = feedforward, attention

    @property
    def dim(self) -> int:
        """Number d of coordinates."""
        return self.feedforward.dim

    def _move(self, mu: Measure) -> Measure:
        return self.attention(self.feedforward(mu))


class TokenTransformer(_Layer):
    """Blocks one after the other: a map of sequences, given as measures, that moves every token.

    Args:
        blocks: at least one, all of one dimension and dtype.

    Raises:
        ConfigError: no block.
        ShapeError, DTypeError: blocks that do not fit.

    Example:
        >>> theta = TokenTransformer.random(2, 3, width=4, kind="softmax", tau=0.5)
        >>> theta(torch.rand(5, 2, dtype=torch.float64)).shape
        torch.Size([5, 2])
    """

    def __init__(self, blocks: Iterable[Block]):
        """Check."""
        super().__init__()
        blocks = list(blocks)
        if not blocks:
            raise ConfigError(
                "expected at least one block, received none; the identity is a block with eta = rho = 1, W = V = 0"
            )
        for k, block in enumerate(blocks):
            if not isinstance(block, Block):
                raise DTypeError(
                    f"expected blocks, received {type(block).__name__} at position {k}; wrap layers in Block"
                )
            if block.dim != blocks[0].dim:
                raise ShapeError(
                    f"expected blocks of one dimension, received {blocks[0].dim} and {block.dim} at position {k}; "
                    f"build all for the same d"
                )
            first, dtype = blocks[0].feedforward.W.dtype, block.feedforward.W.dtype
            if dtype != first:
                raise DTypeError(
                    f"expected blocks of one dtype, received {first} and {dtype} at position {k}; "
                    f"convert it with .to({first})"
                )
        self.blocks = nn.ModuleList(blocks)

    @classmethod
    def random(
        cls,
        dim: int,
        length: int,
        width: int,
        kind: Kind = "softmax",
        tau: float = 1.0,
        generator: torch.Generator | None = None,
        *,
        dense: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> TokenTransformer:
        """Random parameters, to train or to be a teacher: tokens and scores of order one stay of order one.

        Normal entries, of variance 1/d in U, b, p, q and a dense A, 1/width in W, 1/(4 d) in a dense V; eta = rho = beta = 1/2
        and alpha = 0.

        Args:
            dim: number d of coordinates.
            length: number of blocks.
            width: neurons of each block.
            kind: of attention.
            tau: temperature of the softmax.
            generator: of the random numbers, on the CPU; the global one if None.
            dense: matrices V and A, instead of beta I and alpha I + p q^T.
            dtype: of the parameters; the numbers are drawn in float64.

        Raises:
            ConfigError: sizes that are not positive (the width may be zero), or an option outside its range.
        """
        for name, value, least in (("dim", dim, 1), ("length", length, 1), ("width", width, 0)):
            _check_count(name, value, least)

        def normal(*shape: int, variance: float) -> Tensor:
            return math.sqrt(variance) * torch.randn(*shape, generator=generator, dtype=torch.float64)

        blocks = []
        for _ in range(length):
            W = normal(dim, width, variance=1 / max(width, 1))
            U, b = normal(width, dim, variance=1 / dim), normal(width, variance=1 / dim)
            if dense:
                V, A = normal(dim, dim, variance=1 / (4 * dim)), normal(dim, dim, variance=1 / dim)
            else:
                V, A = 0.5, (0.0, normal(dim, variance=1 / dim), normal(dim, variance=1 / dim))
            blocks.append(Block(FeedForward(0.5, W, U, b), Attention(0.5, V, A, kind=kind, tau=tau)))
        return cls(blocks).to(dtype)

    @property
    def dim(self) -> int:
        """Number d of coordinates."""
        return self._blocks()[0].dim

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _move(self, mu: Measure) -> Measure:
        for moved in self._moved(mu):
            mu = moved
        return mu

    def _moved(self, mu: Measure) -> Iterator[Measure]:
        """The measure after every block, one at a time: all of them may not fit into the memory."""
        for k, block in enumerate(self.blocks):
            try:
                mu = block(mu)
            except NonFiniteError as error:
                raise NonFiniteError(f"block {k}: {error}") from error
            yield mu

    def trace(self, x: Measure | Points) -> list[Points]:
        """Positions ``(*batch, n, d)`` after every block; arguments and errors as those of a call."""
        return [mu.points for mu in self._moved(self._entered(x))]

    # Storage ----------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """Everything but the parameters, as JSON takes it."""
        return {
            "format_version": _FORMAT_VERSION,
            "dim": self.dim,
            "blocks": [_block_config(block) for block in self._blocks()],
        }

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` into a folder, which is made if need be."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _CONFIG_FILE).write_text(json.dumps(self.config, indent=2, sort_keys=True) + "\n")
        state = {name: t.detach().cpu().contiguous().clone() for name, t in self.state_dict().items()}
        save_file(state, folder / _WEIGHTS_FILE)

    @classmethod
    def load(cls, folder: str | Path) -> TokenTransformer:
        """What :meth:`save` wrote, bit for bit and in its dtype; on the CPU.

        Strict: a missing or surplus tensor, a tensor of another shape, tensors of two dtypes, and an unknown or missing key of
        the configuration are errors.

        Raises:
            ModelError: nothing there, a damaged file, or weights that do not fit the configuration.
            ConfigError: a configuration that this release cannot read.
        """
        folder = Path(folder)
        for name in (_CONFIG_FILE, _WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise ModelError(f"expected the file {name} in {folder}; write the folder with save")
        try:
            values = json.loads((folder / _CONFIG_FILE).read_text())
            state = load_file(folder / _WEIGHTS_FILE)
        except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
            raise ModelError(f"expected a readable model in {folder}; a file is damaged: {error}") from error
        model = cls(_blocks_from(values))
        dtypes = {t.dtype for t in state.values()}
        if len(dtypes) != 1 or not dtypes <= set(FLOAT_DTYPES):
            raise ModelError(
                f"expected weights of one floating-point dtype in {folder}, received {sorted(map(str, dtypes))}"
            )
        model = model.to(dtypes.pop())
        try:
            model.load_state_dict(state)
        except RuntimeError as error:  # lists what is missing, surplus or of another shape
            raise ModelError(f"expected the weights in {folder} to fit their configuration: {error}") from error
        return model


# Configurations ---------------------------------------------------------------------------------------------------------


def _block_config(block: Block) -> dict[str, Any]:
    attention = block.attention
    return {
        "width": block.feedforward.width,
        "V": "multiple" if attention.value is None else "dense",
        "A": "low-rank" if attention.matrix is None else "dense",
        "kind": attention.kind,
        "tau": attention.tau,
        "causal": attention.causal,
    }


def _blocks_from(values: Any) -> list[Block]:
    """Blocks of a configuration, with parameters zero."""
    _check_keys("the configuration", values, {"format_version", "dim", "blocks"})
    if values["format_version"] != _FORMAT_VERSION:
        raise ConfigError(
            f"expected format_version {_FORMAT_VERSION}, received {values['format_version']!r}; "
            f"load the model with the release of sinkformer that wrote it"
        )
    dim, blocks = values["dim"], values["blocks"]
    _check_count("dim", dim, 1)
    if not isinstance(blocks, list):
        raise ConfigError(f"expected blocks as a list, received {type(blocks).__name__}")
    return [_block_from(f"block {k}", block, dim) for k, block in enumerate(blocks)]


def _block_from(name: str, values: Any, d: int) -> Block:
    _check_keys(name, values, {"width", "V", "A", "kind", "tau", "causal"})
    _check_count("width", values["width"], 0)
    for key, known in (("V", ("multiple", "dense")), ("A", ("low-rank", "dense"))):
        if values[key] not in known:
            raise ConfigError(f"expected {key} out of {known} in {name}, received {values[key]!r}")
    zeros = torch.zeros
    V = zeros(d, d) if values["V"] == "dense" else zeros(())
    A = zeros(d, d) if values["A"] == "dense" else (zeros(()), zeros(d), zeros(d))
    options = {key: values[key] for key in ("kind", "tau", "causal")}
    width = values["width"]
    return Block(FeedForward(0.0, zeros(d, width), zeros(width, d), zeros(width)), Attention(0.0, V, A, **options))


# Checks -----------------------------------------------------------------------------------------------------------------


def _checked(scores: Tensor, needed: Tensor) -> Tensor:
    """Scores of which those ``needed`` are finite; the others, of padding, become so."""
    finite = torch.isfinite(scores.detach())
    bad = needed & ~finite
    if bool(bad.any()):
        raise NonFiniteError(
            f"expected finite attention scores <A x_i, x_l>, received {float(scores.detach()[bad][0])} at index "
            f"{bad.nonzero()[0].tolist()}, beyond the range of {scores.dtype}; scale the points or A down"
        )
    return torch.where(finite, scores, 0.0)


def _check_keys(name: str, values: Any, known: set[str]) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"expected {name} as a JSON object, received {type(values).__name__}")
    if set(values) != known:
        raise ConfigError(
            f"expected the keys {sorted(known)} in {name}; missing: {sorted(known - set(values)) or 'none'}; "
            f"unknown: {sorted(set(values) - known) or 'none'}"
        )


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"expected {name} as a whole number >= {least}, received {value!r}; give an int")


def _check_options(kind: Any, tau: Any, causal: Any) -> None:
    if kind not in get_args(Kind):
        raise ConfigError(f"expected kind 'hardmax' or 'softmax', received {kind!r}; name one of the two")
    if isinstance(tau, bool) or not isinstance(tau, Real) or not 0 < float(tau) < math.inf:
        raise ConfigError(
            f"expected a temperature tau, positive and finite, received {tau!r}; its limit 0 is kind='hardmax'"
        )
    if not isinstance(causal, bool):
        raise ConfigError(f"expected causal as True or False, received {causal!r}")


def _like(*values: Any) -> Tensor:
    """A tensor of the dtype and device that parameters given as ``values`` are to have."""
    tensors = [t for t in values if isinstance(t, Tensor)]
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    kinds, devices = {t.dtype for t in tensors}, {t.device for t in tensors}
    if len(kinds) > 1 or not kinds <= set(FLOAT_DTYPES):
        raise DTypeError(
            f"expected parameters of one floating-point dtype, received {sorted(map(str, kinds))}; "
            f"convert them with .to(torch.float64)"
        )
    if len(devices) > 1:
        raise DeviceError(
            f"expected parameters on one device, received {sorted(map(str, devices))}; move them to one with .to()"
        )
    return tensors[0].new_zeros(())


def _parameter(name: str, value: Any, shape: tuple[int, ...], like: Tensor) -> nn.Parameter:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number and not isinstance(value, Tensor):
        raise DTypeError(f"expected {name} as {'a tensor' if shape else 'a number'}, received {type(value).__name__}")
    t = torch.as_tensor(value, dtype=like.dtype, device=like.device).detach().clone()
    if tuple(t.shape) != shape:
        raise ShapeError(
            f"expected {name} {f'of shape {shape}' if shape else 'as a number'}, received shape {tuple(t.shape)}"
        )
    if not bool(torch.isfinite(t).all()):
        raise NonFiniteError(
            f"expected a finite {name}, received a NaN, an infinity, or a number beyond the range of {like.dtype}; "
            f"scale it down, or use torch.float64"
        )
    return nn.Parameter(t)
