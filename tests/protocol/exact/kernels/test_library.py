"""The native kernels have the bits of their numpy definitions: every rule and codec, special
values, odd lengths, every alignment, several threads, and each instruction set of this machine."""

from __future__ import annotations

import itertools
import shutil
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.exact import adafactor, update
from protocol.exact.digest import piece_hashes, pieces_of
from protocol.exact.kernels import library
from protocol.exact.kernels.library import Library, library_for, runnable_targets, using
from protocol.exact.kernels.targets import TARGETS, library_path
from protocol.exact.reduction import absent, average, bfloat16, codecs, tree_sum
from protocol.machine.compiler import build_kernels, zig
from protocol.spec.sections.optimizer import EmaSpec, OptimizerSpec
from tests.protocol.exact.kernels.emulated import EmulatedLibrary

BUILT_TARGETS = [target for target in runnable_targets() if library_path(target).exists()]
EMULATED_TARGETS = [
    target for target in TARGETS
    if target not in runnable_targets() and zig() and shutil.which(f"qemu-{target.machine}")
]  # fmt: skip
PARAMETERS = [
    *BUILT_TARGETS,
    *(pytest.param(target, marks=pytest.mark.slow) for target in EMULATED_TARGETS),
]
"""Emulated targets are slow: their program is compiled with its C library, which takes 45 s."""
pytestmark = pytest.mark.skipif(not BUILT_TARGETS, reason="no kernels were built for this machine")

SPECIAL = np.array(
    [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000, 0x3F7FFFFF, 0x3F7F7FFF, 0x3F808000,
     0x3F818000, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF,
     0x4B400000],
    np.uint32,
)  # fmt: skip
"""Zero, subnormals, the smallest normal numbers, ties of bfloat16, the largest, infinity, NaN."""
VARIANTS: list[dict[str, Any]] = [
    {"name": name, "momentum": 0.0 if name == "rmsprop" else 0.9}
    for name in library.RULES if "-" not in name or name == "schedule-free"
] + [
    {"name": "adam", "amsgrad": True},
    {"name": "adamw", "amsgrad": True},
    {"name": "rmsprop", "momentum": 0.8},
    {"name": "rmsprop", "momentum": 0.0, "centered": True},
    {"name": "rmsprop", "momentum": 0.8, "centered": True},
]  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "clip_norm": 0.5},
    {"weight_decay": 0.1, "clip_value": 0.01},
    {"ema": EmaSpec(decay=0.75)},
]
RULES = [
    OptimizerSpec(lr=lr, betas=betas, alpha=betas[1], **variant, **other_settings)
    for variant, (lr, betas) in itertools.product(
        VARIANTS, [(0.1, (0.9, 0.999)), (1e-3, (0.4, 0.99)), (3.0, (0.5, 0.5))]
    )
    for other_settings in SETTINGS
    if variant["name"] != "schedule-free" or "ema" not in other_settings
]
LENGTHS = st.one_of(
    st.integers(0, 300),
    st.sampled_from([4095, 4096, 4097, 8191, 65_535, 65_536, 65_537, 70_001, 131_079]),
)


