"""One transport problem whose source is spread over several processes: no process ever has all of it.

Every process makes its own rows of the source, as it would read them from its own file, and the whole target. They solve
one entropic problem together, and each moves its own rows to where the plan sends them on average.

    torchrun --nproc-per-node 2 sharded_sinkhorn.py        (half a minute on two cores)

Without torchrun the script starts two processes itself. ``--smoke`` also compares with one process.
"""

import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import sinkformer as sf


def rows(start: int, stop: int) -> torch.Tensor:
    """Rows of the source: points on a spiral, ``(stop - start, 3)``. Any rows can be made without the others."""
    t = 0.01 * torch.arange(start, stop, dtype=torch.float64)
    return torch.stack([t.cos(), t.sin(), (0.37 * t).cos()], -1)


def target(m: int) -> sf.Measure:
    """Points of a Gaussian: the same in every process, because the seed is."""
    points = torch.randn(m, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return sf.Measure.uniform(points)


def run(n: int, m: int, compare: bool) -> None:
    """What every process does."""
    group = dist.group.WORLD
    rank, count = dist.get_rank(), dist.get_world_size()
    here, nu = slice(n * rank // count, n * (rank + 1) // count), target(m)
    mine = rows(here.start, here.stop).requires_grad_()

    clock = time.perf_counter()
    solution = sf.sinkhorn(sf.Shard(mine), nu, epsilon=0.2, tolerance=1e-6, process_group=group)
    solution.value.backward()  # all of them together
    seconds = time.perf_counter() - clock

    # The envelope theorem: the gradient of a row is 2 a_i (x_i - where the plan sends it).
    assert mine.grad is not None
    sent = mine.detach() - n * mine.grad / 2
    spread = torch.stack([sent.sum(0) / n, nu.points.mean(0) / count])
    dist.all_reduce(spread)
    if rank == 0:
        print(f"{count} processes, {n} x {m} atoms, {seconds:.1f} s: {solution}, value {solution.value.item():.6f}")
        print(sf.explain(solution))
        sent, wanted = ([round(x, 5) for x in mean.tolist()] for mean in spread)
        print(f"mean of the rows where they were sent {sent}, of the target {wanted}")
    if compare:
        with sf.use_backend("streamed"):
            alone = sf.sinkhorn(sf.Measure.uniform(rows(0, n)), nu, epsilon=0.2, tolerance=1e-6)
        error = float((solution.f.detach() - alone.f[here]).abs().max())
        print(f"rank {rank}: rows {here.start} to {here.stop}, f differs from that of one process by {error:.1e}")
        assert error < 1e-6


def spawned(rank: int, count: int, store: str, n: int, m: int, compare: bool) -> None:
    """One of the processes that this script starts itself; they meet in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count)
    run(n, m, compare)
    dist.destroy_process_group()


def main() -> None:
    """Start two processes, or be one of those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000, help="atoms of the source, of all processes together")
    parser.add_argument("--columns", type=int, default=4000, help="atoms of the target")
    parser.add_argument("--smoke", action="store_true", help="a small problem, to see that everything works")
    args = parser.parse_args()
    sizes = (500, 200, True) if args.smoke else (args.rows, args.columns, False)

    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
        run(*sizes)
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(spawned, (2, f"{folder}/store", *sizes), nprocs=2)


if __name__ == "__main__":
    main()
