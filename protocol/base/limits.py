"""Every bound of the system in one place; a name ends in its unit."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# Frames.
HEADER_BYTES: Final = 1 * KIB
UNAUTHENTICATED_HEADER_BYTES: Final = 256
BODY_BYTES: Final = 4 * MIB
"""Size of a chunk: small enough that a halt or a heartbeat never waits behind a gigabyte."""
CHUNK_ELEMENTS: Final = BODY_BYTES // 4
"""Largest chunk of a block, in float32 elements."""
SMALL_CHUNK_ELEMENTS: Final = 512 * KIB // 4
"""Smallest chunk of a block, except the last: receiving a frame and sending its average back costs
the coordinator about 0.3 ms of processor time."""
SCRIPT_BLOCK_ELEMENTS: Final = 512 * KIB // 4
"""Usual size of a block of a script's module, in float32 elements; it affects the manifest."""

# Owners of chunks, and the links between them.
PENDING_PEER_CONNECTIONS: Final = 8
"""Unauthenticated connections at a worker's port; more wait in the kernel's queue, because all
workers of a run connect at about the same time."""
PEER_PROBE_BYTES: Final = 1 * MIB
PEER_EARLY_BYTES: Final = 256 * MIB
"""Sums that may be buffered before their step or owner table arrives."""
OWNER_LEASE_MS: Final = 2_000
"""Shortest lease of an owner once only its averages are missing."""

# Connections.
UNAUTHENTICATED_CONNECTIONS: Final = 64
UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS: Final = 8
"""A single machine must not keep all others from joining."""
UNAUTHENTICATED_SLOT_MS: Final = 1_000
"""Shortest time that a rejected connection occupies its slot: this bounds the TLS handshakes that
one address can make the coordinator compute."""
HANDSHAKE_TIMEOUT_MS: Final = 5_000
CONTROL_CONNECTIONS: Final = 64
"""Connections to the control port, including authenticated ones."""
RESERVED_FILES: Final = 64
"""File descriptors that no connection may use, so that files can still be written."""
COORDINATOR_FILES: Final = 2 * RESERVED_FILES
"""File descriptors without which the coordinator does not start."""
WORKER_FILES: Final = 64
"""File descriptors without which a worker does not start."""
HEARTBEAT_INTERVAL_MS: Final = 1_000
TICK_MS: Final = 100
"""Interval between checks of leases."""
GOODBYE_TIMEOUT_MS: Final = 5_000
"""Longest time that a failed worker waits for its reason to be sent."""
LIVENESS_TIMEOUT_MS: Final = 8_000
"""Silence after which a peer is considered lost; any byte counts as a sign of life."""
STALL_TIMEOUT_MS: Final = 300_000
"""The same for a worker that imports, opens its device or builds its task, while its kernel still
answers: all of its threads may be blocked for minutes."""
SCRIPT_TIMEOUT_S: Final = 600.0
"""How long the process of a device may run the user's script before it reaches `fit`; longer if the
user's own process took long."""
SCRIPT_REPORT_INTERVAL_S: Final = 60.0
LOOP_HOLD_MS: Final = 100
"""Longest processor time of one callback in an event loop: the loop receives no data meanwhile."""
LOOP_WATCH_INTERVAL_MS: Final = 25
LOOP_HOLD_REPORT_INTERVAL_S: Final = 10.0
BULK_BYTES: Final = 128 * KIB
"""Minimum size of a transfer that is handed to a thread. The handoff takes the event loop as long
as decrypting a third of this."""
WRITE_HIGH_WATER_BYTES: Final = 8 * MIB
SEGMENT_COPIES_BYTES: Final = 4 * MIB
"""Part of the high-water mark for a peer on this machine: copies in its shared segment. Further
data goes through the socket."""
SEGMENT_SUMS_BYTES: Final = 16 * MIB
"""The same for a worker's sums, which stay in its memory until they are read in any case."""
SEGMENT_AVERAGES_BYTES: Final = 32 * MIB
"""Averages that are computed inside the shared segment; also the unused memory that it keeps."""
SEGMENT_MAPPED_BYTES: Final = 16 * MIB
"""Pages of a peer's segment that stay mapped after they are read. The peer reuses offsets, and
mapping a page again takes longer than reading it. Pages beyond this are unmapped after each read,
so that they do not count toward the reader's memory."""
SEND_AHEAD_BYTES: Final = BODY_BYTES
"""Data that may be queued beyond the high-water mark while a state or log is streamed."""
REPLAY_BYTES: Final = 64 * MIB
"""Missed steps that are replayed to a worker; beyond this it receives the whole state instead."""
PARTIAL_SUMS_BYTES: Final = 64 * MIB
"""Gradients that may wait for their siblings in the tree; half a step's, where that is more."""
UPLOAD_AHEAD_BYTES: Final = 1 * MIB
"""How far a worker's upload may be ahead of the slowest one: enough to keep its link busy, and
little enough that workers on one link progress together."""
UPLOAD_AHEAD_CHUNKS: Final = 2
"""The same in chunks; the larger of the two applies."""
INNER_CHECKPOINTS_BYTES: Final = 64 * MIB
"""Inner checkpoints that may wait for the disk before their senders are paused."""
EVENT_LOOP_REDUCE_BYTES: Final = 4 * MIB
"""Largest reduction of averaged gradients in the event loop; larger ones run in a thread."""
LOG_BATCH_BYTES: Final = 8 * MIB
"""Averages per wake-up of the log's thread: a wake-up costs more than sending a chunk."""
LOG_BATCH_MS: Final = 5
WRITEBACK_BYTES: Final = 1 * MIB
"""Bytes appended to a file before writeback starts, so that a commit syncs little data."""
PAGE_CACHE_TAIL_BYTES: Final = 32 * MIB
"""End of the log that stays in the page cache, for workers that reconnect soon. More would take
memory from other programs, and searching it at every step can cost more than writing it."""
RECEIVED_AHEAD_BYTES: Final = 64 * MIB
"""State and averages that may wait for a worker's engine before it stops reading."""
SEND_QUEUE_BYTES: Final = 64 * MIB
"""Data that may wait for a slow reader, without gradients and state, before it is dropped."""

