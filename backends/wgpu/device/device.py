"""A Vulkan device: buffers, and lists of dispatches, each of which runs as one submission.

A submission may block until the previous one is done (it does on lavapipe), so everything that uses
the queue, including uploads, runs in a dedicated thread, in order. Waiting for a readback polls for
that submission only; earlier results are read while later submissions run.

Per-dispatch calls go to wgpu-native directly, because its Python layer is several times slower.
Errors of encoding calls are reported by `finish`, which is called through the checking layer.
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
from backends.wgpu.device.target import Buffer, CommandList, Copy, Readback
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.repeated import repeat_for_microbatches
from protocol.base.errors import DeviceError, DeviceOutOfMemory, SamestepError

BUFFER_ALIGNMENT_BYTES: Final = 16
"""Buffer sizes are multiples of this, so that every buffer can be read as vec4."""

_CALLBACK_TIMEOUT_S: Final = 20.0
"""Timeout for a callback that runs in another thread."""
_STAGING_PART_BYTES: Final = 64 * 2**20
"""Sizes of staging buffers are multiples of this, or smaller powers of two."""
_UPLOAD_PART_BYTES: Final = 64 * 2**20
"""Limit on the memory in which wgpu buffers uploads until the next submission."""

_FEATURES: Final = ("shader-f16", "shader-int64", "subgroup")
_STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
_STAGING = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST


@dataclass(slots=True)
class Counts:
    """Counters of transfers and submissions, for tests and benchmarks."""

    uploads: int = 0
    submissions: int = 0
    readbacks: int = 0


class _Readback:
    """The results of a submission."""

    def __init__(self, device: Device, future: Future[_Mapping]) -> None:
        self._device = device
        self._future = future

    def result(self) -> list[NDArray[np.float32]]:
        """Wait, and return one flat float32 array per copy; use `.view` for other types.

        Raises:
            DeviceError: The device was lost or is out of memory.
        """
        with convert_device_errors(self._device.adapter.name):
            return self._device.fetch(self._future.result())


@dataclass(slots=True)
class _Mapping:
    """A submission in progress, and the staging buffer that is mapped afterwards."""

    submission: int
    staging: Any
    sizes: list[int]
    errors: list[str]
    done: threading.Event
    callback: Any


class Device:
    """An opened adapter. All methods except `close` are thread-safe."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.counts = Counts()
        available_features = adapter.handle.features
        logging.getLogger("wgpu").addFilter(_is_not_device_loss)
        try:
            self._device = adapter.handle.request_device_sync(
                required_features=[name for name in _FEATURES if name in available_features],
                required_limits=dict(adapter.handle.limits),
            )
        except RuntimeError as error:  # the only error that wgpu raises here
            reason = f"it cannot be opened ({_one_line(error)})"
            raise DeviceError(adapter.name, reason) from None
        self.features: frozenset[str] = frozenset(self._device.features)
        self.limits: Mapping[str, int] = dict(self._device.limits)
        self._queue = self._device.queue
        self._pipelines: dict[str, tuple[Any, Any]] = {}
        self._staging: dict[int, list[Any]] = defaultdict(list)
        self._thread = ThreadPoolExecutor(1, "vulkan-submit")
        self._staged_bytes = 0

    def traits(self) -> dict[str, str]:
        """Return the properties that determine the bits of a shader's results; see
        `Backend.numerics_profile`."""
        # The name of a software adapter includes its instruction set.
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
        """Largest size of a buffer that a shader can bind."""
        return min(self.limits["max-buffer-size"], self.limits["max-storage-buffer-binding-size"])

    def buffer(self, nbytes: int) -> Buffer:
        """Allocate zeroed memory of at least `nbytes` bytes.

        Raises:
            DeviceError: Out of memory.
        """
        size = max(1, -(-nbytes // BUFFER_ALIGNMENT_BYTES)) * BUFFER_ALIGNMENT_BYTES
        if size > self.largest_buffer_bytes:
            limit = self.largest_buffer_bytes
            reason = f"expected a buffer of at most {limit} bytes, got {size}"
            raise DeviceError(self.adapter.name, reason)
        with convert_device_errors(self.adapter.name):
            return Buffer(size, self._device.create_buffer(size=size, usage=_STORAGE))

    def uniform_buffer(self) -> Buffer:
        """Allocate four zero vectors for a uniform binding."""
        usage = wgpu.BufferUsage.UNIFORM
        with convert_device_errors(self.adapter.name):
            return Buffer(64, self._device.create_buffer(size=64, usage=usage))

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        """Fill the buffer from its start, before any later submission runs.

        The caller may reuse the array on return.
        """
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if flat.nbytes > buffer.nbytes:
            raise SamestepError(f"expected at most {buffer.nbytes} bytes, got {flat.nbytes}")
        self.counts.uploads += 1
        with convert_device_errors(self.adapter.name):
            self._thread.submit(self._write, buffer, flat).result()

    def prepare(self, dispatches: Sequence[Dispatch], buffers: Sequence[Buffer]) -> CommandList:
        """Create pipelines (once per shader) and bind groups.

        Args:
            dispatches: Dispatches in order of execution.
            buffers: The plan's buffers by number.
        """
        calls, groups = [], []
        for dispatch in dispatches:
            with convert_device_errors(self.adapter.name):
                shader, (x, y, z) = dispatch.shader, dispatch.grid
                if dispatch.strides:
                    shader = repeat_for_microbatches(shader, dispatch.strides, z)
                pipeline, layout = self._pipeline(shader, dispatch.label)
                group = self._bind_group(layout, [buffers[n] for n in dispatch.buffers])
            groups.append(group)
            depth = z * dispatch.microbatches
            calls.append((pipeline._internal, group._internal, x, y, depth))  # noqa: SLF001
        return CommandList(calls, groups)

    def run(self, commands: CommandList, copies: Sequence[Copy] = ()) -> Readback:
        """Submit the dispatches and then copy buffers back; returns immediately."""
        self.counts.submissions += 1
        self.counts.readbacks += bool(copies)
        return _Readback(self, self._thread.submit(self._submit, commands, tuple(copies)))

    def read(self, buffer: Buffer, nbytes: int = 0) -> NDArray[np.float32]:
        """Return the buffer's content after all earlier submissions."""
        return self.run(CommandList([], []), [Copy(buffer, nbytes or buffer.nbytes)]).result()[0]

    def close(self) -> None:
        """Stop the thread and free all memory."""
        self._thread.shutdown(cancel_futures=True)
        self._device.destroy()

    # The methods below run in the submit thread; `fetch` runs in the waiting thread.

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

    def _submit(self, commands: CommandList, copies: tuple[Copy, ...]) -> _Mapping:
        encoder = self._device.create_command_encoder()
        if commands.calls:
            _encode(encoder, commands.calls)
        sizes = [copy.nbytes for copy in copies]
        staging = self._take_staging(sum(sizes)) if sizes else None
        offset = 0
        for copy in copies:
            encoder.copy_buffer_to_buffer(
                copy.buffer.handle, copy.buffer.offset + copy.offset, staging, offset, copy.nbytes
            )
            offset += copy.nbytes
        command_buffer = encoder.finish()  # keeps the commands alive until they are submitted
        command_buffers = ffi.new("WGPUCommandBuffer[1]", [command_buffer._internal])  # noqa: SLF001
        submission = native.libf.wgpuQueueSubmitForIndex(self._queue._internal, 1, command_buffers)  # noqa: SLF001
        self._staged_bytes = 0
        del command_buffer
        mapping = _Mapping(submission, staging, sizes, [], threading.Event(), None)
        if staging is not None:
            _map(mapping)
        return mapping

    def fetch(self, mapping: _Mapping) -> list[NDArray[np.float32]]:
        """Wait for a submission and return its results; called by `_Readback`."""
        index = ffi.new("WGPUSubmissionIndex*", mapping.submission)
        native.libf.wgpuDevicePoll(self._device._internal, True, index)  # noqa: SLF001
        if mapping.staging is None:
            return []
        # Another thread's poll may run this mapping's callback.
        native.libf.wgpuDevicePoll(self._device._internal, True, ffi.NULL)  # noqa: SLF001
        if not mapping.done.wait(_CALLBACK_TIMEOUT_S):
            raise DeviceError(self.adapter.name, "a submission finished without a result")
        if mapping.errors:
            raise DeviceError(self.adapter.name, mapping.errors[0])
        handle = mapping.staging._internal  # noqa: SLF001
        total = sum(mapping.sizes)
        address = native.libf.wgpuBufferGetMappedRange(handle, 0, total)
        values = np.frombuffer(ffi.buffer(address, total), np.float32).copy()
        native.libf.wgpuBufferUnmap(handle)
        self._staging[mapping.staging.size].append(mapping.staging)
        ends = np.cumsum(mapping.sizes) // 4
        return np.split(values, ends[:-1])

    def _take_staging(self, nbytes: int) -> Any:
        """Return a staging buffer; sizes are powers of two or multiples of a large part, for
        reuse."""
        size = max(256, 1 << (nbytes - 1).bit_length())
        if nbytes > _STAGING_PART_BYTES:  # a power of two could exceed the limit
            size = -(-nbytes // _STAGING_PART_BYTES) * _STAGING_PART_BYTES
            size = max(nbytes, min(size, self.limits["max-buffer-size"]))
        free = self._staging[size]
        return free.pop() if free else self._device.create_buffer(size=size, usage=_STAGING)

    def _bind_group(self, layout: Any, bound_buffers: Sequence[Buffer]) -> Any:
        """Create a bind group directly: wgpu's `create_bind_group` is several times slower."""
        entries = [
            {"binding": i, "buffer": b.handle._internal, "offset": b.offset, "size": b.nbytes}  # noqa: SLF001
            for i, b in enumerate(bound_buffers)
        ]
        entry_array = ffi.new("WGPUBindGroupEntry[]", entries)
        fields = {"layout": layout._internal, "entryCount": len(entries), "entries": entry_array}  # noqa: SLF001
        descriptor = ffi.new("WGPUBindGroupDescriptor *", fields)
        group = native.libf.wgpuDeviceCreateBindGroup(self._device._internal, descriptor)  # noqa: SLF001
        return native.GPUBindGroup("", group, self._device)

    def _pipeline(self, shader: Shader, label: str) -> tuple[Any, Any]:
        pipeline_and_layout = self._pipelines.get(shader.source)
        if pipeline_and_layout is None:
            module = self._module(shader, label)
            pipeline = self._device.create_compute_pipeline(
                label=label, layout="auto", compute={"module": module, "entry_point": "main"}
            )
            pipeline_and_layout = pipeline, pipeline.get_bind_group_layout(0)
            self._pipelines[shader.source] = pipeline_and_layout
        return pipeline_and_layout

    def _module(self, shader: Shader, label: str) -> Any:
        """Create a shader module, without runtime bounds checks if the shader needs none.

        Only wgpu's native library offers unchecked modules; the source is still validated.
        """
        if not shader.in_bounds:
            return self._device.create_shader_module(label=label, code=shader.module)
        code, name = (ffi.new("char []", text.encode()) for text in (shader.module, label))
        source = ffi.new("WGPUShaderSourceWGSL *", {"code": (code, lib.WGPU_STRLEN)})
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        chained = ffi.cast("WGPUChainedStruct *", source)
        fields = {"nextInChain": chained, "label": (name, lib.WGPU_STRLEN)}
        descriptor = ffi.new("WGPUShaderModuleDescriptor *", fields)
        create = native.libf.wgpuDeviceCreateShaderModuleTrusted
        handle = create(self._device._internal, descriptor, lib.WGPUShaderRuntimeChecks_None)  # noqa: SLF001
        return native.GPUShaderModule(label, handle, self._device)


def _encode(encoder: Any, calls: list[tuple[Any, Any, int, int, int]]) -> None:
    compute = encoder.begin_compute_pass()
    handle = compute._internal  # noqa: SLF001
    set_pipeline = lib.wgpuComputePassEncoderSetPipeline
    set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
    dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
    last_pipeline = None
    for pipeline, group, x, y, z in calls:
        if pipeline is not last_pipeline:
            set_pipeline(handle, pipeline)
            last_pipeline = pipeline
        set_bind_group(handle, 0, group, 0, ffi.NULL)
        dispatch(handle, x, y, z)
    compute.end()


def _map(mapping: _Mapping) -> None:
    """Request the mapping of the staging buffer after its submission."""

    @ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")  # type: ignore[untyped-decorator]
    def on_mapped(status: int, message: Any, _userdata1: Any, _userdata2: Any) -> None:
        if status != lib.WGPUMapAsyncStatus_Success:
            mapping.errors.append(native.from_c_string_view(message))
        mapping.done.set()

    info = ffi.new("WGPUBufferMapCallbackInfo *")
    info.mode = lib.WGPUCallbackMode_AllowProcessEvents
    info.callback = on_mapped
    mapping.callback = on_mapped
    handle, total = mapping.staging._internal, sum(mapping.sizes)  # noqa: SLF001
    native.libf.wgpuBufferMapAsync(handle, lib.WGPUMapMode_Read, 0, total, info[0])


@contextmanager
def convert_device_errors(name: str) -> Iterator[None]:
    """Context in which a lost device or exhausted memory becomes a `DeviceError`; other errors are
    bugs and pass through."""
    try:
        yield
    except wgpu.GPUError as error:
        # wgpu-native reports both as validation errors; only the message distinguishes them.
        message = _one_line(error)
        if isinstance(error, wgpu.GPUOutOfMemoryError) or "not enough memory" in message.lower():
            raise DeviceOutOfMemory(name, f"out of memory ({message})") from None
        if "device is lost" in message.lower():
            raise DeviceError(name, f"the device was lost ({message})") from None
        raise


def _is_not_device_loss(record: logging.LogRecord) -> bool:
    """Whether a log record may pass: not wgpu's messages about a lost device, since a `DeviceError`
    reports it."""
    message = record.getMessage()
    return message != "DEVICE LOST!" and not message.startswith("The WGPU device was lost")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
