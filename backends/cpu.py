"""The CPU backend: torch's arithmetic, or canonical arithmetic if the run spec says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backends.base.interface import Batch, DeviceInfo, Program, Trainable
from backends.eager.eager import EagerBackend


class CpuBackend:
    """The CPU; the run spec decides between torch and canonical kernels."""

    def __init__(self) -> None:
        self._eager = EagerBackend("cpu")

    @property
    def info(self) -> DeviceInfo:
        """The processor's name."""
        return self._eager.info

    def numerics_profile(self, threads: int) -> Mapping[str, str]:
        """See `backends.eager.numerics.numerics_profile`."""
        return self._eager.numerics_profile(threads)

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        other_batches: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        """Compile for torch's autograd, or to canonical kernels for this processor.

        Raises:
            SamestepError: The task cannot be compiled, with the reason.
        """
        if not trainable.arithmetic.is_canonical:
            return self._eager.compile(trainable, example, other_batches, evaluations)
        from backends.wgpu.canonical_programs import compile_canonical_for_cpu  # noqa: PLC0415  (seconds)

        return compile_canonical_for_cpu(trainable, (example, *other_batches), evaluations)