def values(seed: int, elements: int, offset: int = 0) -> np.ndarray:
    """Make normal numbers of many magnitudes, random bits, special values and runs of equal values,
    at an address `offset` bytes after a multiple of 64."""
    rng = np.random.default_rng(seed)
    raw = np.empty(elements * 4 + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    array = raw[start : start + elements * 4].view(np.float32)
    kind = seed % 4
    array[:] = rng.standard_normal(elements) * 10.0 ** rng.integers(-3, 3)
    if kind == 1:
        array[:] = rng.integers(0, 2**32, elements, np.uint32).view(np.float32)
    elif kind == 2:
        signs = rng.integers(0, 2, elements, np.uint32) << np.uint32(31)
        array[:] = (rng.choice(SPECIAL, elements) | signs).view(np.float32)
    elif kind == 3 and elements:
        array[rng.integers(0, elements, elements // 50 + 1)] = np.float32(rng.choice([0.5, -0.0]))
        array[rng.integers(0, elements, 1)] = rng.choice(SPECIAL[:15]).view(np.float32)
    return array


def bits(array: np.ndarray) -> np.ndarray:
    """Return the bits as integers, with all NaNs equal."""
    words = np.array(array).view(np.uint32)
    return np.where((words & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC00000), words)


@pytest.fixture(scope="module", params=PARAMETERS, ids=lambda target: target.name)
def kernels(request, tmp_path_factory):
    if request.param in BUILT_TARGETS:
        yield Library(request.param)
        return
    with pytest.MonkeyPatch.context() as patch:
        emulated = EmulatedLibrary(request.param, tmp_path_factory.mktemp("emulated"), patch)
        yield emulated
        emulated.end()


@pytest.fixture(autouse=True)
def _threads_for_few_elements(monkeypatch):
    monkeypatch.setattr(library, "THREAD_ELEMENTS", 1)
    yield
    library.use_threads(1)


class Case(NamedTuple):
    """Arguments from which an array is made, and the number of threads that work on it."""

    seed: int
    elements: int
    offset: int
    threads: int


CASES = st.builds(
    Case, st.integers(0, 2**32 - 1), LENGTHS, st.integers(0, 63), st.integers(1, 8)
)  # fmt: skip


def apply_case(kernels: Library, case: Case) -> tuple[int, int, int]:
    """Set the threads, and return seed, elements (few for an emulated processor) and offset."""
    library.use_threads(case.threads)
    element_count = case.elements % 9001 if isinstance(kernels, EmulatedLibrary) else case.elements
    return case.seed, element_count, case.offset


@given(CASES, st.sampled_from(RULES), st.booleans(), st.integers(1, 50))
def test_updates_match_numpy(kernels, case, spec, decay, step):
    seed, elements, offset = apply_case(kernels, case)
    offsets = [offset, 63 - offset, offset * 7 % 64, seed % 64, seed * 5 % 64]
    scalars = update.step_scalars(spec, step, step - 1, 100, 1.7)
    gradient = values(seed + 3, elements, offsets[3])
    count = update.state_arrays(spec)
    moments = slice(1, 1 + update.moment_count(spec))
    results: list[Any] = []
    for native in (None, kernels):
        state = [values(seed + i, elements, offsets[i]) for i in range(count)]
        with using(native):
            finite = update.apply_update(
                spec, scalars, state[0], gradient, tuple(state[moments]), decay=decay,
                average=state[-1] if spec.average else None,
            )  # fmt: skip
        results.append((finite, *map(bits, state)))
    assert results[0][0] == results[1][0]
    for expected, native_bits in zip(results[0][1:], results[1][1:], strict=True):
        np.testing.assert_array_equal(native_bits, expected)


def test_every_rule_has_a_variant():
    assert {update.rule_name(spec) for spec in RULES} == set(library.RULES)


@given(CASES, st.sampled_from(RULES))
def test_hashes_match_xxhash(kernels, case, spec):
    """For each piece, hashed alone and during an update."""
    seed, elements, offset = apply_case(kernels, case)
    scalars = update.step_scalars(spec, 3, 2, 100, 1.7)
    count = update.state_arrays(spec)
    state = [values(seed + i, elements, (offset + 7 * i) % 64) for i in range(count)]
    hashes = np.empty((count, pieces_of(elements), 16), np.uint8)
    with using(kernels):
        update.apply_update(
            spec, scalars, state[0], values(seed, elements),
            tuple(state[1 : 1 + update.moment_count(spec)]), decay=True,
            average=state[-1] if spec.average else None, hashes=hashes,
        )  # fmt: skip
        separate_hashes = [piece_hashes(array) for array in state]
    with using(None):
        expected = [piece_hashes(array) for array in state]
    assert separate_hashes == expected
    assert [pieces.tobytes() for pieces in hashes] == expected


@given(CASES, st.integers(1, 2100), st.integers(1, 40))
def test_row_and_column_sums_match_numpy(kernels, case, columns, rows):
    seed, _, offset = apply_case(kernels, case)
    count = max(1, 9000 // (rows * columns))
    stack = values(seed, count * rows * columns, offset).reshape(count, rows, columns)
    spec = OptimizerSpec(name="adafactor", eps=1e-6)
    scalars = update.step_scalars(spec, 2, 1, 9, 1.0)
    contents = []
    for native in (None, kernels):
        with using(native), np.errstate(all="ignore"):
            sums = adafactor._square_sums(scalars, stack)
        contents.append([np.where(np.isnan(array), 0.0, array).tobytes() for array in sums])
    assert contents[0] == contents[1]


@given(case=CASES)
def test_sums_match_numpy(kernels, case):
    seed, elements, offset = apply_case(kernels, case)
    for add in tree_sum.ADDITIONS.values():
        results: list[Any] = []
        for native in (None, kernels):
            left, right = values(seed, elements, offset), values(seed + 1, elements, 63 - offset)
            with using(native):
                results.append(bits(add(left, right)))
        np.testing.assert_array_equal(results[1], results[0])


@given(case=CASES)
def test_averages_and_checks_match_numpy(kernels, case):
    seed, elements, offset = apply_case(kernels, case)
    input_values = values(seed, elements, offset)
    results: list[Any] = []
    for native in (None, kernels):
        out = values(0, elements, 63 - offset)
        with using(native):
            finite = average.average(input_values, 1.0 + seed % 7, out)
            results.append(
                (finite, average.is_finite(input_values), absent.is_absent(input_values))
            )
            results.append((np.float64(average.square_sum(input_values)).tobytes(),))
        results.append((bits(out).tobytes(),))
    # otherwise a sum of squares may be a NaN with another payload
    if np.isfinite(input_values).all():
        assert results[:3] == results[3:]
    assert results[0] == results[3]
    assert results[2] == results[5]


@given(case=CASES)
def test_square_sums_match_numpy_even_if_not_finite(kernels, case):
    seed, elements, offset = apply_case(kernels, case)
    input_values = values(seed, elements, offset)
    with using(None):
        expected = average.square_sum(input_values)
    with using(kernels):
        native_sum = average.square_sum(input_values)
    np.testing.assert_equal(native_sum, expected)


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4", "topk"])
@given(case=CASES)
def test_codecs_match_numpy(kernels, codec, case):
    seed, elements, offset = apply_case(kernels, case)
    results: list[Any] = []
    for native in (None, kernels):
        array = values(seed, elements, offset)
        with using(native):
            body = codecs.pack(array, codec).view(np.uint8)
            raw = np.empty(body.size + 64, np.uint8)[63 - offset :][: body.size]
            raw[:] = body
            results.append((body.tobytes(), bits(codecs.unpack(raw, codec, elements)).tobytes()))
            results.append((bits(codecs.project(array, codec)).tobytes(),))
    assert results[:2] == results[2:]


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4", "topk"])
@given(case=CASES)
def test_unpacking_any_bytes_matches_numpy(kernels, codec, case):
    seed, elements, offset = apply_case(kernels, case)
    rng = np.random.default_rng(seed)
    length = codecs.body_bytes(codec, elements)
    raw = rng.integers(0, 256, length + 64, np.uint8)[offset:][:length]
    contents: list[Any] = []
    for native in (None, kernels):
        with using(native):
            contents.append(bits(codecs.unpack(raw, codec, elements)).tobytes())
    assert contents[0] == contents[1]


def test_equal_magnitudes_are_chosen_by_index(kernels):
    for array in (np.full(9000, -2.0, np.float32), np.arange(9000, dtype=np.float32) // 70):
        contents: list[Any] = []
        for native in (None, kernels):
            with using(native):
                contents.append(codecs.pack(array, "topk").tobytes())
        assert contents[0] == contents[1]


def test_absent_gradients_are_recognized(kernels):
    with using(kernels):
        for elements in (1, 7, 4096, 10_001):
            gradient = absent.absent_gradient(elements)
            assert absent.is_absent(gradient)
            gradient[-1] = 0.0
            assert not absent.is_absent(gradient)


def test_unsupported_arrays_are_left_to_numpy():
    with using(Library(BUILT_TARGETS[0])):
        small_array = np.zeros(8, np.float32)
        assert library_for(small_array) is not None
        assert library_for(small_array.astype(np.float64)) is None
        assert library_for(small_array.astype(">f4")) is None
        assert library_for(small_array[::2]) is None
        assert library_for(small_array, writes=(small_array[:4],)) is None
        read_only = np.frombuffer(small_array.tobytes(), np.float32)
        assert library_for(writes=(read_only,)) is None
        with pytest.raises(ValueError, match="read-only"):
            bfloat16.round_to_bfloat16(read_only)
        with pytest.raises(ValueError, match="broadcast"):
            tree_sum.add_arrays(small_array, np.zeros(7, np.float32))


def test_without_a_library_the_reason_is_reported(monkeypatch):
    monkeypatch.setattr(library, "library_path", lambda target: library_path(target).parent / "no")
    assert library._load_library()[1].startswith("not built")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert library._load_library()[1].startswith("none for riscv64")


@pytest.mark.skipif(zig() is None, reason="ziglang is not installed")
def test_zig_builds_for_all_processors():
    assert build_kernels() == [library_path(target) for target in TARGETS]
    assert all(library_path(target).exists() for target in TARGETS)
