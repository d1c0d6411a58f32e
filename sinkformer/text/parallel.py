"""Blocks of work through several processes, on one machine or a cluster. The only module that imports ray."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sinkformer.errors import ConfigError, MissingExtraError, SinkformerError


def mapped(blocks: Sequence[Any], start: Callable[[], Callable[[Any], Any]], workers: int) -> Iterator[Any]:
    """``start()(block)`` for every block, in order, from a pool of processes in which ``start`` is called once each.

    The pool is made with Ray Data: on the cluster that ``$RAY_ADDRESS`` names, else on this machine. A process has one core
    and one thread. Blocks and results are bounded in number on the way, so that memory does not grow with theirs.

    Args:
        blocks: JSON-able.
        start: a picklable callable; the function that it returns gives a JSON-able result.
        workers: processes, >= 1.

    Raises:
        ConfigError: ``workers`` below 1.
        MissingExtraError: ray is not installed.
        SinkformerError: an error in a worker.
    """
    if workers < 1:
        raise ConfigError(f"expected workers >= 1, received {workers}")
    ray, data = _ray()
    joined = ray.is_initialized()
    if not joined:
        cluster = bool(os.environ.get("RAY_ADDRESS"))
        ray.init(
            num_cpus=None if cluster else workers,
            include_dashboard=None if cluster else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    try:
        yield from _results(data, blocks, start, workers)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise SinkformerError(f"a worker failed: {str(cause).strip().splitlines()[-1]}") from error
    finally:
        if not joined:
            ray.shutdown()


def _results(
    data: Any, blocks: Sequence[Any], start: Callable[[], Callable[[Any], Any]], workers: int
) -> Iterator[Any]:
    class Worker:
        def __init__(self) -> None:
            self.work = start()

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"result": [json.dumps(self.work(json.loads(block))) for block in batch["block"]]}

    context = data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = [{"block": json.dumps(block)} for block in blocks]
    if not rows:
        return
    results = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        Worker, batch_size=1, compute=data.ActorPoolStrategy(size=workers), num_cpus=1
    )
    for row in results.iter_rows():
        yield json.loads(row["result"])


def _ray() -> tuple[Any, Any]:
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError("ray", str(error.name or "ray")) from error
    return ray, ray.data
