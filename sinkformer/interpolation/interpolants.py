"""What ``construct`` returns: the exact network, with its proof, its torch module, and its file."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkformer.errors import ShapeError
from sinkformer.interpolation import files
from sinkformer.interpolation.blocks import Block, ExactBlocks, Kind, check_blocks
from sinkformer.interpolation.comparison import block_parameters
from sinkformer.interpolation.datasets import SequencePairs, read_tokens
from sinkformer.interpolation.exporting import Export, export, points, prediction
from sinkformer.interpolation.layers import TokenTransformer
from sinkformer.interpolation.ledger import Ledger
from sinkformer.interpolation.rationals import rational
from sinkformer.interpolation.vectors import Space
from sinkformer.interpolation.verification import Certificate


@dataclass(frozen=True, eq=False)
class Interpolant:
    """A network that maps every source to its target, as sets, exactly.

    Attributes:
        pairs: the data.
        kind: ``"hardmax"`` or ``"softmax"``.
        tau: temperature of the softmax, exactly; without effect for hardmax, and where ``tau_star`` is None.
        tau_star: the network interpolates at every temperature in ``(0, tau_star]``; None: at every temperature.
        method: the construction.
        blocks: exact, in compact form; ``exact_blocks`` has their matrices.
        ledger: what every phase assumed, chose and had to satisfy.
    """

    pairs: SequencePairs
    kind: Kind
    tau: Fraction
    tau_star: Fraction | None
    method: str
    blocks: tuple[Block, ...]
    ledger: Ledger

    def __repr__(self) -> str:
        """Sizes."""
        return f"Interpolant({self.method}, {self.kind}, L={self.L}, width={self.width}, P={self.parameters}, {self.pairs})"

    @property
    def L(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def width(self) -> int:
        """Largest number of neurons of a block."""
        return max(block.width for block in self.blocks)

    @property
    def parameters(self) -> int:
        """Number of parameters, ``(10 d + 8) L``: four neurons in every block, zeros included."""
        return block_parameters(self.pairs.d) * self.L

    @cached_property
    def space(self) -> Space:
        """The vectors of the data."""
        return Space(self.pairs)

    @cached_property
    def exact_blocks(self) -> ExactBlocks:
        """The blocks with every entry of their matrices as ``fractions.Fraction``, written out when asked for."""
        return ExactBlocks(self.blocks, self.space, self.kind, rational(self.tau))

    @cached_property
    def certificate(self) -> Certificate:
        """What can be checked: the blocks, and the data they shall interpolate."""
        return Certificate(self.pairs, self.blocks, self.kind, rational(self.tau))

    @property
    def model(self) -> TokenTransformer:
        """The network as a torch module in float64; ``export`` has its error, and other formats.

        Raises:
            PrecisionError: float64 cannot hold it.
        """
        return self._float64.model

    @cached_property
    def _float64(self) -> Export:
        return export(self.pairs, self.blocks, self.kind, self.tau, torch.float64)

    def export(self, dtype: torch.dtype = torch.float64) -> Export:
        """The network in floating point, with its predicted error, and its measured error on the data.

        Args:
            dtype: ``torch.float64`` or ``torch.float32``.

        Warns:
            PrecisionWarning: the network interpolates here, but by the prediction rounding might have had it otherwise.

        Raises:
            PrecisionError: the measured error is more than half the digits of the format; the message names the predicted one,
                and the narrowest gap. Or a number is beyond the range of the format.
            ConfigError: another dtype.
        """
        if dtype == torch.float64:
            return self._float64
        return export(self.pairs, self.blocks, self.kind, self.tau, dtype)

    def predicted_error(self, dtype: torch.dtype = torch.float64) -> float:
        """Estimate of the largest error of a coordinate after rounding to a format, in units of max |Y|.

        Raises:
            ConfigError: neither ``torch.float64`` nor ``torch.float32``.
        """
        return prediction(self.pairs, self.blocks, self.kind, self.tau, dtype)

    def trace(self, x: Any) -> list[Stage]:
        """Where the tokens of a sequence are after every block, in float64.

        Args:
            x: ``(n, d)``, of any kind that ``SequencePairs`` takes; of the data, or another.

        Raises:
            ShapeError, NonFiniteError, DTypeError: no sequence of tokens of the data's dimension.
            PrecisionError: float64 cannot hold the network.
        """
        tokens = read_tokens(x, "x")
        if tokens.dim != self.pairs.d:
            raise ShapeError(
                f"expected tokens with {self.pairs.d} coordinates, received {tokens.dim}; "
                f"the network was built for data in R^{self.pairs.d}"
            )
        start = points(tokens)
        with torch.no_grad():
            after = self.model.trace(start)
        stages = [Stage(k, block.phase, x) for k, (block, x) in enumerate(zip(self.blocks, after, strict=True))]
        return [Stage(-1, "input", start), *stages]

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float64) -> Export:
        """Write the module (``model.safetensors``, ``config.json``) and ``certificate.json``.

        The certificate holds the data, the exact blocks, the ledger, and the verdict of the proof.
        ``TokenTransformer.load`` reads the module, ``load`` the exact network.

        Returns:
            The export that was written.

        Raises:
            PrecisionError, ConfigError: of ``export``.
        """
        found = self.export(dtype)
        text = files.text_of(self, self.certificate.check().to_dict(), found.to_dict())
        certificate = Path(folder) / files.CERTIFICATE
        certificate.unlink(missing_ok=True)  # never a certificate beside the module of another network
        found.model.save(folder)
        certificate.write_text(text, encoding="utf-8")
        return found


@dataclass(frozen=True, eq=False)
class Stage:
    """Tokens after a block.

    Attributes:
        block: its number; -1 is the input.
        phase: what the block does.
        points: ``(n, d)``, float64.
    """

    block: int
    phase: str
    points: Tensor


def load(folder: str | Path) -> Interpolant:
    """The exact network that ``Interpolant.save`` wrote. Nothing in the file is believed: ``certificate.check()`` proves it anew.

    Raises:
        ModelError: no certificate there, or a damaged one.
        MissingExtraError: python-flint is not installed.
    """
    found = Interpolant(**files.read(Path(folder)))
    check_blocks(found.blocks, found.pairs)
    return found
