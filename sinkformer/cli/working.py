"""From inputs to lines of output, in this process or in several."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sinkformer import errors
from sinkformer.cli.inputs import Inputs
from sinkformer.cli.lines import Layout, Line
from sinkformer.text import Aligner
from sinkformer.text.parallel import mapped

# Pairs that are encoded and solved together, and lines of a block.
WINDOW = 512


@dataclass(frozen=True)
class Work:
    """What a process needs to make lines.

    Attributes:
        inputs: where the pairs are.
        layout: how results are written.
        options: of ``Aligner``.
        folder: where another process looks for a model that is named by a relative path.
    """

    inputs: Inputs
    layout: Layout
    options: dict[str, Any]
    folder: str = ""

    def made_from(self, aligner: Aligner) -> dict[str, Any]:
        """Everything that the lines depend on, by name."""
        return {
            **aligner.settings,
            "device": str(aligner.device),
            "format": self.layout.format.value,
            "ids": self.layout.ids,
            "raw": not self.inputs.tokenized,
            "window": WINDOW,
            "inputs": self.inputs.hashes(),
        }

    def lines(self, items: Iterator[Any], aligner: Aligner, done: int) -> Iterator[Line]:
        """Lines of the items, which come after ``done`` others."""
        for number, result in enumerate(aligner.align(items, window=WINDOW), done + 1):
            yield self.layout.line(number, result)

    def lines_from_workers(self, workers: int, done: int) -> Iterator[Line]:
        """The same lines from several processes, which read the inputs themselves."""
        inputs = replace(self.inputs, names=tuple(str(Path(name).resolve()) for name in self.inputs.names))
        there = replace(self, inputs=inputs, folder=str(Path.cwd()))
        for result in mapped(inputs.blocks(WINDOW, done), there._started, workers):
            for name, message in result["warnings"]:
                warnings.warn(message, getattr(errors, name), stacklevel=2)
            for number, text, kinds, reason in result["lines"]:
                yield Line(number, text, tuple(kinds), reason)

    def _started(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        aligner = Aligner(**self.options)

        def run(block: dict[str, Any]) -> dict[str, Any]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", errors.SinkformerWarning)
                lines = list(self.lines(self.inputs.read(block), aligner, block["first"] - 1))
            kept = [w for w in caught if issubclass(w.category, errors.SinkformerWarning)]
            return {"lines": lines, "warnings": [[w.category.__name__, str(w.message)] for w in kept]}

        return run
