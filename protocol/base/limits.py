"""Every bound in one place, units last in the name."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# Frames.
HEADER_BYTES: Final = 1 * KIB
UNAUTHENTICATED_HEADER_BYTES: Final = 256
BODY_BYTES: Final = 4 * MIB
"""A chunk: small enough that a halt or a heartbeat never waits behind a gigabyte."""
CHUNK_ELEMENTS: Final = BODY_BYTES // 4
"""float32 elements in a chunk of a block at most."""
SMALL_CHUNK_ELEMENTS: Final = 512 * KIB // 4
"""In one chunk at least, unless it is a block's last: a frame, and its way back as an average, cost
the coordinator about 0.3 ms of processor, as much as encrypting 300 KB."""

# Slices, and those who average them.
SLICE_ELEMENTS: Final = 64 * KIB
"""Of a block at most, unless that makes too many: a message each, and what an owner works on."""
LARGE_SLICE_ELEMENTS: Final = 256 * KIB
SLICES: Final = 128
"""About so many at most, unless they would be larger than that."""
PEER_STRANGERS_CONNECTIONS: Final = 8
"""In the handshake at once at a member's door: the others are those of one run."""
PEER_PROBE_BYTES: Final = 1 * MIB
PEER_TIMEOUT_MS: Final = 8_000
"""For how long a peer may read nothing of what is sent to it, or say nothing in the middle of a
message."""
PEER_EARLY_BYTES: Final = 256 * MIB
"""Of sums that come before their step, or before the table that they follow."""
OWNER_LEASE_MS: Final = 2_000
"""How long an owner may be silent at least while nothing is waited for but its averages."""

# Connections.
UNAUTHENTICATED_CONNECTIONS: Final = 64
UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS: Final = 8
"""Of these, from one address: one machine cannot keep all others from joining."""
UNAUTHENTICATED_PLACE_MS: Final = 1_000
"""How long at least one that does not become a member takes a place: it bounds how many TLS
handshakes an address can make the coordinator compute."""
HANDSHAKE_TIMEOUT_MS: Final = 5_000
CONTROL_CONNECTIONS: Final = 64
"""To the control port, from this machine, those with the token among them."""
RESERVED_FILES: Final = 64
"""Descriptors that no connection gets: without them nothing could be written any more."""
COORDINATOR_FILES: Final = 2 * RESERVED_FILES
WORKER_FILES: Final = 64
"""With fewer descriptors each does not begin."""
HEARTBEAT_INTERVAL_MS: Final = 1_000
TICK_MS: Final = 100
"""How often leases are looked at."""
GOODBYE_TIMEOUT_MS: Final = 5_000
"""How long a worker that has failed waits until its reason is written."""
LIVENESS_TIMEOUT_MS: Final = 8_000
"""Silence after which a peer counts as lost (any byte counts as a sign of life)."""
STANDSTILL_TIMEOUT_MS: Final = 300_000
"""The same for a worker that imports, opens its device or builds its task, as long as its kernel
answers: all of its threads may stand still for minutes then."""
LOOP_HOLD_MS: Final = 100
"""Processor time that nothing may take in an event loop at once: meanwhile nobody is heard."""
LOOP_WATCH_INTERVAL_MS: Final = 25
LOOP_HOLD_TOLD_EVERY_S: Final = 10.0
BULK_BYTES: Final = 128 * KIB
"""Of a body that is still to come, or of what waits to be written: so much is for a thread. To give
it to one takes the event loop as long as to decrypt a third of that."""
WRITE_HIGH_WATER_BYTES: Final = 8 * MIB
LENT_COPIES_BYTES: Final = 4 * MIB
"""Of that, where the peer reads in memory which both map: copies that lie there for it. Beyond them
it reads from the socket as fast as it can."""
LENT_SUMS_BYTES: Final = 16 * MIB
"""The same of a worker's sums, which wait in its memory anyway until they are read."""
LENT_AVERAGES_BYTES: Final = 32 * MIB
"""Of averages that are made where such peers read them, and of room there that nobody uses."""
LENT_MAPPED_BYTES: Final = 16 * MIB
"""Of a peer's memory that stays mapped once it was read: what it sends comes to lie at the same
places again, and to map them anew takes longer than to read them. What is beyond counts for the
reader only as long as it reads."""
SEND_AHEAD_BYTES: Final = BODY_BYTES
"""What waits behind that when more of a state or of the log is sent to a worker."""
REPLAY_BYTES: Final = 64 * MIB
"""Of missed steps that a worker is sent before its whole state is taken to be the shorter way."""
PARTIAL_SUMS_BYTES: Final = 64 * MIB
"""Of gradients that wait to be added to others; half of a step's, where that is more."""
UPLOAD_AHEAD_BYTES: Final = 1 * MIB
"""Of a gradient that a worker may send ahead of the others that send, or so many chunks: enough to
keep a link busy meanwhile, and little enough that those who share one get on alike."""
UPLOAD_AHEAD_CHUNKS: Final = 2
BOUNDARIES_BYTES: Final = 64 * MIB
"""Of replicas' boundaries that wait for the disk, before no more is read of who sends them."""
SUMMARISED_AT_ONCE_BYTES: Final = 4 * MIB
"""Of averaged gradients, in the event loop; what is more is for another thread."""
LOGGED_TOGETHER_BYTES: Final = 8 * MIB
LOGGED_TOGETHER_MS: Final = 5
"""Averages that the thread of the log is woken for once: each time costs the event loop more than
sending a chunk."""
WRITTEN_BACK_BYTES: Final = 1 * MIB
"""Of a file that grows, before the disk is told to begin: a commit waits for the rest alone."""
CACHED_TAIL_BYTES: Final = 32 * MIB
"""Of such a file that the system keeps in memory, for workers that come back after a moment. Memory
for more would be taken from others, and that for each step be found anew, which can cost more than
writing to it."""
RECEIVED_AHEAD_BYTES: Final = 64 * MIB
"""Of state and averages that wait for a worker's engine, before it reads no more."""
SEND_QUEUE_BYTES: Final = 64 * MIB
"""What may wait for one slow reader, beside gradients and state, before it is dropped."""

