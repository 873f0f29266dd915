"""The CPU: torch's own arithmetic, or where the run asks for it the canonical one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backends.base.interface import Batch, DeviceInfo, Program, Trainable
from backends.eager.eager import EagerBackend


class CpuBackend:
    """One CPU; which of the two computes is the run's to say."""

    def __init__(self) -> None:
        self._eager = EagerBackend("cpu")

    @property
    def info(self) -> DeviceInfo:
        """Its name."""
        return self._eager.info

    def signature(self, threads: int) -> Mapping[str, str]:
        """See `backends.eager.numerics.signature`."""
        return self._eager.signature(threads)

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        others: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        """Torch's autograd, or kernels that are compiled for this processor.

        Raises:
            SamestepError: It cannot be, with the reason.
        """
        if not trainable.arithmetic.is_canonical:
            return self._eager.compile(trainable, example, others, evaluations)
        from backends.wgpu.canonical_programs import canonical_on_host  # noqa: PLC0415  (seconds)

        return canonical_on_host(trainable, (example, *others), evaluations)
