"""The sections `exchange` and `replicas` of a run spec: the data that machines exchange.

Without `replicas`, workers exchange the gradients of every step. With it (DiLoCo: Douillard et al.
2023, arXiv:2311.08105) the run has K logical replicas. In a round each replica takes H inner steps
from the same parameters, and the difference is exchanged. No bit depends on which worker computes
which replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from protocol.base.fields import BoundedInt, Fraction
from protocol.spec.sections.section import Needs, Section

Precision = Literal["float32", "bfloat16"]
Topology = Literal["auto", "star", "sharded"]
Codec = Literal["float32", "bfloat16", "int8", "int4", "topk"]
DenseCodec = Literal["float32", "bfloat16", "int8", "int4"]

_WORKER_DEPENDENT_KEYS: Final = (
    "quorum", "min_replicas", "asynchronous", "async", "staleness", "timeout_s", "merging",
)  # fmt: skip
"""Keys of other systems, in which results depend on the workers that take part."""
_SPEED_DEPENDENT_VALUES: Final = ("auto", "measured", "dynamic", "adaptive")
"""Values of `inner_steps` in other systems that depend on the speed of workers."""


class Codecs(NamedTuple):
    """Encodings of a step's payloads.

    Attributes:
        precision: Encoding of the sums that workers send.
        averages: Encoding of the averages that workers receive.
        sums: Precision to which every addition is rounded.
    """

    precision: Codec = "float32"
    averages: Codec = "float32"
    sums: Precision = "float32"


class ExchangeSpec(Section):
    """How gradients are exchanged.

    In a star, all workers send gradients to the coordinator, which averages them and sends the
    averages to all workers. In a sharded exchange each worker averages some chunks and sends them
    to the others, so each link carries as much as in a ring. Both give the same bits.

    bfloat16 halves the bytes. Rounding (to nearest, ties to even) is then part of the sum: every
    microbatch's gradient and every sum of two subtrees is rounded. So the bits are the same for
    any number of workers, but differ from those of float32.
    """

    precision: Precision = Field(
        "float32",
        description="precision of sums that workers send; bfloat16 rounds every addition",
    )
    averages: Precision = Field(
        "float32",
        description="precision of averages that workers receive; they are rounded before norm, "
        "clipping and update",
    )
    topology: Topology = Field(
        "auto",
        description="star: the coordinator averages; sharded: workers that reach each other "
        "average chunks; auto: sharded on three machines or more, as long as it is faster",
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_the_topology_alone(cls, document: Any) -> Any:
        """Read `exchange: sharded` as `exchange: {topology: sharded}`."""
        return {"topology": document} if isinstance(document, str) else document

    @property
    def codecs(self) -> Codecs:
        """Encodings of gradients. Additions are rounded to the precision of the sums that workers
        send."""
        return Codecs(self.precision, self.averages, sums=self.precision)


class OuterSpec(Section):
    """The outer update of a round: exact SGD with a constant learning rate.

    Its gradient is the averaged difference of the replicas' parameters (start minus end).
    """

    lr: float = Field(0.7, ge=1e-30, le=1e3, description="learning rate")
    momentum: Fraction = Field(0.9, description="share of the velocity that a step keeps; 0: none")
    nesterov: Annotated[bool, Needs("momentum")] = Field(
        default=True, description="Nesterov momentum, as in torch's SGD"
    )


class ReplicasSpec(Section):
    """Replicas that take many steps between two exchanges, for slow links (DiLoCo).

    `optimizer` and `batch` apply to the inner steps; `steps` counts rounds.
    """

    count: int = Field(
        ge=1, le=256, description="K: number of replicas, whatever the number of workers"
    )
    inner_steps: BoundedInt = Field(
        ge=1, description="H: optimizer steps of each replica in a round"
    )
    outer: OuterSpec = OuterSpec()
    inner_state: Literal["reset", "carry"] = Field(
        "reset",
        description="moments at the start of a round: zeros, or those of the replica, which are "
        "sent along with it",
    )
    codec: Codec = Field(
        "float32",
        description="encoding of a replica's difference; topk sends 64 of 4096 values and keeps "
        "the rest for later rounds",
    )
    averages: DenseCodec = Field(
        "float32", description="encoding of the averaged difference that workers receive"
    )
    boundary_every: BoundedInt = Field(
        0,
        ge=0,
        description="inner steps between inner checkpoints, which limit what is computed again "
        "after a loss; 0: only at the end of a round",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_machine_dependence(cls, document: Any) -> Any:
        if not isinstance(document, Mapping):
            return document
        key = next((name for name in _WORKER_DEPENDENT_KEYS if name in document), None)
        if key is not None:
            raise ValueError(
                f"expected a result that does not depend on the machines, got {key!r}; remove "
                "it: every round has all `count` replicas, whichever machines compute them"
            )
        if document.get("inner_steps") in _SPEED_DEPENDENT_VALUES:
            raise ValueError(
                f"expected a number of inner_steps, got {document['inner_steps']!r}: the result "
                "would depend on the machines; for machines of different speeds, raise `count` "
                "above their number, so that fast ones compute several replicas"
            )
        return document

    @model_validator(mode="after")
    def _check_boundaries(self) -> Self:
        if self.boundary_every >= self.inner_steps:
            raise ValueError(
                f"expected boundary_every below inner_steps, {self.inner_steps}, or 0, "
                f"got {self.boundary_every}"
            )
        return self

    @property
    def has_carried_state(self) -> bool:
        """Whether replicas carry per-replica state from round to round."""
        return self.inner_state == "carry" or self.codec == "topk"

    @property
    def codecs(self) -> Codecs:
        """Encodings of differences and their averages."""
        return Codecs(self.codec, self.averages)
