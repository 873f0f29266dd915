"""Find out which conventions of canonical arithmetic a device follows."""

from __future__ import annotations

from backends.base.interface import DeviceInfo


def describe_canonical_support(info: DeviceInfo) -> list[str]:
    """Return lines that name the conventions of canonical arithmetic that a device follows.

    The test of a Vulkan device takes one or two seconds.
    """
    from backends.wgpu.canonical.compiler import why_unavailable  # noqa: PLC0415  (imports torch)

    if reason := why_unavailable():
        return [f"arithmetic canonical: no: {reason}"]
    if info.backend == "cpu":
        return ["arithmetic canonical: every convention"]
    if info.backend != "vulkan":
        return ["arithmetic canonical: no: take the card through Vulkan, --backend vulkan"]
    from backends.wgpu.backend import VulkanBackend  # noqa: PLC0415  (opens devices)
    from backends.wgpu.canonical.probe import find_conventions  # noqa: PLC0415  (imports wgpu)

    backend = VulkanBackend(info.index)
    followed_conventions, differences = find_conventions(backend.device, backend.tuner.shader)
    return [
        *(f"arithmetic canonical: {convention}" for convention in followed_conventions),
        *(
            f"not canonical: {convention}: {difference}"
            for convention, difference in differences.items()
        ),
    ]
