"""One process or several, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinkformer.errors import ConfigError, DistributedError, MissingExtraError
from sinkformer.streamed.ranks import fingerprint


class Crew:
    """The processes of a run: this one alone, or those that ``torchrun`` or ``accelerate launch`` started.

    Attributes:
        index: number of this process; the first writes files.
        count: number of processes.
    """

    def __init__(self, accelerate: bool, device: torch.device = torch.device("cpu")):  # noqa: B008 - immutable
        """Join the others, if there are any, with a model on this device."""
        self.index, self.count, self.accelerator = 0, 1, None
        if accelerate:
            try:
                from accelerate import Accelerator
            except ImportError:
                raise MissingExtraError("train", "accelerate") from None
            # Unless told so, accelerate takes processes without a GPU for runs of their own.
            self.accelerator = Accelerator(cpu=device.type == "cpu")
            self.index, self.count = self.accelerator.process_index, self.accelerator.num_processes

    @torch.no_grad()
    def agree(self, model: nn.Module) -> None:
        """Give every process the weights of the first."""
        if self.accelerator is not None:
            for p in model.parameters():
                p.copy_(self._reduced(p.detach() if self.index == 0 else torch.zeros_like(p)))

    def _reduced(self, t: Tensor) -> Tensor:
        return self._talk(lambda accelerator: accelerator.reduce(t, reduction="sum"))

    def _talk(self, how: Callable[[Any], Tensor]) -> Tensor:
        try:
            return how(self.accelerator)
        except RuntimeError as error:
            raise DistributedError(
                f"process {self.index} of {self.count} lost the others: one ended, or did not come within the timeout; look "
                f"for the first error in their logs, and start all again with resume=True "
                f"({str(error).strip().splitlines()[0]})"
            ) from error

    def check_alike(self, what: str, *given: Tensor) -> None:
        """Raise unless all processes were given the same tensors."""
        if self.accelerator is None:
            return
        mine = torch.tensor([int(fingerprint(*given), 16) % 2**63], device=self.accelerator.device)
        if len(set(self._talk(lambda accelerator: accelerator.gather(mine)).tolist())) > 1:
            raise ConfigError(
                f"expected the same {what} in every process, received different ones; each takes its own share of a batch"
            )

    def leading(self, number: float) -> float:
        """The number of the first process."""
        if self.accelerator is None:
            return number
        mine = torch.tensor([number if self.index == 0 else 0.0], dtype=torch.float64, device=self.accelerator.device)
        return float(self._reduced(mine))

    def share(self, model: nn.Module, weight: float, loss: float, numbers: list[float]) -> tuple[float, list[float]]:
        """Add up the gradients and the losses of all, each times its weight, and some numbers as they are.

        One message, after which all decide alike. The weights of all processes add up to one.
        """
        if self.accelerator is None:
            return loss, numbers
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None or not weight else weight * p.grad for p in parameters]
        used = [float(p.grad is not None) for p in parameters]
        last = gradients[0].new_tensor([*used, weight * loss if weight else 0.0, *numbers])
        message = self._reduced(torch.cat([*(g.flatten() for g in gradients), last]))
        *sums, last = message.split([*(g.numel() for g in gradients), len(last)])
        last = last.tolist()
        for p, total, users in zip(parameters, sums, last, strict=False):
            p.grad = total.view_as(p) if users else None
        return last[len(parameters)], last[len(parameters) + 1 :]


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold the first Ctrl-C back until asked whether it came, so that no step is left half done; the second acts at once.

    One that nobody asked about is raised at the end. Where Ctrl-C raises no ``KeyboardInterrupt`` in this thread anyway,
    nothing is changed.
    """
    came = asked = False

    def note(signum, frame):
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted() -> bool:
        nonlocal asked
        asked = came
        return came

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came and not asked:
        raise KeyboardInterrupt
