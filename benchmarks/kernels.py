"""The native kernels against their numpy definitions: processor time, alternating in one
process."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.exact import update
from protocol.exact.digest import block_digest, pieces_of, state_digest, state_digest_1
from protocol.exact.kernels.library import (
    Library,
    native_name,
    runnable_targets,
    use_threads,
    using,
    why_not_native,
)
from protocol.exact.reduction import average, bfloat16, codecs, tree_sum
from protocol.exact.reduction.average import Array
from protocol.exact.reduction.reducer import Reducer
from protocol.exact.reduction.tree import Subtree
from protocol.exact.replica import aligned_zeros
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.exchange import Codec, Codecs
from protocol.spec.sections.optimizer import OptimizerSpec

Work = Callable[[], Any]


def cases(elements: int) -> tuple[dict[str, Work], list[Array]]:
    """Return the functions to measure, by name, and the moment arrays that updates change."""
    rng = np.random.default_rng(0)
    state = [aligned_zeros(elements) for _ in range(3)]
    gradient, total, out = (aligned_zeros(elements) for _ in range(3))
    for array in (state[0], gradient, total):
        array[:] = rng.standard_normal(elements, np.float32) * np.float32(1e-2)

    def check_finite(arrays: list[Array]) -> None:
        assert all(average.is_finite(array) for array in arrays)

    def step(name: str, hashes: NDArray[np.uint8] | None = None) -> None:
        spec = OptimizerSpec(name=name, lr=1e-6, weight_decay=0.01, clip_norm=0.5)
        scalars = update.step_scalars(spec, 10, 9, 100, 1.0)
        count = 1 + update.moment_count(spec)
        moments = tuple(state[1:count])
        assert update.apply_update(
            spec, scalars, state[0], gradient, moments, decay=True, hashes=hashes
        )

    def digest(*, is_newest: bool) -> None:
        if is_newest:
            state_digest(1, 1, [(str(kind), [array]) for kind, array in enumerate(state)])
        else:
            state_digest_1(1, 1, [(str(kind), {"x": array}) for kind, array in enumerate(state)])

    def add(addition: Callable[[Array, Array], Array]) -> None:
        np.copyto(out[:1], 0)
        check_finite([addition(out, total)])

    def average_and_check() -> None:
        assert average.average(total, 3.0, out)
        average.square_sum(out)

    rounded_values = bfloat16.round_to_bfloat16(total.copy())
    bodies = {codec: codecs.pack(rounded_values, codec).view(np.uint8) for codec in CODECS}

    def pack(codec: Codec) -> None:
        codecs.pack(rounded_values if codec == "bfloat16" else total, codec)

    functions: dict[str, Work] = {
        **{f"update and check, {name}": partial(step, name) for name in OPTIMIZERS},
        "state digest, format 1": partial(digest, is_newest=False),
        "state digest": partial(digest, is_newest=True),
        "adamw, check and digest": partial(step_and_digest, step, state),
        f"coordinator's step, {WORKERS} workers": coordinator_step(step, state, total, out),
        "add, bfloat16, and check": partial(add, tree_sum.add_rounded),
        "average, check, sum of squares": average_and_check,
        "round to bfloat16": lambda: bfloat16.round_to_bfloat16(rounded_values),
        "check alone": lambda: check_finite([total]),
        **{f"{codec} pack": partial(pack, codec) for codec in CODECS},
        **{
            f"{codec} unpack": partial(codecs.unpack, bodies[codec], codec, elements)
            for codec in CODECS
        },
    }
    return functions, state[1:]


def coordinator_step(
    step: Callable[..., None], state: list[Array], total: Array, out: Array
) -> Work:
    """Return a function that computes a coordinator's step: sums, norm, digest and update."""
    sums = [total.copy() for _ in range(WORKERS)]  # values grow with each step, but stay finite
    block = Block(name="all", kind="block", tensors=(TensorSpec(name="x", shape=(len(out),)),))

    def work() -> None:
        reducer = Reducer(WORKERS, Codecs(), [0], lambda _: out)
        for worker, values in enumerate(sums):
            reducer.put(0, str(worker), Subtree(worker, worker + 1), 1.0, values)
        average.square_sum(out)
        block_digest(block, out)
        step_and_digest(step, state)

    return work


def step_and_digest(step: Callable[..., None], state: list[Array]) -> None:
    """Update, check and hash: in one pass if native, in separate passes in numpy."""
    kinds = [(str(kind), [array]) for kind, array in enumerate(state)]
    if not native_name():
        step("adamw")
        state_digest_1(1, 1, [(kind, {"x": array}) for kind, (array,) in kinds])
        return
    hashes = np.empty((len(state), pieces_of(state[0].size), 16), np.uint8)
    step("adamw", hashes)
    pairs = zip(kinds, hashes, strict=True)
    state_digest(1, 1, kinds, {(kind, 0): pieces.tobytes() for (kind, _), pieces in pairs})


WORKERS = 8
UPDATE_CASES = ("update", "adamw", "coordinator")
"""Prefixes of cases that update. Their moments are set to zero first: those of another optimizer
may be invalid."""
OPTIMIZERS = (
    "sgd", "momentum", "nesterov", "adamw", "lion", "schedule-free", "adam", "rmsprop", "adagrad",
)  # fmt: skip
CODECS: tuple[Codec, ...] = ("bfloat16", "int8", "int4", "topk")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--instructions", help="avx512, avx2, sse2 or neon")
    options = parser.parse_args()
    targets = [
        target for target in runnable_targets() if options.instructions in {None, target.name}
    ]
    if not targets:
        raise SystemExit(why_not_native() or f"this machine cannot run {options.instructions}")
    library = Library(targets[0])
    use_threads(options.threads)
    size = options.elements * 4 / 1e9
    print(f"{options.elements:,} values, {library.target.name}, {options.threads} threads, "
          f"load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    print("| what | numpy ms | kernel ms | ratio | GB/s | wall ms |")
    print("|---|---:|---:|---:|---:|---:|")
    functions, moments = cases(options.elements)
    for name, work in functions.items():
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(options.rounds + 1):
            for native in (False, True):
                with using(library if native else None):
                    if name.startswith(UPDATE_CASES):
                        for moment in moments:
                            moment.fill(0)
                    start = time.process_time(), time.perf_counter()
                    work()
                    times[native].append(
                        (time.process_time() - start[0], time.perf_counter() - start[1])
                    )
        numpy_s, kernel_s = (median(x[0] for x in times[k][1:]) for k in (False, True))
        wall = median(x[1] for x in times[True][1:])
        print(f"| {name} | {numpy_s * 1e3:.1f} | {kernel_s * 1e3:.1f} | {kernel_s / numpy_s:.2f} | "
              f"{size / kernel_s:.1f} | {wall * 1e3:.1f} |")  # fmt: skip


if __name__ == "__main__":
    main()
