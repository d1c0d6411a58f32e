"""One process or several, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sinkformer.errors import MissingExtraError


class Crew:
    """The processes of a run: this one alone, or those that ``accelerate launch`` started.

    Attributes:
        index: number of this process; the first writes files.
        count: number of processes.
    """

    def __init__(self, accelerate: bool):
        """Join the others, if there are any."""
        self.index, self.count, self.accelerator = 0, 1, None
        if accelerate:
            try:
                from accelerate import Accelerator
            except ImportError:
                raise MissingExtraError("train", "accelerate") from None
            self.accelerator = Accelerator()
            self.index, self.count = self.accelerator.process_index, self.accelerator.num_processes

    @torch.no_grad()
    def agree(self, model: nn.Module) -> None:
        """Give every process the weights of the first."""
        if self.accelerator is not None:
            for p in model.parameters():
                p.copy_(self._reduced(p.detach() * (self.index == 0), "sum"))

    def _reduced(self, t: Tensor, how: str) -> Tensor:
        assert self.accelerator is not None
        reduced = self.accelerator.reduce(t, reduction=how)
        assert isinstance(reduced, Tensor)  # what comes in is one
        return reduced

    def share(self, model: nn.Module, numbers: list[float]) -> list[float]:
        """Average the gradients, and some numbers, over the processes: one message, after which all decide alike."""
        if self.accelerator is None:
            return numbers
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        message = torch.cat([*(g.flatten() for g in gradients), gradients[0].new_tensor(numbers)])
        message = self._reduced(message, "mean")
        *means, last = message.split([*(g.numel() for g in gradients), len(numbers)])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        return last.tolist()


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
