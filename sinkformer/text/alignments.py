"""The result for one pair of texts."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinkformer import plots
from sinkformer.couplings import DenseCoupling, EntropicCoupling
from sinkformer.errors import TextWarning
from sinkformer.solutions import Status
from sinkformer.text import pages
from sinkformer.text.tokens import Words

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False)
class Alignment:
    """The coupling of two texts and what follows from it. ``str()`` is the Pharaoh line.

    With n source and m target words every word has mass 1/(n + m); the rest of the mass of a side, its null
    atom, takes the words of the other side that stay alone. Without null atoms (method ``"balanced"``) a source word
    has mass 1/n, a target word 1/m.

    Attributes:
        source: words of the first text.
        target: words of the second text.
        links: pairs (i, j) of word indices, from zero, sorted.
        confidence: for each link how sure it is, in [0, 1]; not rescaled, so unrelated texts have low values. Method
            ``"trained"``: calibrated probability. Others: the fraction of the word's mass that moves along it (without null
            atoms the larger of the two fractions; ``"argmax"`` and ``"itermax"``: 1 - cost of the pair, at least 0).
        confidences: the same for every pair of words, ``(n, m)`` float64.
        unaligned: indices of the source words and of the target words without a link.
        coupling: the ``Coupling``, on the CPU or the device of the aligner; with null atoms it has n + 1 and
            m + 1 atoms, the null atom last. A solver's if the method has one, else dense.
        plan: mass between words, float64, ``(n, m)``.
        null_source: mass of each source word that goes to the null atom, ``(n,)``; zeros without null atoms.
        null_target: mass of each target word that comes from the null atom, ``(m,)``.
        distance: cost of the cheapest matching of the words, with the null price for every word left alone; 0
            for identical texts. In units of the cost, summed over words.
        normalized_distance: ``distance`` divided by its largest possible value, in [0, 1].
        settings: everything the result depends on besides the texts, JSON-able.
    """

    source: Words
    target: Words
    links: list[tuple[int, int]]
    confidence: list[float]
    confidences: Tensor
    unaligned: tuple[list[int], list[int]]
    coupling: EntropicCoupling | DenseCoupling
    plan: Tensor
    null_source: Tensor
    null_target: Tensor
    distance: float
    normalized_distance: float
    settings: dict[str, Any]

    @property
    def mass(self) -> float:
        """Mass moved from words to words: ``plan.sum()``, at most min(n, m)/(n + m) with null atoms, 1 without."""
        return float(self.plan.sum())

    @property
    def status(self) -> Status:
        """How the solver ended; CONVERGED for what needs none."""
        coupling = self.coupling
        return Status(int(coupling.solution.codes)) if isinstance(coupling, EntropicCoupling) else Status.CONVERGED

    @property
    def converged(self) -> bool:
        """Whether the coupling has reached its tolerance and is finite."""
        return self.status is Status.CONVERGED

    @property
    def settings_hash(self) -> str:
        """Twelve hexadecimal digits that differ when a setting does."""
        text = json.dumps(self.settings, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        """The links in Pharaoh format: ``0-0 1-2``."""
        return " ".join(f"{i}-{j}" for i, j in self.links)

    def __repr__(self) -> str:
        """Sizes, distance and status."""
        return (
            f"Alignment({len(self.source)} x {len(self.target)} words, {len(self.links)} links, "
            f"distance={self.distance:.4f}, {self.status.name})"
        )

    def to_dict(self, id: str | int | None = None, *, coupling: bool = False) -> dict[str, Any]:
        """The fields of the JSON lines format; ``id`` comes first if given.

        Args:
            id: of the pair.
            coupling: also ``with_nulls()`` under ``"coupling"``, rows of n + 1 numbers with six digits.
        """
        out: dict[str, Any] = {} if id is None else {"id": id}
        out.update(
            source=list(self.source.words),
            target=list(self.target.words),
            links=[[i, j, round(c, 6)] for (i, j), c in zip(self.links, self.confidence, strict=True)],
            unaligned=[list(side) for side in self.unaligned],
            distance=round(self.distance, 6),
            normalized_distance=round(self.normalized_distance, 6),
            status=self.status.name.lower(),
            settings=self.settings_hash,
        )
        if coupling:
            out["coupling"] = [[round(share, 6) for share in row] for row in self.with_nulls().tolist()]
        return out

    def with_nulls(self) -> Tensor:
        """Shares of a word's mass, ``(n + 1, m + 1)``: words against words, last row and column the null atom.

        The corner (null to null) says nothing about words and is zero. Without null atoms the last row and
        column are zero.
        """
        n, m = self.plan.shape
        full = self.plan.new_zeros(n + 1, m + 1)
        full[:n, :m], full[:n, m], full[n, :m] = self.plan, self.null_source, self.null_target
        scale = n + m if self.settings["null"] or not n or not m else max(n, m)
        return full * scale

    def ascii(self) -> str:
        """A table for a terminal: a line for each link, then the words left alone."""
        return pages.table(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page: both texts, the links, the coupling as a heat map. Right-to-left safe, all escaped.

        Args:
            path: also write the page here, as UTF-8.
        """
        page = pages.page([self])
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def plot(self, path: str | Path | None = None) -> Axes:
        """Picture of the coupling with the null atoms, links framed.

        Args:
            path: write the picture here; the ending decides the format. None: draw only, with pyplot's
                current figure.

        Warns:
            TextWarning: the font lacks letters of these texts; ``to_html`` shows them.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        shows_null = bool(self.settings["null"]) or not self.plan.numel()
        values = self.with_nulls() if shows_null else self.with_nulls()[:-1, :-1]
        null = ["(none)"] if shows_null else []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            axes = plots.coupling(
                values,
                plots.new_axes(values.shape) if path is not None else None,
                # Control characters would make an SVG that no program opens.
                rows=[*map(pages.visible, self.source.words), *null],
                columns=[*map(pages.visible, self.target.words), *null],
                marked=self.links,
                label="share of the word's mass",
                limits=(0.0, 1.0),
            )
            if path is not None:
                plots.save(axes, path)
        missing = [w for w in caught if "missing from" in str(w.message)]
        for w in caught:
            if w not in missing:
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        if missing:
            warnings.warn(
                "the font of the picture lacks some letters of these texts; to_html() shows every script",
                TextWarning,
                stacklevel=2,
            )
        return axes
