"""Backends and devices as the command line names them."""

from __future__ import annotations

import pytest

from protocol.base.device_name import parse_backend, parse_devices
from protocol.base.errors import UsageError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuda0", ("cuda", (0,))),
        ("cuda12", ("cuda", (12,))),
        ("vulkan1", ("vulkan", (1,))),
        ("cpu3", ("cpu", (3,))),
        ("cuda", ("cuda", ())),
        ("auto", ("auto", ())),
        ("scripted:20", ("scripted:20", ())),
    ],
)
def test_device_number_is_split_from_the_name(name, expected):
    assert parse_devices(name, "") == expected


@pytest.mark.parametrize("name", ["abacus7", "cuda-1", "cuda0x", "vulcan", "auto1", ""])
def test_unknown_backends_are_refused(name):
    with pytest.raises(
        UsageError,
        match=r"expected auto or one of cuda, xpu, (mps, )?vulkan, cpu, a number or a",
    ) as error_info:
        parse_devices(name, "")
    assert "scripted" not in str(error_info.value), "scripted is for tests only"


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("gpu", "cuda"), ("gpu0", "cuda0"), ("gpu0-3", "cuda0-3"), ("cuda:1", "cuda1"),
        ("CUDA", "cuda"), ("cuda0,1", "cuda0-1"), ("accelerator0,1", "accelerator0-1"),
        ("vulcan", "vulkan"), ("vulkan:1", "vulkan1"), ("mps:1", "mps"), ("rocm 1", "cuda1"),
        ("cuda0,2", "cuda0, or a range such as cuda0-1"), ("tpu", ""), ("abacus7", ""),
    ],
)  # fmt: skip
def test_unknown_name_gets_a_suggestion(name, meaning):
    with pytest.raises(UsageError) as error_info:
        parse_devices(name, "")
    hint = f"; did you mean {meaning}?" if meaning else ""
    assert str(error_info.value).endswith(f"got {name!r}{hint}; see: worker devices")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("0", (0,)),
        ("1,0", (1, 0)),
        ("Radeon", ("radeon",)),
        ("rx 7900, 1", ("rx 7900", 1)),
    ],
)
def test_devices_are_chosen_by_number_or_by_name(text, expected):
    assert parse_devices("vulkan", text) == ("vulkan", expected)


@pytest.mark.parametrize("text", [",", "0,0", "-1", "a,A", "1,,2", "--quiet"])
def test_invalid_device_lists_are_refused(text):
    with pytest.raises(UsageError, match="--gpus: expected distinct device numbers such as 0,1"):
        parse_devices("auto", text)


def test_backend_name_may_have_a_device_range():
    assert parse_devices("cuda0-3", "") == ("cuda", (0, 1, 2, 3))
    for name in ("cuda3-0", "cuda0-64"):
        with pytest.raises(UsageError, match="expected devices such as cuda0-3"):
            parse_devices(name, "")


def test_devices_in_both_options_are_refused():
    with pytest.raises(UsageError, match="expected devices in --backend or in --gpus"):
        parse_devices("cuda1", "0")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cpu", ("cpu", 0.0)), ("scripted", ("scripted", 0.0)), ("scripted:2.5", ("scripted", 2.5))],
)
def test_scripted_backend_has_a_microbatch_duration(name, expected):
    assert parse_backend(name) == expected


@pytest.mark.parametrize("name", ["scripted:", "scripted:soon", "scripted:-1", "scripted:nan"])
def test_invalid_scripted_durations_are_refused(name):
    with pytest.raises(UsageError, match="expected scripted:MS with MS >= 0"):
        parse_backend(name)
