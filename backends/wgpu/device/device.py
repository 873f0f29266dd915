"""A Vulkan device: buffers, and prepared lists of dispatches that run as one submission each.

A submission may block until the one before it is done (lavapipe does), so everything that reaches
the queue, uploads too, goes through one thread of its own, in the order it was asked for. Whoever
waits for a readback polls for just that submission; earlier ones are read while later ones run.

What is done for each dispatch calls wgpu-native directly: its Python layer takes several times as
long.
An error of a call that encodes shows at `finish`, which is called through the checking layer.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import wgpu
from numpy.typing import NDArray
from wgpu.backends.wgpu_native import _api as native
from wgpu.backends.wgpu_native._ffi import ffi, lib

from backends.wgpu.device.adapters import Adapter
from backends.wgpu.device.target import Buffer, Copy, Prepared, Readback
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.repeated import repeated
from protocol.base.errors import DeviceError, DeviceOutOfMemory, SamestepError

BUFFER_ALIGNMENT_BYTES: Final = 16
"""Sizes are rounded up to it, so that every buffer can be read as vec4."""

_CALLBACK_S: Final = 20.0
"""For a callback that is due, and runs in another thread."""
_STAGING_PART_BYTES: Final = 64 * 2**20
_UPLOAD_PART_BYTES: Final = 64 * 2**20
"""wgpu stages uploads in memory of its own until the next submission: no more than so many."""

_FEATURES: Final = ("shader-f16", "shader-int64", "subgroup")
_STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
_STAGING = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST


@dataclass(slots=True)
class Counts:
    """What went over the bus, for tests and benchmarks."""

    uploads: int = 0
    submissions: int = 0
    readbacks: int = 0


class _Readback:
    """What a submission brings back, once it is done."""

    def __init__(self, device: Device, running: Future[_Mapping]) -> None:
        self._device = device
        self._running = running

    def result(self) -> list[NDArray[np.float32]]:
        """Wait, and give one flat float32 array of its own per copy; `.view` for other types.

        Raises:
            DeviceError: The device was lost or is out of memory.
        """
        with failures(self._device.adapter.name):
            return self._device.fetch(self._running.result())


@dataclass(slots=True)
class _Mapping:
    """A submission under way and the staging buffer that is being mapped behind it."""

    submission: int
    staging: Any
    sizes: list[int]
    failed: list[str]
    done: threading.Event
    callback: Any


class Device:
    """One opened adapter. All methods may be called from any thread but `close`."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.counts = Counts()
        offered = adapter.handle.features
        logging.getLogger("wgpu").addFilter(_is_told_nowhere_else)
        try:
            self._device = adapter.handle.request_device_sync(
                required_features=[name for name in _FEATURES if name in offered],
                required_limits=dict(adapter.handle.limits),
            )
        except RuntimeError as error:  # all that wgpu raises here
            reason = f"it cannot be opened ({_line(error)})"
            raise DeviceError(adapter.name, reason) from None
        self.features: frozenset[str] = frozenset(self._device.features)
        self.limits: Mapping[str, int] = dict(self._device.limits)
        self._queue = self._device.queue
        self._pipelines: dict[str, tuple[Any, Any]] = {}
        self._staging: dict[int, list[Any]] = defaultdict(list)
        self._thread = ThreadPoolExecutor(1, "vulkan-submit")
        self._staged_bytes = 0

    def traits(self) -> dict[str, str]:
        """What decides the bits of a shader's results, by name; see `Backend.numerics_profile`."""
        # The name of a software adapter says for which instruction set it compiles.
        number = f"{self.adapter.vendor_id:x}:{self.adapter.device_id:x}"
        traits = {
            "adapter": self.adapter.name if self.adapter.software else number,
            "driver": self.adapter.driver,
            "wgpu": wgpu.__version__,
        }
        if self.adapter.interface != "Vulkan":
            traits["interface"] = self.adapter.interface
        return traits

    @property
    def largest_buffer_bytes(self) -> int:
        """Of one buffer that a shader reads whole."""
        return min(self.limits["max-buffer-size"], self.limits["max-storage-buffer-binding-size"])

    def buffer(self, nbytes: int) -> Buffer:
        """Zeroed memory of at least so many bytes.

        Raises:
            DeviceError: The device has no more.
        """
        size = max(1, -(-nbytes // BUFFER_ALIGNMENT_BYTES)) * BUFFER_ALIGNMENT_BYTES
        if size > self.largest_buffer_bytes:
            most = self.largest_buffer_bytes
            reason = f"expected a buffer of at most {most} bytes, got {size}"
            raise DeviceError(self.adapter.name, reason)
        with failures(self.adapter.name):
            return Buffer(size, self._device.create_buffer(size=size, usage=_STORAGE))

    def uniform(self) -> Buffer:
        """Four vectors of zeros, for a uniform binding."""
        usage = wgpu.BufferUsage.UNIFORM
        with failures(self.adapter.name):
            return Buffer(64, self._device.create_buffer(size=64, usage=usage))

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        """Fill the buffer from its start; done before whatever is run after this call.

        The array is the caller's own again on return.
        """
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if flat.nbytes > buffer.nbytes:
            raise SamestepError(f"expected at most {buffer.nbytes} bytes, got {flat.nbytes}")
        self.counts.uploads += 1
        with failures(self.adapter.name):
            self._thread.submit(self._write, buffer, flat).result()

    def prepare(self, dispatches: Sequence[Dispatch], buffers: Sequence[Buffer]) -> Prepared:
        """Make pipelines (once per shader) and bind groups.

        Args:
            dispatches: In the order they shall run.
            buffers: The plan's buffers by number.
        """
        calls, kept = [], []
        for dispatch in dispatches:
            with failures(self.adapter.name):
                shader, (x, y, z) = dispatch.shader, dispatch.grid
                if dispatch.strides:
                    shader = repeated(shader, dispatch.strides, z)
                pipeline, layout = self._pipeline(shader, dispatch.label)
                group = self._bind_group(layout, [buffers[n] for n in dispatch.buffers])
            kept.append(group)
            deep = z * dispatch.microbatches
            calls.append((pipeline._internal, group._internal, x, y, deep))  # noqa: SLF001
        return Prepared(calls, kept)

    def run(self, prepared: Prepared, copies: Sequence[Copy] = ()) -> Readback:
        """Submit the dispatches, then copy these buffers back; returns at once."""
        self.counts.submissions += 1
        self.counts.readbacks += bool(copies)
        return _Readback(self, self._thread.submit(self._submit, prepared, tuple(copies)))

    def read(self, buffer: Buffer, nbytes: int = 0) -> NDArray[np.float32]:
        """The buffer's content now, after all that was asked for before."""
        return self.run(Prepared([], []), [Copy(buffer, nbytes or buffer.nbytes)]).result()[0]

    def close(self) -> None:
        """End the thread and let go of all memory."""
        self._thread.shutdown(cancel_futures=True)
        self._device.destroy()

    # What follows runs in the submit thread, `fetch` in the one that waits.

    def _write(self, buffer: Buffer, flat: NDArray[np.uint8]) -> None:
        if flat.nbytes % 4:
            flat = np.concatenate([flat, np.zeros(-flat.nbytes % 4, np.uint8)])
        for start in range(0, flat.nbytes, _UPLOAD_PART_BYTES):
            part = flat[start : start + _UPLOAD_PART_BYTES]
            if self._staged_bytes + part.nbytes > _UPLOAD_PART_BYTES:
                self._queue.submit([])
                self._device._poll_wait()  # noqa: SLF001
                self._staged_bytes = 0
            self._queue.write_buffer(buffer.handle, start, part)
            self._staged_bytes += part.nbytes

    def _submit(self, prepared: Prepared, copies: tuple[Copy, ...]) -> _Mapping:
        encoder = self._device.create_command_encoder()
        if prepared.calls:
            _encode(encoder, prepared.calls)
        sizes = [copy.nbytes for copy in copies]
        staging = self._take_staging(sum(sizes)) if sizes else None
        offset = 0
        for copy in copies:
            encoder.copy_buffer_to_buffer(
                copy.buffer.handle, copy.buffer.offset + copy.offset, staging, offset, copy.nbytes
            )
            offset += copy.nbytes
        finished = encoder.finish()  # held until it is submitted: its end would free the commands
        commands = ffi.new("WGPUCommandBuffer[1]", [finished._internal])  # noqa: SLF001
        submission = native.libf.wgpuQueueSubmitForIndex(self._queue._internal, 1, commands)  # noqa: SLF001
        self._staged_bytes = 0
        del finished
        mapping = _Mapping(submission, staging, sizes, [], threading.Event(), None)
        if staging is not None:
            _map(mapping)
        return mapping

    def fetch(self, mapping: _Mapping) -> list[NDArray[np.float32]]:
        """Wait for a submission and copy what it brought; for `Readback`."""
        index = ffi.new("WGPUSubmissionIndex*", mapping.submission)
        native.libf.wgpuDevicePoll(self._device._internal, True, index)  # noqa: SLF001
        if mapping.staging is None:
            return []
        # Another thread's poll may be the one that runs our callback.
        native.libf.wgpuDevicePoll(self._device._internal, True, ffi.NULL)  # noqa: SLF001
        if not mapping.done.wait(_CALLBACK_S):
            raise DeviceError(self.adapter.name, "it finished without a result")
        if mapping.failed:
            raise DeviceError(self.adapter.name, mapping.failed[0])
        handle = mapping.staging._internal  # noqa: SLF001
        total = sum(mapping.sizes)
        address = native.libf.wgpuBufferGetMappedRange(handle, 0, total)
        whole = np.frombuffer(ffi.buffer(address, total), np.float32).copy()
        native.libf.wgpuBufferUnmap(handle)
        self._staging[mapping.staging.size].append(mapping.staging)
        ends = np.cumsum(mapping.sizes) // 4
        return np.split(whole, ends[:-1])

    def _take_staging(self, nbytes: int) -> Any:
        """A buffer to map, of a power of two of bytes or of large parts: few sizes do for all."""
        size = max(256, 1 << (nbytes - 1).bit_length())
        if nbytes > _STAGING_PART_BYTES:  # a power of two might be more than a buffer may have
            size = -(-nbytes // _STAGING_PART_BYTES) * _STAGING_PART_BYTES
            size = max(nbytes, min(size, self.limits["max-buffer-size"]))
        free = self._staging[size]
        return free.pop() if free else self._device.create_buffer(size=size, usage=_STAGING)

    def _bind_group(self, layout: Any, bound: Sequence[Buffer]) -> Any:
        """Wgpu's own `create_bind_group` takes several times as long, of which plans feel much."""
        entries = [
            {"binding": i, "buffer": b.handle._internal, "offset": b.offset, "size": b.nbytes}  # noqa: SLF001
            for i, b in enumerate(bound)
        ]
        held = ffi.new("WGPUBindGroupEntry[]", entries)
        fields = {"layout": layout._internal, "entryCount": len(entries), "entries": held}  # noqa: SLF001
        descriptor = ffi.new("WGPUBindGroupDescriptor *", fields)
        made = native.libf.wgpuDeviceCreateBindGroup(self._device._internal, descriptor)  # noqa: SLF001
        return native.GPUBindGroup("", made, self._device)

    def _pipeline(self, shader: Shader, label: str) -> tuple[Any, Any]:
        made = self._pipelines.get(shader.source)
        if made is None:
            module = self._module(shader, label)
            pipeline = self._device.create_compute_pipeline(
                label=label, layout="auto", compute={"module": module, "entry_point": "main"}
            )
            made = pipeline, pipeline.get_bind_group_layout(0)
            self._pipelines[shader.source] = made
        return made

    def _module(self, shader: Shader, label: str) -> Any:
        """Without clamped indices and counted loops where the text needs neither; wgpu's Python
        layer does not offer that, its library does. The text is validated all the same."""
        if not shader.in_bounds:
            return self._device.create_shader_module(label=label, code=shader.module)
        code, name = (ffi.new("char []", each.encode()) for each in (shader.module, label))
        source = ffi.new("WGPUShaderSourceWGSL *", {"code": (code, lib.WGPU_STRLEN)})
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        chained = ffi.cast("WGPUChainedStruct *", source)
        fields = {"nextInChain": chained, "label": (name, lib.WGPU_STRLEN)}
        descriptor = ffi.new("WGPUShaderModuleDescriptor *", fields)
        create = native.libf.wgpuDeviceCreateShaderModuleTrusted
        made = create(self._device._internal, descriptor, lib.WGPUShaderRuntimeChecks_None)  # noqa: SLF001
        return native.GPUShaderModule(label, made, self._device)


def _encode(encoder: Any, calls: list[tuple[Any, Any, int, int, int]]) -> None:
    compute = encoder.begin_compute_pass()
    handle = compute._internal  # noqa: SLF001
    set_pipeline = lib.wgpuComputePassEncoderSetPipeline
    set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
    dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
    last = None
    for pipeline, group, x, y, z in calls:
        if pipeline is not last:
            set_pipeline(handle, pipeline)
            last = pipeline
        set_bind_group(handle, 0, group, 0, ffi.NULL)
        dispatch(handle, x, y, z)
    compute.end()


def _map(mapping: _Mapping) -> None:
    """Ask for the staging buffer to be mapped once the submission before it is done."""

    @ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")  # type: ignore[untyped-decorator]
    def mapped(status: int, message: Any, _first: Any, _second: Any) -> None:
        if status != lib.WGPUMapAsyncStatus_Success:
            mapping.failed.append(native.from_c_string_view(message))
        mapping.done.set()

    info = ffi.new("WGPUBufferMapCallbackInfo *")
    info.mode = lib.WGPUCallbackMode_AllowProcessEvents
    info.callback = mapped
    mapping.callback = mapped
    handle, total = mapping.staging._internal, sum(mapping.sizes)  # noqa: SLF001
    native.libf.wgpuBufferMapAsync(handle, lib.WGPUMapMode_Read, 0, total, info[0])


@contextmanager
def failures(name: str) -> Iterator[None]:
    """Turn a lost device and spent memory into `DeviceError`; other errors are our own."""
    try:
        yield
    except wgpu.GPUError as error:
        # wgpu-native calls both validation errors; its words are all that tells them apart.
        words = _line(error)
        if isinstance(error, wgpu.GPUOutOfMemoryError) or "not enough memory" in words.lower():
            raise DeviceOutOfMemory(name, f"out of memory ({words})") from None
        if "device is lost" in words.lower():
            raise DeviceError(name, f"the device was lost ({words})") from None
        raise


def _is_told_nowhere_else(record: logging.LogRecord) -> bool:
    """For wgpu's log, which goes to standard error: a loss is raised as `DeviceError`."""
    words = record.getMessage()
    return words != "DEVICE LOST!" and not words.startswith("The WGPU device was lost")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
