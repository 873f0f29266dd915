"""Load the native library and wrap its functions for numpy arrays.

The numpy definitions call `library_for`, and compute in numpy if it returns None. The
library is loaded from samestep's own folder, once, when this module is imported.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from protocol.exact.kernels.targets import TARGETS, BuildTarget, library_path

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]

RULES: Final = (
    "sgd", "momentum", "nesterov", "adamw", "lion", "schedule-free", "adam", "rmsprop", "adagrad",
    "adam-amsgrad", "adamw-amsgrad", "rmsprop-momentum", "rmsprop-centered",
    "rmsprop-centered-momentum", "adafactor",
)  # fmt: skip
"""Update rules in the order of update.c."""
SQUARE_SUM_CHUNK_ELEMENTS: Final = 65_536
HASHED_BYTES: Final = 262_144
_SHORTEST_HASHED_BYTES: Final = 241
"""XXH3 has other functions for shorter inputs; the package `xxhash` hashes them."""
THREAD_ELEMENTS: Final = 262_144
"""Minimum elements per thread. A kernel takes several times as long for 1 MiB as a thread's
start."""

_POINTER, _SIZE, _U32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
_ELEMENTWISE: Final = (_POINTER, _POINTER, _SIZE, _U32)
_GROUPED: Final = (_POINTER, _POINTER, _POINTER, _SIZE, _U32)
_PROTOTYPES: Final[dict[str, tuple[tuple[Any, ...], Any]]] = {
    "apply_update": ((_U32, *(_POINTER,) * 8, _SIZE, _U32), _U32),
    "factor_sums": ((_POINTER, _SIZE, _SIZE, _SIZE, *(_POINTER,) * 3, _U32), None),
    "piece_hashes": ((_POINTER, _POINTER, _SIZE, _U32), None),
    "add_rounded": (_ELEMENTWISE, None),
    "scale": ((_POINTER, ctypes.c_float, _POINTER, _SIZE, _U32), _U32),
    "has_not_finite": ((_POINTER, _SIZE, _U32), _U32),
    "all_negative_zero": ((_POINTER, _SIZE), _U32),
    "square_sums": ((_POINTER, _SIZE, _POINTER, _U32), None),
    "round_bfloat16": ((_POINTER, _SIZE, _U32), None),
    "pack_bfloat16": (_ELEMENTWISE, None),
    "unpack_bfloat16": (_ELEMENTWISE, None),
    **{
        f"{operation}_{codec}": (_GROUPED, None)
        for operation in ("pack", "unpack")
        for codec in ("int8", "int4", "topk")
    },
}


class Library:
    """The functions of a loaded library, for contiguous flat float32 arrays.

    Calls release the GIL.

    Attributes:
        target: The target that it was built for.
    """

    def __init__(self, target: BuildTarget) -> None:
        """Load the library.

        Raises:
            OSError: The library is missing or cannot be loaded.
        """
        self.target = target
        self._c = ctypes.CDLL(str(library_path(target)))
        for name, (arguments, result) in _PROTOTYPES.items():
            function = getattr(self._c, name)
            function.argtypes, function.restype = arguments, result

    def update(
        self,
        rule: str,
        scalars: Array,
        parameters: Array,
        gradient: Array,
        moments: Sequence[Array],
        *,
        average: Array | None = None,
        hashes: Bytes | None = None,
    ) -> bool:
        """Apply an update in place, with `scalars` in update.c's order.

        Args:
            rule: One of `RULES`.
            scalars: The step's scalars.
            parameters: Flat, shape (n,); changed.
            gradient: Shape (n,).
            moments: Shape (n,) each; changed.
            average: Shape (n,), if there is one; changed.
            hashes: Receives the `hash_pieces` of the new parameters, each moment and the average,
                uint8, shape (arrays, pieces, 16).

        Returns:
            Whether all new values are finite.
        """
        moment_addresses = (*(_address(moment) for moment in moments), None, None, None)[:3]
        average_address = None if average is None else _address(average)
        elements = parameters.size
        not_finite = self._c.apply_update(
            RULES.index(rule), _address(scalars), _address(parameters), _address(gradient),
            *moment_addresses, average_address, None if hashes is None else _address(hashes),
            elements, threads_for(elements),
        )  # fmt: skip
        if hashes is not None:
            averages = () if average is None else (average,)
            for values, pieces in zip((parameters, *moments, *averages), hashes, strict=True):
                _hash_short_piece(values, pieces)
        return not not_finite

    def factor_sums(
        self, matrices: Array, epsilon: float, row_sums: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Sum the squares, each plus epsilon, of every row (by piece of columns) and every column.

        Args:
            matrices: Shape (n, rows, columns).
            epsilon: Added to each square.
            row_sums: Receives the sum of each row over each piece of columns, float64, shape
                (n, pieces, rows).

        Returns:
            The sum of each column, float64, shape (n, columns).
        """
        count, rows, columns = matrices.shape
        column_sums, epsilon_array = np.empty((count, columns)), np.array([epsilon])
        self._c.factor_sums(
            _address(matrices), count, rows, columns, _address(epsilon_array), _address(row_sums),
            _address(column_sums), threads_for(matrices.size),
        )  # fmt: skip
        return column_sums

    def hash_pieces(self, values: Array, hashes: Bytes) -> None:
        """Write the XXH3-128 hash of each `HASHED_BYTES` of the values to shape (pieces, 16)."""
        self._c.piece_hashes(
            _address(values), _address(hashes), values.nbytes, threads_for(values.size)
        )
        _hash_short_piece(values, hashes)

    def add_rounded(self, left: Array, right: Array) -> None:
        """Add `right` to `left` in place, and round to bfloat16."""
        self._c.add_rounded(_address(left), _address(right), left.size, threads_for(left.size))

    def scale(self, values: Array, factor: float, out: Array) -> bool:
        """Write values * factor to `out`, which may be `values`; return whether it is finite."""
        threads = threads_for(values.size)
        return not self._c.scale(_address(values), factor, _address(out), values.size, threads)

    def is_finite(self, values: Array) -> bool:
        return not self._c.has_not_finite(_address(values), values.size, threads_for(values.size))

    def is_negative_zero(self, values: Array) -> bool:
        """Return whether all values are -0.0."""
        return bool(self._c.all_negative_zero(_address(values), values.size))

    def square_sums(self, values: Array) -> NDArray[np.float64]:
        """Return the float64 sum of squares of each chunk of `SQUARE_SUM_CHUNK_ELEMENTS`."""
        sums = np.empty(-(-values.size // SQUARE_SUM_CHUNK_ELEMENTS), np.float64)
        self._c.square_sums(_address(values), values.size, _address(sums), threads_for(values.size))
        return sums

    def round_bfloat16(self, values: Array) -> None:
        self._c.round_bfloat16(_address(values), values.size, threads_for(values.size))

    def pack_bfloat16(self, values: Array) -> NDArray[np.uint16]:
        body = np.empty(values.size, "<u2")
        self._c.pack_bfloat16(
            _address(values), _address(body), values.size, threads_for(values.size)
        )
        return body

    def unpack_bfloat16(self, raw: Bytes) -> Array:
        values = np.empty(raw.size // 2, np.float32)
        self._c.unpack_bfloat16(
            _address(raw), _address(values), values.size, threads_for(values.size)
        )
        return values

    def pack(self, codec: str, values: Array, head_bytes: int, body_bytes: int) -> Bytes:
        """Encode values; see `protocol.exact.reduction.codecs` for the layout."""
        raw = np.empty(head_bytes + body_bytes, np.uint8)
        start = _address(raw)
        getattr(self._c, f"pack_{codec}")(
            _address(values), start, start + head_bytes, values.size, threads_for(values.size)
        )
        return raw

    def unpack(self, codec: str, raw: Bytes, head_bytes: int, elements: int) -> Array:
        """Decode the result of `pack`; `raw` has the full length."""
        values = np.empty(elements, np.float32)
        start = _address(raw)
        getattr(self._c, f"unpack_{codec}")(
            start, start + head_bytes, _address(values), elements, threads_for(elements)
        )
        return values


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def runnable_targets() -> list[BuildTarget]:
    """Return the targets that this processor can run, best first."""
    machine = platform.machine().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
    if not sys.platform.startswith("linux") or sys.byteorder != "little":
        return []
    features = _processor_features()
    return [t for t in TARGETS if t.machine == machine and t.features <= features]


def _processor_features() -> frozenset[str]:
    """Return the processor features that numpy has detected; empty if it does not expose them."""
    try:
        features = import_module("numpy._core._multiarray_umath").__cpu_features__
    except (ImportError, AttributeError):
        return frozenset()
    return frozenset(name for name, is_supported in features.items() if is_supported)


def _load_library() -> tuple[Library | None, str]:
    """Load the best library available; return it and "", or None and the reason."""
    targets = runnable_targets()
    if not targets:
        return None, f"none for {platform.machine()} on {sys.platform}; numpy is used, more slowly"
    for target in targets:
        if library_path(target).exists():
            try:
                return Library(target), ""
            except (OSError, AttributeError) as error:
                return None, f"cannot be loaded, so numpy is used, more slowly: {error}"
    return None, "not built, so numpy is used, more slowly; run deploy/environment.sh again"


class _Current:
    library, reason = _load_library()
    threads = 1


def threads_for(elements: int) -> int:
    """Return the number of threads to use for a number of float32 values."""
    return min(_Current.threads, max(1, elements // THREAD_ELEMENTS))


def _hash_short_piece(values: Array, hashes: Bytes) -> None:
    """Write the hash of a last piece that is too short for the kernels."""
    short_bytes = values.nbytes % HASHED_BYTES
    if 0 < short_bytes < _SHORTEST_HASHED_BYTES:
        last = values[-short_bytes // 4 :].tobytes()
        hashes[-1] = np.frombuffer(xxh3_128(last).digest(), np.uint8)


def library_for(*reads: Array, writes: tuple[Array, ...] = ()) -> Library | None:
    """Return the library if it can handle these arrays, else None: the caller then uses numpy.

    It handles contiguous native float32 arrays of one size; `writes` must be writable.
    """
    library = _Current.library
    if library is None:
        return None
    elements = (reads or writes)[0].size
    for array in (*reads, *writes):
        flags = array.flags
        if array.dtype != _FLOAT32 or array.size != elements or not flags.c_contiguous:
            return None
    return library if all(array.flags.writeable for array in writes) else None


def library_for_bytes(raw: Bytes, expected: int) -> Library | None:
    """Return the library if there is one and `raw` is contiguous and has the expected size."""
    is_plain = raw.dtype == _UINT8 and raw.size == expected and raw.flags.c_contiguous
    return _Current.library if is_plain else None


_FLOAT32: Final = np.dtype(np.float32)
_UINT8: Final = np.dtype(np.uint8)


def why_not_native() -> str:
    """Say why there is no native library and what to do; empty if there is one."""
    return f"native kernels: {_Current.reason}" if _Current.reason else ""


def native_name() -> str:
    """Return the instruction set of the loaded library; empty if there is none."""
    return _Current.library.target.name if _Current.library is not None else ""


def use_threads(threads: int) -> None:
    """Set the maximum number of threads of a call.

    Threads end with the call, so they do not compete with other computations of the process.
    """
    _Current.threads = max(1, threads)


@contextmanager
def using(library: Library | None) -> Iterator[None]:
    """Use this library, or numpy for None, until the block ends; for tests and benchmarks."""
    earlier_library, _Current.library = _Current.library, library
    try:
        yield
    finally:
        _Current.library = earlier_library
