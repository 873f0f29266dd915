"""Messages: decode(encode(m)) = m bit for bit, and a typed error for everything else."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol.base import fields, limits
from protocol.base.errors import MessageError
from protocol.wire import messages
from protocol.wire.messages import MESSAGES, decode_message
from tests.message_samples import EXAMPLES, STRATEGIES

KINDS = sorted(MESSAGES.values(), key=lambda kind: kind.tag)


def fields_of(kind):
    return msgpack.unpackb(EXAMPLES[kind].to_header())


def assert_refused(kind, fields):
    with pytest.raises(MessageError) as error_info:
        decode_message(kind.tag, msgpack.packb(fields))
    text = str(error_info.value)
    assert kind.__name__ in text
    assert "\n" not in text
    return text


def test_tags_are_frozen():
    """A tag is never reassigned to another message: older peers would misread it."""
    names = enumerate(
        [
            "Hello",
            "Challenge",
            "Proof",
            "Welcome",
            "StartRun",
            "Ready",
            "Unready",
            "StateRequest",
            "StateChunk",
            "StepPlan",
            "BlockGradientPayload",
            "NonBlockGradientPayload",
            "AveragedBlockGradient",
            "AveragedNonBlockGradient",
            "SubtreeLoss",
            "Commit",
            "StepApplied",
            "Assign",
            "Cancel",
            "EvalPlan",
            "EvalResult",
            "Heartbeat",
            "Halt",
            "Continue",
            "Drain",
            "EndRun",
            "Goodbye",
            "BlobRequest",
            "BlobChunk",
            "CapturedRows",
            "Credit",
            *["retired"] * 6,
            "InnerPhaseProgress",
            "InnerCheckpointChunk",
            "InnerStateRequest",
            "InnerStateChunk",
            "ListenForPeers",
            "PeerPort",
            "Peers",
            "Linked",
            "Unlinked",
            "Owners",
            "retired",
            "retired",
            "ChunkReduced",
            "SumsArrived",
            "retired",
            "AverageDigests",
            "AveragesRequest",
            "AverageMismatch",
            "PeerHello",
            "PeerWelcome",
            "PeerProbe",
            "LinkTraffic",
            "NonFiniteSum",
            "DeviceNote",
            "MemoryReturned",
            "StepEmbeddings",
            "Preparing",
        ],
        start=1,
    )
    assert [(kind.tag, kind.__name__) for kind in KINDS] == [
        (tag, name) for tag, name in names if name != "retired"
    ]


@given(st.sampled_from(KINDS).flatmap(lambda kind: STRATEGIES[kind]))
def test_message_round_trip(message):
    """NaN is unequal to itself, so the test compares the bits of the header, not the values."""
    header = message.to_header()
    decoded = decode_message(message.tag, header)
    assert type(decoded) is type(message)
    assert decoded.to_header() == header


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0xFFF8DEADBEEF0001, 0x7FF0000000000000])
def test_nan_keeps_its_bits(bits):
    loss = bits.to_bytes(8, "big")
    header = EXAMPLES[messages.SubtreeLoss].to_header()
    encoded_float = msgpack.packb(2.5)
    assert header.count(encoded_float) == 1
    nan_header = header.replace(encoded_float, b"\xcb" + loss)
    assert decode_message(messages.SubtreeLoss.tag, nan_header).to_header() == nan_header


@pytest.mark.parametrize("tag", [0, 65, 100, 255])
def test_unknown_tag_is_refused(tag):
    with pytest.raises(MessageError, match=f"expected a known message, got tag {tag}"):
        decode_message(tag, b"\x80")


def test_unknown_field_is_refused():
    for kind in KINDS:
        assert "color" in assert_refused(kind, {**fields_of(kind), "color": 3}), kind


def test_missing_field_is_named():
    for kind in KINDS:
        for field in kind.model_fields:
            fields = fields_of(kind)
            del fields[field]
            assert field in assert_refused(kind, fields), kind


def test_field_of_another_type_is_named():
    for kind in KINDS:
        for field in kind.model_fields:
            assert field in assert_refused(kind, {**fields_of(kind), field: [[{}]]}), kind


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (messages.StepPlan, "step", "7"),
        (messages.StepPlan, "step", 7.0),
        (messages.StepPlan, "step", True),
        (messages.StepPlan, "subtrees", [["0", 4]]),
        (messages.Hello, "name", b"bytes"),
        (messages.Proof, "proof", "text"),
        (messages.Goodbye, "retry", 1),
        (messages.Goodbye, "retry", "yes"),
        (messages.SubtreeLoss, "weight", "1.5"),
    ],
)
def test_similar_types_are_refused(kind, field, value):
    assert field in assert_refused(kind, {**fields_of(kind), field: value})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (messages.StepPlan, "term", -1),
        (messages.StepPlan, "step", 2**63),
        (messages.StepPlan, "microbatches", 0),
        (messages.StepPlan, "microbatches", 4097),
        (messages.StepPlan, "subtrees", [[0, 1]] * 65),
        (messages.StepPlan, "subtrees", [[0, 1, 2]]),
        (messages.Hello, "instance", "0" * 31),
        (messages.Hello, "instance", "G" * 32),
        (messages.Hello, "name", "x" * 65),
        (messages.Challenge, "nonce", bytes(31)),
        (messages.Proof, "proof", bytes(65)),
        (messages.StateChunk, "kind", "gradients"),
        (messages.BlockGradientPayload, "weight", float("nan")),
        (messages.BlockGradientPayload, "weight", -1.0),
        (messages.SubtreeLoss, "elapsed_ms", float("inf")),
        (messages.StepApplied, "state_digest", "0" * 63),
        (messages.EvalResult, "sums", {str(n): 0.0 for n in range(limits.EVALUATION_SUMS + 1)}),
        (messages.Goodbye, "exit_code", 126),
        (messages.Halt, "reason", "x" * 401),
        (messages.Hello, "name", "ann\nbob"),
        (messages.Hello, "name", "\x1b[2J"),
        (messages.Unready, "reason", "to the left \u202e"),
    ],
)
def test_value_out_of_range_is_refused(kind, field, value):
    assert field in assert_refused(kind, {**fields_of(kind), field: value})


@pytest.mark.parametrize("name", ["learning_rate", "epsilon", "root_correction"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.1, 1e300])
def test_update_scalar_beyond_finite_float32_is_refused(name, value):
    fields = fields_of(messages.Commit)
    assert name in assert_refused(
        messages.Commit, {**fields, "scalars": {**fields["scalars"], name: value}}
    )


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x81",
        b"\x80\x80",
        b"\x90",
        b"\xc0",
        b"\xc1",
        b"\x81\x01\x02",
        b"\x81\xa1\xff\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 1000,
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xc7\x03\xff\x00\x00\x00",
    ],
)
def test_bytes_that_are_not_a_map_are_refused(header):
    with pytest.raises(MessageError):
        decode_message(messages.Heartbeat.tag, header)


@given(st.sampled_from(KINDS), st.binary(max_size=100))
def test_random_bytes_give_a_message_or_its_error(kind, header):
    try:
        message = decode_message(kind.tag, header)
    except MessageError:
        return
    assert type(message) is kind


def test_text_is_sanitized_for_sending():
    sanitized = fields.cut_text("no such file\n\x1b[31m'\u00fcber'\u2028", 30)
    assert sanitized == "no such file  [31m'\u00fcber' "
    assert fields.cut_text("\u00fc" * 10, 5) == "\u00fc" * 2
    messages.Halt(term=1, step=0, attempt=0, reason=sanitized)


def test_messages_are_immutable():
    with pytest.raises(ValidationError):
        EXAMPLES[messages.Heartbeat].term = 3  # type: ignore[attr-defined]
    with pytest.raises(ValidationError):
        EXAMPLES[messages.StepPlan].step = 3  # type: ignore[attr-defined]
