"""Coverage-guided fuzzing of the readers, for as long as one likes: `python -m tests.fuzz.guided`.

Needs the extra `fuzz` (atheris, with libFuzzer in it). The first byte of an input chooses the
side, the phase and whether the rest is raw bytes or a tag, a header and a body that are made into
a frame: without that, no input would get past the checksum. All other options are libFuzzer's; a
finding is written to crash-HASH, and given as an argument it is repeated.
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
    from tests.fuzz.handshakes import STATES, connection, legal_frames
    from tests.fuzz.mutations import put_together, taken_apart

_RAW: Final = 1


def input_of(place: int, frame: bytes) -> bytes:
    """A frame as an input that is made into this frame again."""
    tag, header, body = taken_apart(frame)
    return bytes([place << 1, tag]) + len(header).to_bytes(2, "big") + header + body


def frame_of(data: bytes) -> bytes:
    """Tag, length of the header, header and body, put together with the checksum they need."""
    length = int.from_bytes(data[1:3], "big") % (limits.HEADER_BYTES + 1)
    header = data[3 : 3 + length]
    return put_together(data[0] if data else 0, header, data[3 + length :][: limits.BODY_BYTES])


def read(data: bytes) -> None:
    """Nothing but RemoteProtocolError may escape, and a broken connection is a closed one."""
    if not data:
        return
    role, phase = STATES[(data[0] >> 1) % len(STATES)]
    reader = connection(role, phase)
    stream = data[1:] if data[0] & _RAW else frame_of(data[1:])
    try:
        reader.receive_data(stream)
    except RemoteProtocolError:
        assert reader.phase is Phase.CLOSED
    with contextlib.suppress(RemoteProtocolError):
        reader.receive_eof()
    assert reader.held_bytes <= frames.PREFIX_BYTES + 64 * limits.KIB


def write_seeds(directory: Path) -> None:
    """Every legal frame, so that it need not be found."""
    directory.mkdir(parents=True, exist_ok=True)
    for place, (role, phase) in enumerate(STATES):
        for number, data in enumerate(legal_frames(role, phase)):
            (directory / f"{role}-{phase.value}-{number}").write_bytes(input_of(place, data))


def main() -> None:
    """Fuzz into the first directory that is named, else into build/fuzz."""
    named = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    if not named:
        named = [Path("build/fuzz")]
        sys.argv.append(str(named[0]))
    if not named[0].is_file():
        write_seeds(named[0])
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