# Runs.
COUNTED_SAMPLES: Final = 10**12
"""Or steps, or whatever else a run spec counts."""
MICROBATCHES_PER_STEP: Final = 4_096
MICROBATCHES_PER_DISPATCH: Final = 8
"""On a Vulkan device, each dispatch over all of them, where the limits that follow allow it."""
INVOCATIONS_PER_DISPATCH: Final = 2**18
"""Of the middle one of a step's dispatches: more keep a card busy longer than a barrier does."""
ACTIVATIONS_AT_ONCE_BYTES: Final = 256 * MIB
"""Of all microbatches that are computed at once."""
BLOCKS: Final = 4_096
TENSORS: Final = 65_536
TRAINABLE_ELEMENTS: Final = 2**36
"""256 GiB of float32: more is no manifest of a real model."""
SAMPLES: Final = 2**40
EVALUATION_PARTS: Final = 2**24
EVALUATION_SUMS: Final = 24
"""Of an evaluation, of which metrics are made: two for each mean."""
END_METRICS_BYTES: Final = 320
"""Of the held-out figures that a worker hears at the end of a run, with their names."""
ROW_LOGITS_ELEMENTS: Final = 65_536
"""Of one token, in a capture."""
LOGITS_FILE_BYTES: Final = 192 * MIB
"""Of rows in a file of captured logits: with its frame it stays below 256 MiB."""
ROW_GROUP_BYTES: Final = 8 * MIB
"""Of captured rows that are read at once."""
CAPTURED_STEP_BYTES: Final = 256 * MIB
"""What all microbatches of a step of a capture give: the coordinator holds it until it is on disk.
"""
NAME_CHARACTERS: Final = 200
SECRET_FILE_CHARACTERS: Final = 16 * MIB
"""A coordinator's file of the keys of all its workers is the largest."""
RUN_SPEC_BYTES: Final = 256 * KIB
DOCUMENT_VALUES: Final = 2**16
"""In a YAML document, those that aliases stand for counted each time."""
DOCUMENT_LEVELS: Final = 32
QUEUED_RUNS: Final = 1_000
"""Runs that wait for those before them."""

# Files that a run reads, sent to workers as blobs.
FILES_PER_RUN: Final = 16_384
BLOB_BYTES: Final = 2**44
"""16 TiB: more is no file of a real model or data set."""
BLOB_NAME_BYTES: Final = 1_024
BLOB_NAME_PART_BYTES: Final = 255
UNANSWERED_BLOB_BYTES: Final = 4 * BODY_BYTES
"""What a worker asks for at once, so a slow one makes nobody hold more memory than that."""
UNANSWERED_BLOB_CHUNKS: Final = 64
"""How many chunks that may be: small files need not wait for one another on a long link."""
LOSS_SCALE_FACTOR: Final = 2.0**24
"""No unit: a factor. The least is 1, where a value that is not finite is the model's own."""
WORKERS: Final = 256
DEVICES_PER_HOST: Final = 64
