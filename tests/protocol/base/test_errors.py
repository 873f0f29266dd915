"""The exception hierarchy: exit codes, and the diagram in the module's docstring."""

import re
import struct

import pytest
from pydantic import BaseModel

from protocol.base import errors
from protocol.base.errors import (
    NO_MEMORY,
    BackendUnavailable,
    ExitCode,
    SamestepError,
    VersionMismatch,
    describe_error,
    error_for,
)


def every_error():
    kinds, pending = [], [SamestepError]
    while pending:
        kind = pending.pop()
        kinds.append(kind)
        pending += [
            subclass for subclass in kind.__subclasses__() if subclass.__module__ == errors.__name__
        ]
    return kinds


def test_diagram_matches_the_hierarchy():
    """Each error is below its parent, indented by its depth in the hierarchy."""
    parents, class_by_depth = {}, {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"((?:│   |    )*(?:[├└]── )?)([A-Z]\w+)(?:\s|$)", line)
        if match and hasattr(errors, match[2]):
            depth = len(match[1]) // 4
            class_by_depth[depth] = match[2]
            parents[match[2]] = class_by_depth[depth - 1] if depth else "Exception"
    assert parents == {kind.__name__: kind.__bases__[0].__name__ for kind in every_error()}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("SamestepError", 1),
        ("UsageError", 2),
        ("RunSpecError", 2),
        ("DataError", 2),
        ("RunFailed", 1),
        ("Unreachable", 69),
        ("BackendUnavailable", 69),
        ("DeviceError", 1),
        ("MainMemoryTooSmall", 1),
        ("NotAuthorized", 77),
        ("Mismatch", 78),
        ("LocalProtocolError", 1),
        ("FrameError", 1),
        ("VersionMismatch", 78),
        ("OutOfOrder", 1),
    ],
)
def test_each_error_has_its_exit_code(name, code):
    assert getattr(errors, name).exit_code == code


@pytest.mark.parametrize("code", [code for code in ExitCode if code != ExitCode.INTERRUPTED])
def test_error_of_another_process_keeps_its_exit_code(code):
    error = error_for(code, "its message")
    assert str(error) == "its message"
    assert error.exit_code == (code or ExitCode.FAILED)


def test_unknown_exit_code_is_a_failure():
    assert error_for(42, "?").exit_code == ExitCode.FAILED


def test_errors_with_attributes_build_their_text():
    unavailable = BackendUnavailable("cuda", "no driver")
    assert (unavailable.backend, unavailable.reason) == ("cuda", "no driver")
    assert str(unavailable) == "backend 'cuda' is not usable here: no driver"
    text = "this side speaks protocol version 1, the other side 2: upgrade this side"
    assert str(VersionMismatch(1, 2)) == text
    assert str(VersionMismatch(2, 1)).endswith("upgrade the other side")


class _Pydantic(BaseModel):
    hidden_size: int


def _error_raised_by(work):
    with pytest.raises(Exception) as error_info:  # noqa: PT011 -- any exception
        work()
    assert isinstance(error_info.value, Exception)
    return error_info.value


@pytest.mark.parametrize(
    ("work", "expected_text"),
    [
        (lambda: dict[str, int]()["nosuch"], "KeyError: 'nosuch'"),
        (lambda: 1 // 0, "ZeroDivisionError: integer division or modulo by zero"),
        (lambda: struct.unpack_from("<Q", b""), "error: unpack_from requires a buffer of at least"),
        (lambda: bytes(2**62), NO_MEMORY),
        (lambda: _Pydantic.model_validate({"hidden_size": "x"}), "hidden_size: Input should be a"),
        (lambda: int("x\ny"), "invalid literal for int()"),
    ],
)
def test_library_errors_become_one_line(work, expected_text):
    text = describe_error(_error_raised_by(work))
    assert expected_text in text
    assert "\n" not in text
    assert "http" not in text


def test_only_the_first_sentence_is_reported():
    error = ValueError("Target modules {'x'} not found in the base model. Please check it. Again.")
    assert describe_error(error) == "Target modules {'x'} not found in the base model"
    alloc = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. You tried to allocate")
    assert describe_error(alloc) == NO_MEMORY
