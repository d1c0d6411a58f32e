"""The GPU kernels compiled for the cards, without one: types, layouts, shared memory and registers.

Run as a program, in a process without triton's interpreter, this file compiles what ``LAUNCHES`` would launch and prints one
line of JSON a kernel. A launch is a function that calls the public functions of a kernel module with tensors on the CPU; it
is recorded with its arguments, and nothing runs. Another module of kernels adds its own launches to the table.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sinkformer.ops import triton

# Bytes of shared memory that a program may have.
SHARED = {80: 163 * 1024, 90: 227 * 1024}


# Launches ------------------------------------------------------------------------------------------------------------


def scores_pass(
    dtype: torch.dtype, width: int, precision: str, operation: str, bias: bool = False
) -> Callable[[], None]:
    """One pass of ``ops.triton.streamed`` with features of a width, or of all that a backward pass makes."""

    def launch() -> None:
        from sinkformer.ops.triton import streamed

        wide = torch.float64 if dtype == torch.float64 else torch.float32
        q, k, values = (torch.zeros(4, 1024, width, dtype=dtype) for _ in range(3))
        f = g = torch.zeros(4, 1024, dtype=wide)
        scale = torch.ones(4, dtype=wide)
        b = torch.zeros(1, 1024, 1024, dtype=dtype) if bias else None
        plan = (q, k, f, g, scale, b)
        if operation in ("log_sum_exp", "hardmax"):
            getattr(streamed, operation)(q, k, g, scale, b, precision)
        elif operation == "transport":
            streamed.sums(*plan, None, None, values, False, precision)
        elif operation == "softmax backward":
            streamed.sums(*plan, f.unsqueeze(-1), None, k, False, precision)
        elif operation == "moment":
            streamed.sums(*plan, None, None, None, True, precision)
        elif operation == "transport backward":
            upstream = torch.zeros(4, 1024, width, dtype=wide)
            streamed.sums(*plan, upstream, values, k, False, precision)
        elif operation == "bias backward":
            upstream = torch.zeros(4, 1024, width, dtype=wide)
            streamed.pair_weights(*plan, upstream, values, False, precision)

    return launch


def single_atoms() -> None:
    """Sizes of one are constants to the compiler, of another type than sizes."""
    from sinkformer.ops.triton import streamed

    q, f = torch.zeros(1, 1, 1), torch.zeros(1, 1)
    plan = (q, q, f, f, torch.ones(1), torch.zeros(1, 1, 1))
    streamed.log_sum_exp(q, q, f, *plan[4:])
    streamed.hardmax(q, q, f, *plan[4:])
    streamed.sums(*plan, q, q, q, True)
    streamed.pair_weights(*plan, q, q, True)


def small_problems(
    n: int, m: int, dtype: torch.dtype, warm: bool = False, derivative: bool = False
) -> Callable[[], None]:
    """A batch of ``ops.triton.small``, solved or differentiated."""

    def launch() -> None:
        from sinkformer.ops.triton import small

        cost, epsilon = torch.zeros(4, n, m, dtype=dtype), torch.ones(4, dtype=torch.float64)
        a, b = (torch.ones(4, size, dtype=torch.float64) for size in (n, m))
        if derivative:
            small.pull_back(cost, a, b, epsilon, a, b, a, b, rtol=1e-6)
        else:
            small.solve(cost, a, b, epsilon, tolerance=1e-3, budget=100, start=b if warm else None)

    return launch


def stored_kernel(dtype: torch.dtype, m: int) -> Callable[[], None]:
    """A kernel of m columns built and swept: fused in blocks of 16, 8 or 4 rows, or not at all."""

    def launch() -> None:
        from sinkformer.ops.triton import stored

        kernel = stored.Kernel(torch.full((64,), 1 / 64), torch.full((m,), 1 / m), dtype)
        zero = torch.zeros(64, dtype=torch.float64), torch.zeros(m, dtype=torch.float64)
        kernel.build(torch.zeros(64, 64), torch.zeros(m, 64), *zero)
        kernel.sweep(0.5)

    return launch


FORWARD = ("log_sum_exp", "hardmax", "transport", "moment")
BACKWARD = ("softmax backward", "transport backward")
KINDS = {
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "bfloat16": (torch.bfloat16, "ieee"),
    "float16": (torch.float16, "ieee"),
    "float64": (torch.float64, "ieee"),
}
# Name: (launch, whether all its numbers must stay in registers).
LAUNCHES: dict[str, tuple[Callable[[], None], bool]] = {
    f"{operation}, {kind}, {width} features": (scores_pass(dtype, width, precision, operation), operation in FORWARD)
    for kind, (dtype, precision) in KINDS.items()
    for operation in (*FORWARD, *BACKWARD)
    for width in (3, 64, 128, 256)
    if operation not in ("hardmax", "moment") or width == 64
} | {
    f"{operation} with a bias, {kind}": (scores_pass(dtype, 64, precision, operation, bias=True), operation in FORWARD)
    for kind, (dtype, precision) in KINDS.items()
    for operation in ("log_sum_exp", "transport", "bias backward")
}
LAUNCHES["single atoms"] = single_atoms, True
LAUNCHES |= {
    f"stored kernel, {dtype}, {m} columns": (stored_kernel(dtype, m), True)
    for dtype in (torch.bfloat16, torch.float32)
    for m in (1000, 5000, 10_000, 20_000)
}
# What is done once a problem may leave the registers.
LAUNCHES |= {
    f"small problems, {dtype}, {size} atoms": (small_problems(size, size, dtype), False)
    for dtype in (torch.float32, torch.float64)
    for size in (16, 32, 64, 128)
}
LAUNCHES["small problems from a start"] = small_problems(32, 32, torch.float32, warm=True), False
LAUNCHES["derivative of small problems"] = small_problems(64, 64, torch.float64, derivative=True), False
QUICK = "log_sum_exp, ieee, 64 features"


# The program ---------------------------------------------------------------------------------------------------------


def signature(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, str], dict, dict]:
    """Types, constants and alignments of arguments, as a launch derives them."""
    pointers = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16", "int64": "i64"}
    pointers |= {"int32": "i32", "bool": "i1", "uint8": "u8", "int8": "i8"}
    given = dict(zip(kernel.arg_names, args, strict=False)) | {x: y for x, y in kwargs.items() if x in kernel.arg_names}
    types, constants, aligned = {}, {}, {}
    for place, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = given[name]
        if parameter.is_constexpr or value is None or (value == 1 if type(value) is int else False):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name], aligned[(place,)] = f"*{pointers[str(value.dtype).split('.')[1]]}", [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            types[name] = "i1"
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                aligned[(place,)] = [["tt.divisibility", 16]]
    return types, constants, aligned


def recorded(launch: Callable[[], None]) -> list[tuple[Any, tuple, dict[str, Any]]]:
    """``(kernel, arguments, options)`` of every launch, none of which takes place."""
    from triton.runtime.jit import JITFunction

    launches = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    original, JITFunction.run = JITFunction.run, note
    try:
        launch()
    finally:
        JITFunction.run = original
    return launches


def compiled(launch: Callable[[], None], card: int) -> Iterator[dict[str, Any]]:
    """What every kernel of a launch needs on a card."""
    import triton as package
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    dump = Path(package.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for kernel, args, kwargs in recorded(launch):
        types, constants, aligned = signature(kernel, args, kwargs)
        source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
        options = {
            key: x for key, x in kwargs.items() if key in ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
        }
        made = package.compile(source, target=GPUTarget("cuda", card, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            told = subprocess.run(
                [dump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            )
        registers, stack = (int(re.findall(rf"{what}:(\d+)", told.stdout)[-1]) for what in ("REG", "STACK"))
        yield {"registers": registers, "spilled": stack, "shared": made.metadata.shared}


def main(names: list[str]) -> None:
    for name in names:
        launch, whole = LAUNCHES[name]
        for card in SHARED:
            for needs in compiled(launch, card):
                sys.stdout.write(json.dumps({"name": name, "card": card, "whole": whole, **needs}) + "\n")
                sys.stdout.flush()


# The tests -----------------------------------------------------------------------------------------------------------

WITHOUT_TRITON = triton._import_triton()
pytestmark = pytest.mark.skipif(WITHOUT_TRITON is not None, reason=str(WITHOUT_TRITON))


def assert_they_fit(names: list[str]) -> None:
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    done = subprocess.run(
        [sys.executable, __file__, *names], env=environment, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr[-5000:]
    needs = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(x["name"], x["card"]) for x in needs} == {(name, card) for name in names for card in SHARED}
    assert not [x for x in needs if x["shared"] > SHARED[x["card"]]], "more shared memory than a card has"
    assert not [x for x in needs if x["whole"] and x["spilled"]], "registers spill in a forward kernel"


def test_one_kernel_compiles():
    assert_they_fit([QUICK])


@pytest.mark.slow
def test_all_kernels_compile():
    assert_they_fit(list(LAUNCHES))


if __name__ == "__main__":
    main(sys.argv[1:] or list(LAUNCHES))
