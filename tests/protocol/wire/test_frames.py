"""Frames: the layout byte by byte, and data that no reader may accept as a frame."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64

from protocol import PROTOCOL_VERSION
from protocol.base import limits
from protocol.base.errors import ExitCode, FrameError, LocalProtocolError, VersionMismatch
from protocol.wire import frames

LARGEST = (limits.HEADER_BYTES, limits.BODY_BYTES)


def prefix(magic=b"ss", version=PROTOCOL_VERSION, tag=1, header_bytes=0, body_bytes=0):
    return struct.pack(">2sBBHIQ", magic, version, tag, header_bytes, body_bytes, 0)


def test_layout_matches_the_documentation():
    head = frames.encode_head(7, b"\x81\xa1a\x01", b"body")
    assert head[0:2] == b"ss"
    assert head[2] == PROTOCOL_VERSION
    assert head[3] == 7
    assert head[4:6] == b"\x00\x04"
    assert head[6:10] == b"\x00\x00\x00\x04"
    assert head[10:18] == xxh3_64(b"\x81\xa1a\x01body").digest()
    assert head[18:22] == b"\x81\xa1a\x01"
    assert head[22:] == b"\xc6\x00\x00\x00\x04"


@pytest.mark.parametrize("body", [None, b""])
def test_frame_without_a_body_has_no_marker(body):
    head = frames.encode_head(1, b"\x80", body)
    assert len(head) == frames.PREFIX_BYTES + 1
    assert frames.decode_prefix(head, *LARGEST).head_bytes == len(head)


@given(
    st.integers(0, 255), st.binary(max_size=200), st.none() | st.binary(min_size=1, max_size=200)
)
def test_prefix_round_trip(tag, header, body):
    head = frames.encode_head(tag, header, body)
    decoded_prefix = frames.decode_prefix(head, *LARGEST)
    assert decoded_prefix.tag == tag
    assert decoded_prefix.header_bytes == len(header)
    assert decoded_prefix.body_bytes == len(body or b"")
    assert decoded_prefix.head_bytes == len(head)
    assert decoded_prefix.checksum == frames.checksum_of(header, body)
    if body:
        frames.check_marker(head[-frames.MARKER_BYTES :], len(body))


@pytest.mark.parametrize("magic", [b"GE", b"\x00\x00", b"sS", b"\x16\x03"])
def test_wrong_magic_is_refused(magic):
    with pytest.raises(FrameError, match="expected a samestep frame"):
        frames.decode_prefix(prefix(magic=magic), *LARGEST)


@pytest.mark.parametrize(
    ("peer_version", "side"),
    [(PROTOCOL_VERSION + 1, "this side"), (PROTOCOL_VERSION - 1, "other side")],
)
def test_another_version_says_which_side_to_upgrade(peer_version, side):
    with pytest.raises(VersionMismatch, match=f"upgrade (the )?{side}") as error_info:
        frames.decode_prefix(prefix(version=peer_version), *LARGEST)
    assert (error_info.value.ours, error_info.value.theirs) == (PROTOCOL_VERSION, peer_version)
    assert error_info.value.exit_code == ExitCode.MISMATCH == 78


def test_lengths_at_the_limit_pass_and_above_it_do_not():
    decoded = frames.decode_prefix(prefix(header_bytes=256, body_bytes=16), 256, 16)
    assert (decoded.header_bytes, decoded.body_bytes) == (256, 16)
    with pytest.raises(FrameError, match="a header of <= 256 bytes, got 257"):
        frames.decode_prefix(prefix(header_bytes=257), 256, 16)
    with pytest.raises(FrameError, match="a body of <= 16 bytes, got 17"):
        frames.decode_prefix(prefix(body_bytes=17), 256, 16)


def test_encoding_respects_the_limits():
    frames.encode_head(1, bytes(limits.HEADER_BYTES), bytes(limits.BODY_BYTES))
    with pytest.raises(LocalProtocolError, match="over the limits"):
        frames.encode_head(1, bytes(limits.HEADER_BYTES + 1), None)
    with pytest.raises(LocalProtocolError, match="over the limits"):
        frames.encode_head(1, b"", bytes(limits.BODY_BYTES + 1))


@pytest.mark.parametrize("marker", [b"\xc4\x00\x00\x00\x08", b"\xc6\x00\x00\x00\x09"])
def test_marker_of_another_kind_or_length_is_refused(marker):
    with pytest.raises(FrameError, match="bin32 marker for 8 bytes"):
        frames.check_marker(marker, 8)


@given(
    st.binary(min_size=1, max_size=64),
    st.none() | st.binary(min_size=1, max_size=64),
    st.data(),
)
def test_any_flipped_bit_changes_the_checksum(header, body, data):
    content = header + (body or b"")
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped_bytes = bytearray(content)
    flipped_bytes[bit // 8] ^= 1 << bit % 8
    parts = (
        bytes(flipped_bytes[: len(header)]),
        bytes(flipped_bytes[len(header) :]) if body else None,
    )
    assert frames.checksum_of(*parts) != frames.checksum_of(header, body)
