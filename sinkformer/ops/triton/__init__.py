"""The GPU kernels behind torch tensors: whether they can run here, and why not.

triton is imported in this folder only, and only when a kernel is first asked for. With ``TRITON_INTERPRET=1`` in the
environment before that, they run on CPU tensors in triton's interpreter: slow, for tests.
"""

from __future__ import annotations

import importlib
import os
import threading

import torch

_lock = threading.Lock()
_missing: str | None = None
_found = False


def unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device, or None if they can."""
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"the Triton kernels run on CUDA devices, the measures are on {device}"
    return _import_triton() or _too_old(device)


def _too_old(device: torch.device) -> str | None:
    """Why a card cannot run what the kernels are compiled to."""
    if device.type != "cuda" or interpreted() or not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        return "the Triton kernels are written for NVIDIA cards, this torch is built for ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the Triton kernels need compute capability 8.0 (A100, RTX 30) or higher, this card has {major}.{minor}"
    return None


def current(device: torch.device) -> torch.cuda.device:
    """Context in which kernels are compiled for a device and launched there: triton takes the current one."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def interpreted() -> bool:
    """Whether triton runs its kernels in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")


def _import_triton() -> str | None:
    """Why triton cannot be imported; asked once."""
    global _missing, _found
    with _lock:
        if not _found and _missing is None:
            try:
                importlib.import_module("triton")
                _found = True
            except ImportError as error:
                _missing = f"triton cannot be imported ({error}); pip install 'sinkformer[gpu]'"
        return _missing
