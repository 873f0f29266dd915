import numpy as np

from protocol.exact.inner_phases import InnerPhaseOrder
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.spec.run_spec import RegressRun
from protocol.spec.sections.exchange import ReplicasSpec
from protocol.spec.sections.tasks import BatchSpec


def order(count, inner_steps, samples=20):
    spec = RegressRun(
        task="regress", steps=4, seed=3, batch=BatchSpec(samples=6, microbatch=4),
        replicas=ReplicasSpec(count=count, inner_steps=inner_steps),
    )  # fmt: skip
    return InnerPhaseOrder(spec, samples)


def take_rounds(sample_order, rounds):
    return [
        sample
        for round_ in range(rounds)
        for inner in range(sample_order.inner_steps)
        for replica in range(sample_order.replicas)
        for part in sample_order.microbatches(round_, replica, inner)
        for sample in part
    ]


def test_replicas_share_an_epoch_and_each_sample_comes_once():
    sample_order = order(3, 2, samples=36)  # a round: six batches of six
    for round_ in range(3):
        samples = take_rounds(sample_order, round_ + 1)[36 * round_ :]
        assert sorted(samples) == list(range(36))


def test_one_replica_has_the_order_of_a_plain_run():
    sample_order, plain_order = order(1, 3), SampleOrder(3, 20, BatchSpec(samples=6, microbatch=4))
    for step in range(12):
        round_, inner = divmod(step, 3)
        assert sample_order.microbatches(round_, 0, inner) == plain_order.microbatches(step)
        leaves = range(plain_order.microbatch_count(step))
        assert sample_order.seeds(round_, 0, inner) == [
            microbatch_seed(3, step, leaf) for leaf in leaves
        ]


def test_no_two_inner_steps_have_a_batch_in_common():
    sample_order = order(3, 5)
    batches = [
        sample_order.batch(round_, replica, inner)
        for round_ in range(4) for replica in range(3) for inner in range(5)
    ]  # fmt: skip
    assert sorted(batches) == list(range(60))
    assert [b for r in range(4) for b in sample_order.batches(r)] == list(range(60))
    assert (
        np.unique([sample_order.global_step(r, i) for r in range(4) for i in range(5)]).size == 20
    )
