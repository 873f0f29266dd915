"""The device itself: uploads, readbacks, their order, and convert_device_errors."""

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
NUMBERS = np.arange(ELEMENTS, dtype=np.float32)


def doubling(device, count):
    """Build a chain of buffers, each twice the one before."""
    buffers = [device.buffer(4 * ELEMENTS) for _ in range(count + 1)]
    steps = [Dispatch(DOUBLE, (i, i + 1), (4, 1, 1), f"double {i}") for i in range(count)]
    return buffers, steps


@pytest.mark.parametrize("elements", [1, 3, 4, 1000])
def test_upload_round_trip(device, elements):
    buffer = device.buffer(4 * elements)
    device.upload(buffer, NUMBERS.repeat(4)[:elements])
    np.testing.assert_array_equal(device.read(buffer, 4 * elements), NUMBERS.repeat(4)[:elements])


@pytest.mark.parametrize("nbytes", [1, 2, 6, 7])
def test_bytes_that_do_not_fill_a_word(device, nbytes):
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
    buffers, steps = doubling(device, 5)
    device.upload(buffers[0], NUMBERS)
    copies = [Copy(buffers[5], 16, 64), Copy(buffers[1], 8), Copy(buffers[3], 4, 4)]
    parts = device.run(device.prepare(steps, buffers), copies).result()
    assert [part.tolist() for part in parts] == [[512.0, 544.0, 576.0, 608.0], [0.0, 2.0], [8.0]]


def test_submissions_and_uploads_keep_their_order(device):
    """Each run reads the latest upload, even while earlier ones still run."""
    buffers, steps = doubling(device, 3)
    commands = device.prepare(steps, buffers)
    readbacks = []
    for factor in range(6):
        device.upload(buffers[0], NUMBERS * factor)
        readbacks.append(device.run(commands, [Copy(buffers[3], 4 * ELEMENTS)]))
    for factor, readback in reversed(list(enumerate(readbacks))):
        np.testing.assert_array_equal(readback.result()[0], NUMBERS * factor * 8)


def test_transferred_bytes_are_counted(own_device):
    buffers, steps = doubling(own_device, 2)
    own_device.upload(buffers[0], NUMBERS)
    commands = own_device.prepare(steps, buffers)
    own_device.run(commands).result()
    own_device.run(commands, [Copy(buffers[2], 16)]).result()
    counts = own_device.counts
    assert (counts.uploads, counts.submissions, counts.readbacks) == (1, 2, 1)


def test_lost_device_is_one_clear_error_everywhere(own_device, capfd):
    buffers, steps = doubling(own_device, 2)
    commands = own_device.prepare(steps, buffers)
    own_device._device.destroy()
    attempts = [
        lambda: own_device.buffer(64),
        lambda: own_device.upload(buffers[0], NUMBERS),
        lambda: own_device.prepare(steps, buffers),
        lambda: own_device.run(commands, [Copy(buffers[2], 16)]).result(),
        lambda: own_device.read(buffers[0]),
    ]
    for attempt in attempts:
        with pytest.raises(DeviceError, match="failed: ") as error:
            attempt()
        assert error.value.exit_code == ExitCode.FAILED
    assert capfd.readouterr().err == "", "the error says it"


def test_memory_that_is_missing_is_one_clear_error(device):
    with pytest.raises(DeviceError, match=r"failed: .*expected a buffer of at most [0-9]+ bytes"):
        device.buffer(device.limits["max-buffer-size"] + 16)


def test_invalid_shader_is_an_internal_error(device):
    with pytest.raises(Exception, match="Shader") as error:
        device.prepare([Dispatch(Shader("fn main( {", 0), (), (1, 1, 1), "broken")], [])
    assert not isinstance(error.value, SamestepError)


def test_addition_probe_detects_differences(device):
    a, b = hard_cases()
    tiny = np.finfo(np.float32).tiny
    with np.errstate(all="ignore"):
        sums = a + b
        flushed = np.where(np.abs(sums) < tiny, np.float32(0), sums)
        exact = a.astype(np.float64) + b.astype(np.float64)
        down = exact.astype(np.float32)
        rounded = exact != down
    assert np.count_nonzero(flushed != sums) > 100, "flushing subnormal sums would show"
    assert np.count_nonzero((np.abs(a) < tiny) & (a != 0)) > 100, "so would flushing operands"
    assert np.count_nonzero(rounded) > 1000, "and another rounding"
    if device.adapter.software:
        assert count_wrong_additions(device) == 0


def test_adapters_know_who_they_are(device):
    adapter = device.adapter
    row = adapter.info(3)
    assert (row.backend, row.index, row.name) == ("vulkan", 3, adapter.name)
    assert adapter.name in {heaps.name for heaps in memory_heaps()}
    assert set(device.traits()) == {"adapter", "driver", "wgpu"}
