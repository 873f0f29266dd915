"""The replica: update, counters, digests, and moving a state to another replica."""

import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from protocol.base.errors import SubnormalsFlushed
from protocol.exact.digest import weights_digest
from protocol.exact.parameter_groups import decays
from protocol.exact.replica import Replica, aligned_zeros, part_slices
from protocol.exact.update import apply_update, moment_count, step_scalars
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.optimizer import Adamw, OptimizerSpec

BLOCKS = (
    Block(
        name="layer.0",
        kind="block",
        tensors=(
            TensorSpec(name="layer.0.weight", shape=(5, 7)),
            TensorSpec(name="layer.0.bias", shape=(5,)),
            TensorSpec(name="layer.0.norm", shape=(5,)),
            TensorSpec(name="layer.0.out", shape=(3, 5)),
        ),
    ),
    Block(name="head", kind="non_block", tensors=(TensorSpec(name="head", shape=(2, 3)),)),
)
SPECS = [
    OptimizerSpec(name=name, lr=0.01, weight_decay=0.1, clip_norm=1.0)
    for name in ("sgd", "momentum", "adamw")
]
STEPS, GRADIENT_NORM = 100, 3.0
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def values(seed):
    random = np.random.default_rng(seed)
    return [random.standard_normal(block.elements).astype(np.float32) for block in BLOCKS]


def scalars(replica, spec):
    """Return the scalars of the replica's next step."""
    return step_scalars(spec, replica.optimizer_step + 1, replica.step, STEPS, GRADIENT_NORM)


def trained_replica(spec, steps=3):
    replica = Replica(BLOCKS, spec)
    replica.load_parameters(values(0))
    for step in range(steps):
        replica.apply(values(step + 1), scalars(replica, spec))
    return replica


@pytest.mark.parametrize("bad_value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", ["parameters", "second_moment"])
def test_non_finite_value_is_located(bad_value, kind):
    replica = Replica(BLOCKS, Adamw(name="adamw", lr=0.1))
    assert replica.non_finite_location() == ""
    block_number = len(BLOCKS) - 1
    block, tensor = BLOCKS[block_number], BLOCKS[block_number].tensors[-1]
    part = next(p for p in replica.parts() if (p.kind, p.block) == (kind, block_number))
    part.values[-1] = bad_value
    kind_text = kind.replace("_", " ")
    expected = f"block {block.name!r}, tensor {tensor.name!r} ({kind_text})"
    assert replica.non_finite_location() == expected


def test_update_in_a_thread_that_flushes_subnormals_is_refused():
    """Run in a separate thread, since the setting ends with the thread."""
    replica = Replica(BLOCKS, SPECS[0])
    before = replica.state_digest()
    gradients = [np.zeros(block.elements, np.float32) for block in BLOCKS]
    scalars = step_scalars(SPECS[0], 1, 0, 3, 1.0)

    def update() -> str:
        assert torch.set_flush_denormal(True)
        with pytest.raises(SubnormalsFlushed, match="subnormal numbers to zero") as error_info:
            replica.apply(gradients, scalars)
        return str(error_info.value)

    with ThreadPoolExecutor(1) as thread:
        assert "\n" not in thread.submit(update).result()
    assert replica.state_digest() == before
    replica.apply(gradients, scalars)


@each_spec
def test_apply_updates_each_tensor_by_the_rule_with_its_own_decay(spec):
    replica = trained_replica(spec)
    tensors = replica.tensors()
    for index, block in enumerate(BLOCKS):
        for tensor, part in block.slices():
            expected = values(0)[index][part].copy()
            moments = tuple(np.zeros_like(expected) for _ in range(moment_count(spec)))
            for step in range(3):
                apply_update(
                    spec,
                    step_scalars(spec, step + 1, step, STEPS, GRADIENT_NORM),
                    expected,
                    values(step + 1)[index][part],
                    moments,
                    decay=decays(tensor.name, spec),
                )
            assert tensors[tensor.name].shape == tensor.shape
            assert tensors[tensor.name].tobytes() == expected.tobytes()


def test_decay_changes_only_tensors_that_decay():
    with_decay, without_decay = (
        trained_replica(Adamw(name="adamw", lr=0.01, weight_decay=decay)).tensors()
        for decay in (0.1, 0.0)
    )
    changed_names = {name for name in with_decay if (with_decay[name] != without_decay[name]).any()}
    assert changed_names == {"layer.0.weight", "layer.0.out", "head"}


@each_spec
def test_every_array_is_flat_float32_and_aligned(spec):
    replica = Replica(BLOCKS, spec)
    assert len(replica.parts()) == len(BLOCKS) * (1 + moment_count(spec))
    for part in replica.parts():
        assert part.values.dtype == np.float32
        assert part.values.shape == (BLOCKS[part.block].elements,)
        assert part.values.ctypes.data % 64 == 0
        assert not part.values.any()


