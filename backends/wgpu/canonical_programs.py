"""Programs with canonical arithmetic: on the CPU, and on a Vulkan device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from backends.base.interface import Batch, Trainable
from backends.wgpu.canonical.convention import Convention
from backends.wgpu.canonical.host import CpuTarget, product_shader
from backends.wgpu.compiled import compile_program
from backends.wgpu.graph.values import NoRule
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import SamestepError
from protocol.base.limits import MICROBATCHES_PER_DISPATCH
from protocol.spec.sections.model import ArithmeticSpec

if TYPE_CHECKING:
    from backends.wgpu.device.device import Device
    from backends.wgpu.device.matmul_tuning import MatmulTuner


def convention_of(spec: ArithmeticSpec) -> Convention:
    """Return the convention of a run spec."""
    return Convention(spec.multiply_add == "fused", spec.subnormals == "flushed")


def compile_canonical_for_cpu(
    trainable: Trainable, batches: Sequence[Batch], evaluations: Sequence[Batch]
) -> CompiledProgram:
    """Compile the task for the CPU; arguments as for `compile_program`.

    Raises:
        SamestepError: The task cannot be compiled, with the reason.
    """
    host = CpuTarget(convention_of(trainable.arithmetic), trainable.threads)
    options = KernelOptions(cooperative=True, matmul=product_shader, canonical=True)
    # Subtree sums must keep subnormals, so the host adds if kernels flush them.
    adds_on_device = not host.convention.flushes
    with _explain_missing_rule("arithmetic: native"):
        return compile_program(
            host, trainable, options, batches, evaluations, adds_on_device=adds_on_device
        )


def compile_canonical_for_device(
    device: Device,
    tuner: MatmulTuner,
    trainable: Trainable,
    batches: Sequence[Batch],
    evaluations: Sequence[Batch],
    *,
    adds_on_device: bool,
) -> CompiledProgram:
    """Compile the task for a Vulkan device; arguments as for `compile_program`.

    Raises:
        SamestepError: The device does not follow the run's convention, or the task cannot be
            compiled.
    """
    from backends.wgpu.canonical.probe import refuse_other_convention  # noqa: PLC0415
    from backends.wgpu.canonical.vulkan import CanonicalDevice  # noqa: PLC0415  (imports wgpu)

    convention = convention_of(trainable.arithmetic)
    target = CanonicalDevice(device, convention)
    refuse_other_convention(target, tuner.shader, convention)
    options = KernelOptions(
        cooperative=True,
        matmul=tuner.shader,
        canonical=True,
        microbatches=MICROBATCHES_PER_DISPATCH,
    )
    with _explain_missing_rule("arithmetic: native, and a cpu or cuda worker,"):
        return compile_program(
            target, trainable, options, batches, evaluations, adds_on_device=adds_on_device
        )


@contextmanager
def _explain_missing_rule(remedy: str) -> Iterator[None]:
    """Add the remedy to an error about an operator without a rule.

    Args:
        remedy: The alternative that the error recommends.

    Raises:
        SamestepError: The error with the remedy.
    """
    try:
        yield
    except NoRule as error:
        raise SamestepError(error.message("canonical arithmetic", remedy)) from error