# Runs.
LARGEST_COUNT: Final = 10**12
"""Largest number of samples, steps or anything else in a run spec."""
MICROBATCHES_PER_STEP: Final = 4_096
MICROBATCHES_PER_DISPATCH: Final = 8
"""Microbatches of one dispatch on a Vulkan device, where the next two limits allow it."""
INVOCATIONS_PER_DISPATCH: Final = 2**18
"""Target for a step's median dispatch: it keeps a card busy for longer than a barrier takes."""
ACTIVATIONS_AT_ONCE_BYTES: Final = 256 * MIB
"""Activations of all microbatches in one dispatch."""
BLOCKS: Final = 4_096
TENSORS: Final = 65_536
CLIPPED_GROUPS: Final = 16
"""Parameter groups with a clip_norm: a commit's header has the factor of each."""
SCHEDULED_GROUPS: Final = 32
"""Different lists of lr_scales: a commit's header has the factor of each."""
TRAINABLE_ELEMENTS: Final = 2**36
"""256 GiB of float32: no manifest of a real model has more."""
SAMPLES: Final = 2**40
WEIGHTS_BYTES: Final = 256 * MIB
"""Weights by which samples are drawn, uncompressed."""
EVALUATION_PARTS: Final = 2**24
EVALUATION_SUMS: Final = 64
"""Sums of one evaluation part, from which metrics are computed: two for each mean; for a
correlation two for each of the part's samples, of which there are 24 at most."""
END_METRICS_BYTES: Final = 320
"""Evaluation metrics, with their names, in the message that ends a run."""
ROW_LOGITS_ELEMENTS: Final = 65_536
"""Logits captured for one token."""
LOGITS_FILE_BYTES: Final = 192 * MIB
"""Rows in a file of captured logits: with its framing it stays below 256 MiB."""
ROW_GROUP_BYTES: Final = 8 * MIB
"""Captured rows in a row group, which is read as a whole."""
CAPTURED_STEP_BYTES: Final = 256 * MIB
"""Captured rows of one step, which the coordinator buffers until they are on disk."""
EMBEDDED_TENSORS: Final = 16
EMBEDDING_SAMPLE_BYTES: Final = 1 * MIB
"""Embeddings and labels of one sample."""
STEP_EMBEDDINGS_BYTES: Final = 1024 * MIB
"""Embeddings and labels of one step; the coordinator and every worker hold a copy."""
UNLIKE_MICROBATCHES: Final = 64
"""Microbatches of a subtree that a worker reports for embeddings with other bits."""
SCRIPT_CONSTANTS: Final = 256
"""Constants of a script that workers compare, in a manifest."""
NAME_CHARACTERS: Final = 200
SECRET_FILE_CHARACTERS: Final = 16 * MIB
"""The largest secret file is a coordinator's file of all worker keys."""
RUN_SPEC_BYTES: Final = 256 * KIB
DOCUMENT_VALUES: Final = 2**16
"""Values in a YAML document; the target of an alias counts each time."""
DOCUMENT_LEVELS: Final = 32
QUEUED_RUNS: Final = 1_000

# Files that a run reads, sent to workers as blobs.
FILES_PER_RUN: Final = 16_384
BLOB_BYTES: Final = 2**44
"""16 TiB: no file of a real model or data set is larger."""
BLOB_NAME_BYTES: Final = 1_024
BLOB_NAME_PART_BYTES: Final = 255
UNANSWERED_BLOB_BYTES: Final = 4 * BODY_BYTES
"""Data that a worker requests at once: for a slow worker, no more than this is buffered."""
UNANSWERED_BLOB_CHUNKS: Final = 64
"""Chunks that a worker requests at once: small files need not wait for each other."""
LOSS_SCALE_FACTOR: Final = 2.0**24
"""Largest loss scale. The smallest is 1, where a non-finite value is the model's own."""
WORKERS: Final = 256
DEVICES_PER_WORKER: Final = 64


def byte_size(count: int) -> str:
    """Format a number of bytes: in GiB with two decimals; less than one in MiB with one."""
    gib = 1024 * MIB
    return f"{count / gib:.2f} GiB" if count >= gib else f"{count / MIB:.1f} MiB"
