"""Sums over inner-product scores by GPU kernels: the twin of ``ops.blocks``, with the same functions and arguments.

Scores are made in tiles where they are summed. Where the blocks of rows are too few for the device, the columns are cut
into parts; what the parts found is put together in their order, so that results are the same in every run.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkformer.ops.triton import current, interpreted

# Programs for each multiprocessor: enough that the last ones do not wait for long.
_PROGRAMS_EACH = 4


class Tiles(NamedTuple):
    """How a kernel is cut: rows and columns of a tile, the widest features of a product, warps, stages of loads."""

    rows: int
    columns: int
    width: int
    warps: int
    stages: int


# By the slowest kind of products and the widest features: the largest tiles found that stay in registers and shared memory
# when compiled for compute capability 8.0 and 9.0. Products in IEEE float32 have no tensor cores: their operands pass
# through registers. Features wider than a product are multiplied in several.
_OF_MAXIMA = {
    "float64": {math.inf: Tiles(32, 32, 32, 4, 2)},
    "ieee": {128: Tiles(64, 64, 64, 8, 3), math.inf: Tiles(64, 64, 32, 8, 2)},
    "tf32": {64: Tiles(128, 64, 64, 8, 3), math.inf: Tiles(64, 32, 128, 8, 3)},
    "half": {128: Tiles(128, 64, 128, 8, 3), math.inf: Tiles(64, 32, 256, 8, 3)},
}
_OF_SUMS = {
    "float64": {math.inf: Tiles(32, 32, 32, 4, 2)},
    "ieee": {128: Tiles(64, 32, 64, 8, 3), math.inf: Tiles(64, 32, 32, 8, 2)},
    "tf32": {64: Tiles(64, 32, 64, 4, 3), 128: Tiles(64, 32, 128, 8, 3), math.inf: Tiles(32, 32, 128, 4, 2)},
    "half": {128: Tiles(128, 64, 128, 8, 3), math.inf: Tiles(64, 32, 256, 8, 3)},
}


def log_sum_exp(q: Tensor, k: Tensor, h: Tensor, scale: Tensor, bias: Tensor | None, precision: str = "ieee") -> Tensor:
    """Log sum_j exp(S_ij + h_j), ``(B, n)``."""
    (count, m), n, r = h.shape, q.shape[1], q.shape[2]
    if not count * n * m:
        return h.new_full((count, n), -torch.inf)
    q, k, h, scale = (x.contiguous() for x in (q, k, h, scale))
    tiles = _tiles(_OF_MAXIMA, r, _kind(q, precision))
    grid, parts, span = _grid(count, n, m, tiles, q.device)
    found = h.new_empty((parts, count, n))
    how = {"HAS_BIAS": bias is not None, **_padded("R", r, tiles), "PRECISION": precision}
    given = (q, k, h, scale, h if bias is None else bias, found)
    _launch("log_sum_exp", grid, (*given, n, m, r, count, span, *_groups(count, q, k), *_strides(bias)), how, tiles)
    return found[0] if parts == 1 else found.logsumexp(0)


def hardmax(
    q: Tensor, k: Tensor, h: Tensor, scale: Tensor, bias: Tensor | None, precision: str = "ieee"
) -> tuple[Tensor, Tensor]:
    """``(max_j S_ij + h_j, its j)``, ``(B, n)`` each; the first of equals."""
    (count, m), n, r = h.shape, q.shape[1], q.shape[2]
    if not count * n * m:
        return h.new_full((count, n), -torch.inf), torch.zeros((count, n), dtype=torch.int64, device=h.device)
    q, k, h, scale = (x.contiguous() for x in (q, k, h, scale))
    tiles = _tiles(_OF_MAXIMA, r, _kind(q, precision))
    grid, parts, span = _grid(count, n, m, tiles, q.device)
    found = h.new_empty((parts, count, n))
    index = torch.empty(found.shape, dtype=torch.int64, device=h.device)
    how = {"HAS_BIAS": bias is not None, **_padded("R", r, tiles), "PRECISION": precision}
    given = (q, k, h, scale, h if bias is None else bias, found, index)
    _launch("hardmax", grid, (*given, n, m, r, count, span, *_groups(count, q, k), *_strides(bias)), how, tiles)
    highest, part = found.max(0)
    return highest, index.gather(0, part.unsqueeze(0)).squeeze(0)


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one, read in one order."""
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype)


