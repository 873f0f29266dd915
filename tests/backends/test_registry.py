"""The choice of a backend, and the reasons for skipping others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from backends import registry
from backends.base.interface import BackendChoice, DeviceInfo
from backends.scripted import ScriptedBackend
from protocol.base.device_name import AUTO_ORDER
from protocol.base.errors import BackendUnavailable, ExitCode, UsageError


def unusable(kind: str) -> DeviceInfo:
    return DeviceInfo(kind, kind.upper(), False, f"{kind} is broken")


def usable(kind: str) -> DeviceInfo:
    return DeviceInfo(kind, kind.upper(), True, "")


def build_arguments(choice: BackendChoice) -> object:
    """Return the arguments that the fake `_build_backend` of `machine` received."""
    return choice.backend


@pytest.fixture
def machine(monkeypatch):
    """Return a function that makes only these kinds of device usable."""

    def set_up(*kinds: str) -> None:
        rows = {kind: (usable if kind in kinds else unusable)(kind) for kind in AUTO_ORDER}
        monkeypatch.setattr(registry, "_devices_of", lambda kind: [rows[kind]])
        monkeypatch.setattr(registry, "_build_backend", lambda kind, index: (kind, index))

    return set_up


@pytest.mark.parametrize(
    ("kinds", "expected_kind", "passed_over"),
    [
        (("cuda", "vulkan", "cpu"), "cuda", []),
        (("xpu", "vulkan", "cpu"), "xpu", ["cuda"]),
        (("vulkan", "cpu"), "vulkan", ["cuda", "xpu"]),
        (("cpu",), "cpu", ["cuda", "xpu", "vulkan"]),
    ],
)
def test_auto_takes_the_first_usable_kind_and_reports_the_reason(
    machine, kinds, expected_kind, passed_over
):
    machine(*kinds)
    choice = registry.choose("auto")
    assert build_arguments(choice) == (expected_kind, 0)
    assert [info.backend for info in choice.passed_over] == passed_over
    assert all(f"no {kind}: {kind} is broken" in choice.reason for kind in passed_over)


def test_auto_without_any_device_gives_every_reason(machine):
    machine()
    with pytest.raises(BackendUnavailable, match=r"cuda: .*vulkan: .*cpu: ") as error:
        registry.choose("auto")
    assert error.value.exit_code == ExitCode.UNREACHABLE


@pytest.mark.parametrize("kind", AUTO_ORDER)
def test_a_named_backend_never_falls_back(machine, kind):
    machine(*(other for other in AUTO_ORDER if other != kind))
    with pytest.raises(BackendUnavailable, match=f"{kind} is broken"):
        registry.choose(kind)


def test_an_index_past_the_last_cuda_device_is_not_usable(machine):
    machine("cuda", "cpu")
    with pytest.raises(BackendUnavailable, match="no device 1"):
        registry.choose("cuda", 1)


@pytest.mark.parametrize(
    ("kinds", "device"),
    [(("cpu",), 0), (("cpu",), "radeon"), (("cuda", "vulkan", "cpu"), 1), (("vulkan", "cpu"), 1)],
)
def test_missing_requested_device_is_never_replaced(machine, kinds, device):
    machine(*kinds)
    message = f"device {device} was asked for, and is not there: "
    with pytest.raises(BackendUnavailable, match=message) as error:
        registry.choose("auto", device)
    assert error.value.exit_code == ExitCode.UNREACHABLE
    assert "\n" not in str(error.value)
    for kind in ("cpu", "scripted"):  # of which there is one, so any device is accepted
        registry.choose(kind, device)
    if "cuda" in kinds:
        assert build_arguments(registry.choose("auto", 0)) == ("cuda", 0)


CARDS = [
    DeviceInfo("vulkan", "AMD Radeon RX 7900", True, "", 0, 20 * 2**30),
    DeviceInfo("vulkan", "Intel(R) Arc(TM) A770", True, "", 1, 16 * 2**30),
    DeviceInfo("vulkan", "llvmpipe (LLVM 15.0.6)", True, "", 2, software=True),
]


def set_vulkan_devices(monkeypatch: pytest.MonkeyPatch, cards: list[DeviceInfo]) -> None:
    real_devices_of = registry._devices_of
    monkeypatch.setattr(
        registry, "_devices_of", lambda kind: cards if kind == "vulkan" else real_devices_of(kind)
    )


@pytest.mark.parametrize(
    ("device", "index"), [(0, 0), (1, 1), (2, 2), ("arc", 1), ("LLVMPIPE", 2), ("r", 0)]
)
def test_a_card_is_chosen_by_number_or_part_of_its_name(machine, monkeypatch, device, index):
    machine()
    set_vulkan_devices(monkeypatch, CARDS)
    assert build_arguments(registry.choose("vulkan", device)) == ("vulkan", index)


def test_a_part_of_several_names_takes_the_first_card_and_reports_the_choice(machine, monkeypatch):
    machine()
    set_vulkan_devices(monkeypatch, CARDS)
    reason = registry.choose("vulkan", "a").reason
    assert "the first of 2 whose names have 'a' in them: 'AMD Radeon" in reason
    for unambiguous in (1, "arc"):
        assert registry.choose("vulkan", unambiguous).reason == "vulkan was asked for by name"


@pytest.mark.parametrize(
    ("device", "reason"),
    [(3, "there is no device 3; this machine has 3"), ("geforce", "'geforce'.*'AMD Radeon RX")],
)
def test_missing_card_is_refused(machine, monkeypatch, device, reason):
    machine()
    set_vulkan_devices(monkeypatch, CARDS)
    with pytest.raises(BackendUnavailable, match=reason):
        registry.choose("vulkan", device)


def test_auto_takes_a_card_but_no_software_device(machine, monkeypatch):
    machine("cpu")
    set_vulkan_devices(monkeypatch, CARDS)
    assert build_arguments(registry.choose("auto")) == ("vulkan", 0)
    with pytest.raises(BackendUnavailable, match=r"llvmpipe \(LLVM 15.0.6\) is software; ask for"):
        registry.choose("auto", "llvm")
    set_vulkan_devices(monkeypatch, CARDS[2:])
    choice = registry.choose("auto")
    assert build_arguments(choice) == ("cpu", 0)
    assert "no vulkan: llvmpipe (LLVM 15.0.6) is software; ask for it" in choice.reason


def test_without_wgpu_the_vulkan_row_says_what_to_install(monkeypatch):
    from backends.wgpu.device import adapters

    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "wgpu" else object()
    )
    reason = adapters.adapters.__wrapped__()
    assert isinstance(reason, str)
    assert "pip install 'wgpu>=0.32'" in reason


@pytest.mark.parametrize(
    "name", ["", "gpu", "cpu:1", "scripted:", "scripted:fast", "scripted:-1", "scripted:inf"]
)
def test_unknown_names_are_refused(name):
    with pytest.raises(UsageError, match="expected"):
        registry.choose(name)


def test_scripted_takes_its_speed_from_the_name():
    backend = registry.choose("scripted:2.5").backend
    assert isinstance(backend, ScriptedBackend)
    assert backend.microbatch_ms == 2.5
    assert registry.choose("scripted").backend.microbatch_ms == 0.0  # type: ignore[attr-defined]


def test_without_torch_devices_say_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", {}.get)
    rows = registry.devices()
    assert [row.backend for row in rows] == ["cuda", "vulkan", "cpu"]
    assert all(not row.usable and row.reason for row in rows)
    assert "pip install" in rows[-1].reason


def test_devices_lists_the_cpu_of_this_machine():
    (row,) = [row for row in registry.devices() if row.backend == "cpu"]
    assert row.usable
    assert row.name


def test_the_scripted_backend_does_not_import_torch():
    program = (
        "import sys; from backends.registry import choose; choose('scripted:5');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