@pytest.mark.parametrize("elements", [0, 1, 15, 16, 17, 1001, 300_000])
def test_aligned_zeros_start_at_multiples_of_64_bytes(elements):
    arrays = [aligned_zeros(elements) for _ in range(20)]
    assert all(array.shape == (elements,) and not array.any() for array in arrays)
    assert all(array.ctypes.data % 64 == 0 for array in arrays if elements)


def test_zeros_are_mapped_without_support_for_huge_pages(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # the kernel refuses this advice
    assert not aligned_zeros(300_000).any()


def test_skipped_step_is_not_an_optimizer_step():
    spec = SPECS[2]
    replica = trained_replica(spec, steps=2)
    assert (replica.step, replica.optimizer_step) == (2, 2)
    replica.skip()
    assert (replica.step, replica.optimizer_step) == (3, 2)
    replica.apply(values(9), scalars(replica, spec))
    assert (replica.step, replica.optimizer_step) == (4, 3)


def test_a_skip_changes_the_state_digest_and_no_weight():
    replica = trained_replica(SPECS[0])
    state, weights = replica.state_digest(), replica.weights_digest()
    replica.skip()
    assert replica.weights_digest() == weights
    assert replica.state_digest() != state


def test_loaded_parameters_are_copied():
    source = values(0)
    replica = Replica(BLOCKS, SPECS[0])
    replica.load_parameters(source)
    source[0][:] = 0
    assert replica.parameters[0].tobytes() == values(0)[0].tobytes()


def test_apply_leaves_the_gradients_unchanged():
    averages = values(1)
    replica = Replica(BLOCKS, SPECS[2])
    replica.apply(averages, scalars(replica, SPECS[2]))
    assert [a.tobytes() for a in averages] == [a.tobytes() for a in values(1)]


def test_tensors_are_views_of_the_parameters():
    replica = Replica(BLOCKS, SPECS[0])
    replica.parameters[1][:] = np.arange(6)
    assert replica.tensors()["head"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.shares_memory(replica.tensors()["head"], replica.parameters[1])


def test_weights_digest_hashes_the_tensors():
    replica = trained_replica(SPECS[2])
    assert replica.weights_digest() == weights_digest(replica.tensors())


@each_spec
def test_a_flipped_bit_anywhere_changes_the_state_digest(spec):
    replica = trained_replica(spec)
    before = replica.state_digest()
    for part in replica.parts():
        part.values.view(np.uint32)[-1] ^= np.uint32(1)
        assert replica.state_digest() != before
        part.values.view(np.uint32)[-1] ^= np.uint32(1)
    assert replica.state_digest() == before


@each_spec
def test_digest_from_update_hashes_equals_the_digest_of_memory(spec):
    replica = trained_replica(spec)
    for should_hash in (True, False):
        replica.apply(values(5), scalars(replica, spec), should_hash=should_hash)
        first_digest = replica.state_digest()
        # The update's hashes serve the first digest only; the others hash the memory.
        assert first_digest == replica.state_digest() == replica.copy().state_digest()
    replica.apply(values(6), scalars(replica, spec), should_hash=True)
    replica.clear_moments()  # the update's hashes no longer apply
    assert replica.state_digest() == replica.copy().state_digest()


@each_spec
def test_state_moves_in_pieces_and_both_replicas_continue_equally(spec):
    first = trained_replica(spec)
    first.skip()
    second = Replica(BLOCKS, spec)
    for part in first.parts():
        for number, part_range in enumerate(part_slices(part.kind, BLOCKS[part.block])):
            second.load_piece(part.kind, part.block, number, part.values[part_range])
    second.set_counters(first.step, first.optimizer_step)
    assert second.state_digest() == first.state_digest()
    for replica in (first, second):
        replica.apply(values(7), scalars(replica, spec))
    assert second.state_digest() == first.state_digest()


def test_copy_is_equal_and_independent():
    replica = trained_replica(SPECS[2])
    snapshot = replica.copy()
    before = snapshot.state_digest()
    assert before == replica.state_digest()
    replica.apply(values(8), scalars(replica, SPECS[2]))
    assert snapshot.state_digest() == before
    assert replica.state_digest() != before


@pytest.mark.parametrize(
    "bad_arrays",
    [
        values(0)[:1],
        [values(0)[0], np.zeros(1, np.float32)],
        [values(0)[0], np.zeros(6)],
        [values(0)[0], np.zeros((2, 3), np.float32)],
    ],
)
def test_invalid_arrays_are_an_internal_error(bad_arrays):
    replica = trained_replica(SPECS[0])
    before = replica.state_digest()
    with pytest.raises(AssertionError):
        replica.load_parameters(bad_arrays)
    with pytest.raises(AssertionError):
        replica.apply(bad_arrays, scalars(replica, SPECS[0]))
    assert replica.state_digest() == before
