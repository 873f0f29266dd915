"""Coverage-guided fuzzing of the readers, for any length of time: `python -m tests.fuzz.guided`.

Needs the extra `fuzz` (atheris, with libFuzzer). The first byte of an input selects the role, the
phase and whether the rest is raw bytes or a tag, a header and a body, which are assembled into a
frame; raw bytes would never pass the checksum. All other options are libFuzzer's. A finding is
written to crash-HASH; with this file as argument, the command reproduces it.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Final

import atheris

with atheris.instrument_imports(include=["protocol", "worker"], enable_loader_override=False):
    from protocol.base import limits
    from protocol.base.errors import RemoteProtocolError
    from protocol.wire import frames
    from protocol.wire.connection import Phase
    from tests.fuzz.handshakes import STATES, connect_until, legal_frames
    from tests.fuzz.mutations import join_frame, split_frame

_RAW: Final = 1


def encode_input(state_index: int, frame: bytes) -> bytes:
    """Return the input from which `feed_reader` assembles this frame."""
    tag, header, body = split_frame(frame)
    return bytes([state_index << 1, tag]) + len(header).to_bytes(2, "big") + header + body


def assemble_frame(data: bytes) -> bytes:
    """Return a frame with a valid checksum from tag, header length, header and body."""
    length = int.from_bytes(data[1:3], "big") % (limits.HEADER_BYTES + 1)
    header = data[3 : 3 + length]
    return join_frame(data[0] if data else 0, header, data[3 + length :][: limits.BODY_BYTES])


def feed_reader(data: bytes) -> None:
    """Feed an input to a reader; only RemoteProtocolError may escape, and then the reader is
    closed."""
    if not data:
        return
    role, phase = STATES[(data[0] >> 1) % len(STATES)]
    reader = connect_until(role, phase)
    stream = data[1:] if data[0] & _RAW else assemble_frame(data[1:])
    try:
        reader.receive_data(stream)
    except RemoteProtocolError:
        assert reader.phase is Phase.CLOSED
    with contextlib.suppress(RemoteProtocolError):
        reader.receive_eof()
    assert reader.buffered_bytes <= frames.PREFIX_BYTES + 64 * limits.KIB


def write_seeds(directory: Path) -> None:
    """Write every legal frame as a seed input."""
    directory.mkdir(parents=True, exist_ok=True)
    for index, (role, phase) in enumerate(STATES):
        for number, data in enumerate(legal_frames(role, phase)):
            (directory / f"{role}-{phase.value}-{number}").write_bytes(encode_input(index, data))


def main() -> None:
    """Fuzz with the corpus in the first directory argument, or in build/fuzz."""
    directories = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    if not directories:
        directories = [Path("build/fuzz")]
        sys.argv.append(str(directories[0]))
    if not directories[0].is_file():
        write_seeds(directories[0])
    atheris.Setup(sys.argv, feed_reader)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
