"""Softmax attention and transport attention, trained alike on a task that suits the one and a task that suits the other.

There are sixteen objects in the plane, each with one of four colours, and sixteen blurred glimpses of objects. For every
glimpse the model says the colour of its object: a decoder whose queries are glimpses and whose memory are objects.

    matching   every object is glimpsed once. Who is who depends on all glimpses, and every key deserves the same share
    look-up    all glimpses are of four of the objects, and most keys deserve nothing

The same model is trained with softmax, with transport attention in the cross-attention, and with a penalty in between;
same seed, same data, same number of steps. Printed are accuracy on new sets, the time, and what the keys of the first
layer receive: the share of them that get less than a tenth of their fair share, and the least any of them gets.

    python transport_attention.py        (about two minutes on one core)
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from torch import Tensor, nn
from torch.nn import functional

from sinkformer.attention import SinkhornAttention, replace_attention

OBJECTS, COLOURS, BLUR = 16, 4, 0.35
VARIANTS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "transport": {},
    "tau = 0.5": {"tau": 0.5},
}


class Sets(NamedTuple):
    """A batch of tasks: objects ``(B, 16, 2)`` with their colours, glimpses ``(B, 16, 2)`` with those to be found."""

    objects: Tensor
    colours: Tensor
    glimpses: Tensor
    answers: Tensor


def draw(task: str, count: int, generator: torch.Generator) -> Sets:
    """New sets."""
    objects = torch.randn(count, OBJECTS, 2, generator=generator)
    colours = torch.randint(COLOURS, (count, OBJECTS), generator=generator)
    order = torch.rand(count, OBJECTS, generator=generator).argsort(-1)
    seen = order if task == "matching" else order[:, torch.arange(OBJECTS) % 4]
    blur = BLUR * torch.randn(count, OBJECTS, 2, generator=generator)
    glimpses = objects.gather(1, seen.unsqueeze(-1).expand(-1, -1, 2)) + blur
    return Sets(objects, colours, glimpses, colours.gather(1, seen))


class Reader(nn.Module):
    """Two decoder layers: glimpses look at each other, then at the objects."""

    def __init__(self, width: int = 32):
        """Create the layers; attention is torch's."""
        super().__init__()
        self.glimpse = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width))
        self.object = nn.Sequential(nn.Linear(2 + COLOURS, width), nn.GELU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.answer = nn.Linear(width, COLOURS)

    def forward(self, sets: Sets) -> Tensor:
        """Logits of the colours, ``(B, 16, 4)``."""
        coloured = torch.cat([sets.objects, functional.one_hot(sets.colours, COLOURS).float()], -1)
        tokens, memory = self.glimpse(sets.glimpses), self.object(coloured)
        for layer in self.layers:
            tokens = layer(tokens, memory)
        return self.answer(tokens)


def train(task: str, options: dict[str, Any] | None, steps: int) -> tuple[Reader, float]:
    """A trained model and the seconds it took. All variants start from the same weights and see the same sets."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Reader()
    if options is not None:
        replace_attention(model, select=lambda name, _: name.endswith("multihead_attn"), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    begin = time.process_time()
    for _ in range(steps):
        sets = draw(task, 64, generator)
        loss = functional.cross_entropy(model(sets).flatten(0, 1), sets.answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval(), time.process_time() - begin


@torch.no_grad()
def judge(model: Reader, task: str, count: int) -> tuple[float, Tensor]:
    """Accuracy on new sets, and the coverage of the keys of the first layer, all heads and sets in one row."""
    sets = draw(task, count, torch.Generator().manual_seed(1))
    seen: list[tuple[Tensor, Tensor]] = []
    cross = model.layers[0].get_submodule("multihead_attn")
    hook = cross.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    accuracy = float((model(sets).argmax(-1) == sets.answers).float().mean())
    hook.remove()
    if isinstance(cross, nn.MultiheadAttention):
        cross = SinkhornAttention.from_torch(cross, marginals="queries")
    assert isinstance(cross, SinkhornAttention)
    return accuracy, cross.plan(*seen[0]).coverage.flatten()


def main() -> None:
    """Train all variants on both tasks, print a table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--output", type=Path, default=Path("transport_attention.png"), help="where the picture goes")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything works")
    args = parser.parse_args()
    steps, count = (10, 32) if args.smoke else (args.steps, 2000)

    results: dict[str, dict[str, tuple[float, Tensor]]] = {}
    print(f"{'task':10} {'attention':10} {'accuracy':>8} {'keys below a tenth':>19} {'least share':>12} {'seconds':>8}")
    for task in ("matching", "look-up"):
        results[task] = {}
        for name, options in VARIANTS.items():
            model, seconds = train(task, options, steps)
            accuracy, coverage = judge(model, task, count)
            results[task][name] = accuracy, coverage
            starved, least = float((coverage < 0.1).float().mean()), float(coverage.min())
            print(f"{task:10} {name:10} {accuracy:8.3f} {starved:19.3f} {least:12.3f} {seconds:8.1f}", flush=True)
    draw_coverage(results, args.output)
    print(f"picture: {args.output}")


def draw_coverage(results: dict[str, dict[str, tuple[float, Tensor]]], output: Path) -> None:
    """Sorted coverage of the keys, one curve for each variant."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(11, 4), layout="constrained", sharey=True)
    for axes, (task, variants) in zip(panels, results.items(), strict=True):
        for name, (accuracy, coverage) in variants.items():
            shares = coverage.sort().values
            axes.plot(torch.linspace(0, 1, len(shares)), shares, label=f"{name}: accuracy {accuracy:.2f}")
        axes.axhline(1, color="black", linewidth=0.5)
        axes.set(title=task, xlabel="keys, sorted", ylim=(0, 5))
        axes.legend()
    panels[0].set(ylabel="mass received over the fair share")
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    main()