def sums(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    g: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    values: Tensor | None,
    moment: bool,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor]:
    """``(sum_j W_ij v_j, sum_j w_j)``, as ``blocks.sums``."""
    (count, n), m, r = f.shape, g.shape[1], q.shape[2]
    v = 0 if values is None else values.shape[2]
    if not count * n * m:
        return f.new_zeros((count, n, v)), f.new_zeros((count, n))
    factors = _Factors(left, right, precision)
    of_keys = values is not None and _same(values, k)
    q, k, f, g, scale = (x.contiguous() for x in (q, k, f, g, scale))
    values = values.contiguous() if v and values is not None else None
    tiles = _tiles(_OF_SUMS, max(r, factors.width, v), _kind(q, precision), factors.kind, _kind(values, precision))
    grid, parts, span = _grid(count, n, m, tiles, q.device)
    found, mass = f.new_empty((parts, count, n, v)), f.new_empty((parts, count, n))
    widths = {**_padded("R", r, tiles), **_padded("E", factors.width, tiles), "V": _padded("V", v, tiles)["V"]}
    how = {
        "HAS_BIAS": bias is not None,
        **factors.constants(),
        "HAS_VALUES": values is not None,
        "OF_KEYS": of_keys and widths["R_CHUNKS"] == 1,
        "MOMENT": moment,
        **widths,
        "PRECISION": precision,
    }
    spare = (f if x is None else x for x in (bias, factors.left, factors.right, values))
    groups = _groups(count, q, k, factors.left, factors.right)
    sizes = (n, m, r, factors.width, v, count, span)
    grid = (*grid[:2], -(-v // widths["V"]) if v else 1)
    _launch("sums", grid, (q, k, f, g, scale, *spare, found, mass, *sizes, *groups, *_strides(bias)), how, tiles)
    return (found[0], mass[0]) if parts == 1 else (found.sum(0), mass.sum(0))


def pair_weights(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    g: Tensor,
    scale: Tensor,
    bias: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    moment: bool,
    precision: str = "ieee",
) -> Tensor:
    """W of ``sums``, summed to the shape of ``bias``."""
    (count, n), m, r = f.shape, g.shape[1], q.shape[2]
    if bias.shape[1:] != (n, m):
        return _vector_weights(q, k, f, g, scale, bias, left, right, moment, precision)
    if not count * n * m:
        return torch.zeros(bias.shape, dtype=f.dtype, device=f.device)
    q, k, f, g, scale = (x.contiguous() for x in (q, k, f, g, scale))
    factors = _Factors(left, right, precision)
    tiles = _tiles(_OF_SUMS, max(r, factors.width), _kind(q, precision), factors.kind)
    found = torch.empty(bias.shape, dtype=f.dtype, device=f.device)
    how = {
        **factors.constants(),
        "MOMENT": moment,
        **_padded("R", r, tiles),
        **_padded("E", factors.width, tiles),
        "PRECISION": precision,
    }
    spare = (f if x is None else x for x in (factors.left, factors.right))
    sizes = (n, m, r, factors.width, count // len(bias))
    groups = _groups(count, q, k, factors.left, factors.right)
    grid = (len(bias) * -(-n // tiles.rows) * -(-m // tiles.columns), 1, 1)
    _launch(
        "pair_weights", grid, (q, k, f, g, scale, bias, *spare, found, *sizes, *groups, *_strides(bias)), how, tiles
    )
    return found


def _vector_weights(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    g: Tensor,
    scale: Tensor,
    bias: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    moment: bool,
    precision: str,
) -> Tensor:
    """``pair_weights`` of a bias that is the same for all rows, or for all columns: no sum of size n x m."""
    by_rows = bias.shape[2] == 1
    terms = (q, k, f, g, scale, bias, left, right) if by_rows else (k, q, g, f, scale, bias.mT, right, left)
    mass = sums(*terms, None, False, precision)[1]
    if moment:
        mass = mass + sums(*terms, None, True, precision)[1]
    return mass.unsqueeze(-1 if by_rows else -2).sum_to_size(bias.shape)


# Launches ------------------------------------------------------------------------------------------------------------


class _Factors:
    """The factor <left_i, right_j>, both of one dtype."""

    def __init__(self, left: Tensor | None, right: Tensor | None, precision: str):
        self.precision, self.width = precision, 1
        if left is not None and right is not None:
            self.width = left.shape[2]
            # To bfloat16 if one is; float16 is too narrow for gradients, and exact in TF32.
            pair = {left.dtype, right.dtype}
            dtype = next((x for x in (torch.float64, torch.bfloat16) if x in pair), torch.float32)
            if torch.float16 in pair:
                self.precision = "tf32"
            left, right = left.to(dtype), right.to(dtype)
        self.left, self.right = (None if x is None else x.contiguous() for x in (left, right))

    @property
    def kind(self) -> str:
        return "half" if self.width == 1 else _kind(self.left, self.precision)

    def constants(self) -> dict[str, Any]:
        return {
            "HAS_LEFT": self.left is not None,
            "HAS_RIGHT": self.right is not None,
            "FACTOR_PRECISION": self.precision,
        }


def _kind(x: Tensor | None, precision: str) -> str:
    """How products with an operand are made."""
    if x is None or x.dtype in (torch.bfloat16, torch.float16):
        return "half"
    return "float64" if x.dtype == torch.float64 else precision


def _tiles(table: dict[str, dict[float, Tiles]], width: int, *kinds: str) -> Tiles:
    by_width = table[next(kind for kind in table if kind in kinds)]
    return by_width[next(most for most in by_width if width <= most)]


def _padded(name: str, width: int, tiles: Tiles) -> dict[str, int]:
    """The width of a product, a power of two of at least 16, and how many cover ``width``; 1 stays 1 for a factor."""
    if name == "E" and width == 1:
        return {"E": 1, "E_CHUNKS": 1}
    padded = min(tiles.width, max(16, 1 << (max(1, width) - 1).bit_length()))
    return {name: padded, f"{name}_CHUNKS": -(-width // padded)}


def _grid(count: int, n: int, m: int, tiles: Tiles, device: torch.device) -> tuple[tuple[int, int, int], int, int]:
    """The grid, the number of parts the columns are cut into, and the columns of a part."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    programs = count * -(-n // tiles.rows)
    steps = -(-m // tiles.columns)
    # At least two steps a part: less is all start and end.
    parts = max(1, min(-(-steps // 2), _PROGRAMS_EACH * processors // programs))
    span = -(-steps // parts) * tiles.columns
    parts = -(-m // span)
    return (programs, parts, 1), parts, span


def _groups(count: int, *operands: Tensor | None) -> list[int]:
    return [1 if x is None else count // len(x) for x in operands]


def _strides(bias: Tensor | None) -> list[int]:
    """Steps of a bias in memory, zero along axes on which it is the same."""
    if bias is None:
        return [0, 0, 0]
    return [0 if size == 1 else step for size, step in zip(bias.shape, bias.stride(), strict=True)]


def _launch(name: str, grid: tuple[int, int, int], arguments: tuple, constants: dict[str, Any], tiles: Tiles) -> None:
    kernel = getattr(importlib.import_module("sinkformer.ops.triton.score_kernels"), f"{name}_kernel")
    if interpreted():  # which multiplies neither bfloat16 nor in TF32
        constants = {key: "widened" if key.endswith("PRECISION") else x for key, x in constants.items()}
    with current(arguments[0].device):
        kernel[grid](
            *arguments,
            **constants,
            BN=tiles.rows,
            BM=tiles.columns,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            enable_fp_fusion=True,
        )
