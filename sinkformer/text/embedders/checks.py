"""Checks of what users pass in: vectors of their own models, devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkformer.errors import DeviceError, DTypeError, NonFiniteError, ShapeError


def checked_vectors(returned: Any, texts: Sequence[Sequence[str]], name: str) -> list[Tensor]:
    """What a model returned for ``texts``, as floating-point tensors of shape ``(n_words, d)``.

    Raises:
        DTypeError: no list, or something else than real numbers in it.
        ShapeError: not one matrix for each text, or not one row for each word, or rows of different width or
            of none.
        NonFiniteError: NaN or infinity in a vector.
    """
    remedy = "return one (n_words, d) array of numbers for each text"
    try:
        items = iter(returned)
    except TypeError as error:
        raise DTypeError(
            f"expected a list of matrices from the model {name!r}, received {type(returned).__name__}; {remedy}"
        ) from error
    matrices = list(items)
    if len(matrices) != len(texts):
        raise ShapeError(f"expected {len(texts)} matrices from the model {name!r}, received {len(matrices)}; {remedy}")
    out = [_matrix(x, words, name, remedy) for x, words in zip(matrices, texts, strict=True)]
    widths = sorted({x.shape[1] for x in out if len(x)})
    if len(widths) > 1:
        raise ShapeError(f"expected vectors of one width from the model {name!r}, received widths {widths}")
    width = widths[0] if widths else 0
    return [x if len(x) else x.new_zeros(0, width) for x in out]


def _matrix(value: Any, words: Sequence[str], name: str, remedy: str) -> Tensor:
    try:
        x = value.detach() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except ValueError as error:  # rows of different lengths
        raise ShapeError(
            f"expected a matrix for {len(words)} words from the model {name!r}, received a ragged "
            f"{type(value).__name__}; {remedy}"
        ) from error
    except (TypeError, RuntimeError) as error:  # text, objects, numbers torch has no type for
        raise DTypeError(
            f"expected numbers from the model {name!r}, received a {type(value).__name__} that is no array of "
            f"them ({first_line(error)}); {remedy}"
        ) from error
    if x.is_complex():
        raise DTypeError(f"expected real numbers from the model {name!r}, received {x.dtype}; {remedy}")
    if not len(words) and not x.numel():
        # An empty list of vectors has no second axis; the width comes from the other texts.
        x = x.reshape(0, x.shape[-1] if x.dim() == 2 else 0)
    if x.dim() != 2 or x.shape[0] != len(words) or (len(words) and not x.shape[1]):
        raise ShapeError(
            f"expected one row for each of {len(words)} words from the model {name!r}, received shape "
            f"{tuple(x.shape)}; {remedy}"
        )
    bad = ~torch.isfinite(x).all(-1)
    if bool(bad.any()):
        k = int(bad.int().argmax())
        raise NonFiniteError(
            f"expected finite vectors from the model {name!r}, received NaN or infinity for word {k} ({words[k]!r}); "
            "return zeros for a word without a vector"
        )
    return x if x.is_floating_point() else x.to(torch.float64)


def checked_device(device: str | torch.device) -> torch.device:
    """The device, or a DeviceError that says what is wrong with it."""
    if not isinstance(device, (str, torch.device)):
        raise DTypeError(f"expected device as a str or a torch.device, received {type(device).__name__}; use 'cpu'")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"expected a torch device such as 'cpu' or 'cuda', received {device!r}") from error
    if found.type not in ("cpu", "cuda", "mps"):
        raise DeviceError(f"expected one of the devices 'cpu', 'cuda' and 'mps', received {str(found)!r}; use 'cpu'")
    if found.type == "cuda" and not (found.index or 0) < torch.cuda.device_count():
        raise DeviceError(
            f"device {str(found)!r} was asked for, but this torch sees no CUDA device; use 'cpu'"
            if not torch.cuda.device_count()
            else f"expected a CUDA device below {torch.cuda.device_count()}, received {str(found)!r}"
        )
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError(f"device {str(found)!r} was asked for, but this torch sees no Apple GPU; use 'cpu'")
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
