"""A Vulkan device: uploads, readbacks, their order, and its errors."""

from __future__ import annotations

import numpy as np
import pytest

from backends.wgpu.device.arithmetic import count_wrong_additions, hard_cases
from backends.wgpu.device.memory_heaps import memory_heaps
from backends.wgpu.device.target import Copy
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from protocol.base.errors import DeviceError, ExitCode, SamestepError

DOUBLE = Shader(
    """\
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.x < arrayLength(&out)) { out[id.x] = 2.0 * a[id.x]; }
}
""",
    2,
)
ELEMENTS = 256
VALUES = np.arange(ELEMENTS, dtype=np.float32)


def doubling_chain(device, count):
    """Return count + 1 buffers, and dispatches that fill each with twice the one before."""
    buffers = [device.buffer(4 * ELEMENTS) for _ in range(count + 1)]
    dispatches = [Dispatch(DOUBLE, (i, i + 1), (4, 1, 1), f"double {i}") for i in range(count)]
    return buffers, dispatches


@pytest.mark.parametrize("elements", [1, 3, 4, 1000])
def test_upload_round_trip(device, elements):
    buffer = device.buffer(4 * elements)
    device.upload(buffer, VALUES.repeat(4)[:elements])
    np.testing.assert_array_equal(device.read(buffer, 4 * elements), VALUES.repeat(4)[:elements])


@pytest.mark.parametrize("nbytes", [1, 2, 6, 7])
def test_a_partial_word_is_padded_with_zeros(device, nbytes):
    buffer = device.buffer(nbytes)
    device.upload(buffer, np.arange(nbytes, dtype=np.uint8) + 1)
    assert device.read(buffer).view(np.uint8)[: nbytes + 1].tolist() == [*range(1, nbytes + 1), 0]


def test_new_memory_is_zero(device):
    assert not device.read(device.buffer(4096)).any()


def test_upload_larger_than_a_buffer_is_refused(device):
    with pytest.raises(SamestepError, match="at most 16 bytes, got 20"):
        device.upload(device.buffer(16), np.zeros(5, np.float32))


def test_large_upload_is_split(device, monkeypatch):
    monkeypatch.setattr("backends.wgpu.device.device._UPLOAD_PART_BYTES", 1024)
    values = np.arange(1000, dtype=np.float32)
    buffer = device.buffer(values.nbytes)
    device.upload(buffer, values)
    np.testing.assert_array_equal(device.read(buffer, values.nbytes), values)


def test_dispatches_run_in_order_with_partial_readback(device):
    buffers, dispatches = doubling_chain(device, 5)
    device.upload(buffers[0], VALUES)
    copies = [Copy(buffers[5], 16, 64), Copy(buffers[1], 8), Copy(buffers[3], 4, 4)]
    parts = device.run(device.prepare(dispatches, buffers), copies).result()
    assert [part.tolist() for part in parts] == [[512.0, 544.0, 576.0, 608.0], [0.0, 2.0], [8.0]]


def test_submissions_and_uploads_keep_their_order(device):
    """Each run reads the latest upload, even while earlier ones still run."""
    buffers, dispatches = doubling_chain(device, 3)
    commands = device.prepare(dispatches, buffers)
    readbacks = []
    for factor in range(6):
        device.upload(buffers[0], VALUES * factor)
        readbacks.append(device.run(commands, [Copy(buffers[3], 4 * ELEMENTS)]))
    for factor, readback in reversed(list(enumerate(readbacks))):
        np.testing.assert_array_equal(readback.result()[0], VALUES * factor * 8)


def test_transfers_and_submissions_are_counted(separate_device):
    buffers, dispatches = doubling_chain(separate_device, 2)
    separate_device.upload(buffers[0], VALUES)
    commands = separate_device.prepare(dispatches, buffers)
    separate_device.run(commands).result()
    separate_device.run(commands, [Copy(buffers[2], 16)]).result()
    counts = separate_device.counts
    assert (counts.uploads, counts.submissions, counts.readbacks) == (1, 2, 1)


def test_a_lost_device_raises_a_device_error_in_every_method(separate_device, capfd):
    buffers, dispatches = doubling_chain(separate_device, 2)
    commands = separate_device.prepare(dispatches, buffers)
    separate_device._device.destroy()
    attempts = [
        lambda: separate_device.buffer(64),
        lambda: separate_device.upload(buffers[0], VALUES),
        lambda: separate_device.prepare(dispatches, buffers),
        lambda: separate_device.run(commands, [Copy(buffers[2], 16)]).result(),
        lambda: separate_device.read(buffers[0]),
    ]
    for attempt in attempts:
        with pytest.raises(DeviceError, match="failed: ") as error:
            attempt()
        assert error.value.exit_code == ExitCode.FAILED
    assert capfd.readouterr().err == "", "only the exception reports the error"


def test_a_buffer_beyond_the_limit_raises_a_device_error(device):
    with pytest.raises(DeviceError, match=r"failed: .*expected a buffer of at most [0-9]+ bytes"):
        device.buffer(device.limits["max-buffer-size"] + 16)


def test_an_invalid_shader_raises_no_user_error(device):
    with pytest.raises(Exception, match="Shader") as error:
        device.prepare([Dispatch(Shader("fn main( {", 0), (), (1, 1, 1), "broken")], [])
    assert not isinstance(error.value, SamestepError)


def test_addition_probe_detects_differences(device):
    """The hard cases would show flushed subnormals and another rounding."""
    a, b = hard_cases()
    smallest_normal = np.finfo(np.float32).smallest_normal
    with np.errstate(all="ignore"):
        sums = a + b
        exact_sums = a.astype(np.float64) + b.astype(np.float64)
        is_rounded = exact_sums != exact_sums.astype(np.float32)
    for values in (a, sums):
        is_subnormal = (np.abs(values) < smallest_normal) & (values != 0)
        assert np.count_nonzero(is_subnormal) > 100
    assert np.count_nonzero(is_rounded) > 1000
    if device.adapter.software:
        assert count_wrong_additions(device) == 0


def test_an_adapter_describes_itself(device):
    adapter = device.adapter
    info = adapter.info(3)
    assert (info.backend, info.index, info.name) == ("vulkan", 3, adapter.name)
    assert adapter.name in {heaps.name for heaps in memory_heaps()}
    assert set(device.traits()) == {"adapter", "driver", "wgpu"}
