"""Traces a task's step, or a model's forward, to graphs of core operators.

The step (forward, loss, backward) becomes one outer graph in which each call of a repeated layer
is a node; each kind of call becomes a graph of its own, forward and backward jointly. No number is
computed: tensors are fake, shapes are static.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree

from backends.base.coupled_loss import changeable
from backends.wgpu.capture.attention import Fuses, written_out
from backends.wgpu.capture.draws import refuse_foreign_draws, refuse_undrawn
from backends.wgpu.capture.half_products import half_products
from backends.wgpu.capture.layer_call import LayerCall, Like, closed_layers, refuse_changed
from backends.wgpu.capture.model_attention import own_attention, sdpa_can_be_traced
from backends.wgpu.capture.rewrites import Rewrites
from backends.wgpu.capture.substitution import named_tensors, substituted
from backends.wgpu.graph.decompositions import decompositions
from backends.wgpu.graph.passes import quiet_torch
from protocol.base.errors import SamestepError, user_location

Arrays = Mapping[str, torch.Tensor]

SCALE: Final = "the loss's scale"
"""The array of a step in float16 that holds it and its reciprocal."""
_SEEDS: Final = 4_096
"""More than the calls of any model that draw; only those in use are uploaded."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of layer call.

    Attributes:
        path: The first layer of this kind.
        graph: Placeholders: inputs, then the tangents of `tangents`. Outputs: results, then a
            gradient (or None) for each differentiable input.
        results: How many outputs are results.
        checkpoint: Whether backward computes forward again.
    """

    path: str
    graph: fx.GraphModule
    results: int
    checkpoint: bool


@dataclass(frozen=True, slots=True)
class ModelResult:
    """What a call of the whole module gave, flat, and its structure."""

    tensors: tuple[Like, ...]
    structure: pytree.TreeSpec


@dataclass(slots=True)
class Capture:
    """What was traced.

    Attributes:
        graph: Placeholders: the module's tensors, the seeds, the arrays.
        tensors: Names of the module's tensors in the order of placeholders; a tied tensor once.
        arrays: Names or numbers of the arrays.
        kinds: By layer call, in the order of their numbers.
        seeds: How many (2,) seeds there are.
        outputs: What the graph's outputs are like.
        results: For a forward: the structure of what the module gave.
        model_results: For a step: of each of the loss's calls of the module; None for a call that
            gave what is no tensor.
        fields: How many of the last outputs are embeddings, which come before the rest is begun.
    """

    graph: fx.GraphModule
    tensors: tuple[str, ...]
    arrays: tuple[str, ...]
    kinds: list[Kind]
    calls: list[LayerCall] = field(default_factory=list)
    seeds: int = 1
    outputs: tuple[Like | None, ...] = ()
    results: pytree.TreeSpec | None = None
    model_results: tuple[ModelResult | None, ...] = ()
    fields: int = 0


def capture_step(
    module: nn.Module,
    loss: Callable[[Any, Arrays], torch.Tensor],
    trained: Sequence[str],
    arrays: Arrays,
    fuses: Fuses = written_out,
    *,
    closes: bool = True,
    halves: bool = False,
    fields: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Capture:
    """Loss and gradients of a training step.

    Args:
        module: On the host; it is not changed.
        loss: Gives the summed loss.
        trained: Names of the trainable tensors.
        arrays: Of the shapes and types to trace for; their values are not looked at.
        fuses: Which attention stays in one piece.
        closes: Whether a call of a repeated layer is one node.
        halves: Whether products are computed in float16. Then there is one array more, `SCALE`:
            what the loss is multiplied by before backward, and what gradients are afterwards.
        fields: Gives the embeddings that the loss has computed, if there are any.

    Returns:
        Outputs: the loss, then for each name of `trained` its gradient or None, then the fields.

    Raises:
        SamestepError: The step depends on values, or on what cannot be traced.
    """

    def step(given: Arrays, named: Arrays) -> list[torch.Tensor | None]:
        scale = given.get(SCALE)
        value = loss(module, {name: x for name, x in given.items() if name != SCALE})
        value = value.float() if halves else value
        if value.dim():
            raise SamestepError(f"expected a loss that is one sum, got shape {tuple(value.shape)}")
        gradients = _gradients(value, [named[name] for name in trained], scale)
        beside = [each.detach() for each in fields()]
        counted[:] = [len(beside)]
        return [value.detach(), *gradients, *beside]

    counted = [0]
    found: list[ModelResult | None] = []

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        flat, structure = pytree.tree_flatten(output)
        tensors = all(isinstance(each, torch.Tensor) for each in flat)
        found.append(ModelResult(tuple(map(Like.of, flat)), structure) if tensors else None)

    with (
        prepared(module, train=True, fuses=fuses) as checkpoint,
        half_products(wanted=halves),
        module.register_forward_hook(note),
    ):
        trace = _Trace(module, frozenset(trained), checkpoint, fuses, closes)
        scaled = {SCALE: torch.ones(2)} if halves else {}
        captured = trace.capture(step, {**arrays, **scaled})
    captured.model_results, (captured.fields,) = tuple(found), counted
    return captured


def capture_coupled(
    module: nn.Module,
    losses: Callable[[Any, Arrays], torch.Tensor],
    trained: Sequence[str],
    arrays: Arrays,
    fuses: Fuses = written_out,
) -> Capture:
    """A loss over all samples of a step, and its gradients.

    Args:
        module: On the host; it is not changed.
        losses: Gives the loss of each sample, (samples,), of the module and the arrays.
        trained: Names of the trainable tensors.
        arrays: Of the shapes and types to trace for, those of float32 with gradients.
        fuses: Which attention stays in one piece.

    Returns:
        Outputs of the graph: the losses; for each name of `trained` the gradient of their sum, or
        None; the same for each array of float32.
    """
    embeddings = [name for name, array in arrays.items() if array.is_floating_point()]

    def step(given: Arrays, named: Arrays) -> list[torch.Tensor | None]:
        found = losses(module, changeable(given))
        wanted = [*(named[name] for name in trained), *(given[name] for name in embeddings)]
        return [found.detach(), *_gradients(found.float().sum(), wanted, None)]

    with prepared(module, train=True, fuses=fuses) as checkpoint:
        trace = _Trace(module, frozenset(trained), checkpoint, fuses)
        return trace.capture(step, arrays, frozenset(embeddings))


def _gradients(
    value: torch.Tensor, wanted: Sequence[torch.Tensor], scale: torch.Tensor | None
) -> Sequence[torch.Tensor | None]:
    if not value.requires_grad:
        return [None] * len(wanted)
    if scale is None:
        return torch.autograd.grad(value, wanted, allow_unused=True)
    found: Any = torch.autograd.grad(value, wanted, scale[0], allow_unused=True)
    return [None if grad is None else grad * scale[1] for grad in found]


def capture_forward(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fuses: Fuses = written_out,
    *,
    halves: bool = False,
) -> Capture:
    """A call of the module in evaluation mode; outputs of the graph are its tensors, flat.

    Raises:
        SamestepError: As `capture_step`; or a result is not a tensor.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    arrays = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    found: list[pytree.TreeSpec] = []

    def forward(given: Arrays, named: Arrays) -> list[torch.Tensor | None]:
        del named
        flat = [given.get(str(i), leaf) for i, leaf in enumerate(leaves)]
        again, words = pytree.tree_unflatten(flat, structure)
        with torch.no_grad():
            results, spec = pytree.tree_flatten(module(*again, **words))
        found.append(spec)
        return pytree.tree_map(_in_float32, results) if halves else results

    with prepared(module, train=False, fuses=fuses), half_products(wanted=halves):
        trace = _Trace(module, frozenset(), checkpoint=False, fuses=fuses)
        captured = trace.capture(forward, arrays)
    captured.results = found[-1]
    return captured


@contextmanager
def prepared(module: nn.Module, *, train: bool, fuses: Fuses = written_out) -> Iterator[bool]:
    """Set the module's modes for a trace, and put them back; gives whether to checkpoint.

    Attention that is neither torch's own function nor the model's written-out form becomes the
    latter, which has rules in core operators.
    """
    modes = [(each, each.training) for each in module.modules()]
    flags = [each for each in module.modules() if getattr(each, "gradient_checkpointing", False)]
    configs = {id(c): c for each in module.modules() if (c := getattr(each, "config", None))}
    attention = [
        (config, config._attn_implementation)  # noqa: SLF001
        for config in configs.values()
        if getattr(config, "_attn_implementation", None) is not None
    ]
    try:
        module.train(train)
        for each in flags:
            each.gradient_checkpointing = False  # type: ignore[assignment]
        for config, before in attention:
            if before != "sdpa" or not sdpa_can_be_traced():
                config._attn_implementation = "eager"  # noqa: SLF001
        with own_attention(module, fuses), refuse_foreign_draws(), _without_onednn():
            yield bool(flags)
    finally:
        for config, before in attention:
            config._attn_implementation = before  # noqa: SLF001
        for each in flags:
            each.gradient_checkpointing = True  # type: ignore[assignment]
        for each, mode in modes:
            each.training = mode


@contextmanager
def _without_onednn() -> Iterator[None]:
    """While it is entered, recurrent layers are plain products."""
    before = torch._C._get_mkldnn_enabled()  # noqa: SLF001
    torch._C._set_mkldnn_enabled(False)  # noqa: SLF001
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class _Trace:
    """What a trace needs of the module."""

    module: nn.Module
    trained: frozenset[str]
    checkpoint: bool
    fuses: Fuses
    closes: bool = True

    def capture(
        self,
        function: Callable[[Arrays, Arrays], list[torch.Tensor | None]],
        arrays: Arrays,
        differentiable: frozenset[str] = frozenset(),
    ) -> Capture:
        """Trace a function of (arrays, the module's tensors by name); of these arrays gradients
        can be taken."""
        held = named_tensors(self.module)
        first: dict[int, str] = {}
        for name, tensor in held.items():
            first.setdefault(id(tensor), name)
        names = tuple(first.values())
        calls: list[LayerCall] = []
        used_seeds = [0]

        def traced(tensors: list[torch.Tensor], seeds: torch.Tensor, given: list[Any]) -> Any:
            def next_seed() -> torch.Tensor:
                used_seeds.append(len(used_seeds))
                return seeds[used_seeds[-1]]

            by_name = dict(zip(names, tensors, strict=True))
            everywhere = {name: by_name[first[id(tensor)]] for name, tensor in held.items()}
            with ExitStack() as stack:
                stack.enter_context(substituted(self.module, everywhere))
                closed = closed_layers(
                    self.module, next_seed, checkpoint=self.checkpoint, fuses=self.fuses
                )
                inside = stack.enter_context(closed) if self.closes else []
                stack.enter_context(Rewrites(seeds[0], self.fuses))
                results = function(dict(zip(arrays, given, strict=True)), everywhere)
                calls.extend(inside)
                return results

        with FakeTensorMode(allow_non_fake_inputs=True):
            tensors = [_fake(held[name], trained=name in self.trained) for name in names]
            seeds = torch.empty((_SEEDS, 2), dtype=torch.int32)
            given = [_fake(array, trained=n in differentiable) for n, array in arrays.items()]
            graph = _trace(traced, (tensors, seeds, given), self.module, "")
            kinds = _kinds(calls)
        _copy_changed_arrays(graph, len(given))
        (last,) = (node for node in graph.graph.nodes if node.op == "output")
        outputs = tuple(None if n is None else Like.of(n.meta["val"]) for n in last.args[0])
        return Capture(graph, names, tuple(arrays), kinds, calls, len(used_seeds), outputs)


def _copy_changed_arrays(graph: fx.GraphModule, arrays: int) -> None:
    """A loss may change its batch in place: what it writes into one of the last inputs goes into
    a copy."""
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    batch = inputs[len(inputs) - arrays :]
    changed = {_viewed(node.args[0]) for node in nodes if _is_in_place(node)}
    for holder in batch:
        if holder in changed:
            with graph.graph.inserting_before(holder.next):
                copy = graph.graph.call_function(torch.ops.aten.clone.default, (holder,))
            copy.meta = dict(holder.meta)
            holder.replace_all_uses_with(copy)
            copy.args = (holder,)


def _is_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _viewed(given: Any) -> Any:
    """What it is a view of, if it is one."""
    while isinstance(given, fx.Node) and given.op == "call_function" and given.args:
        given = given.args[0]
    return given


def _in_float32(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype == torch.float16
    return value.float() if half else value


def _fake(tensor: torch.Tensor, *, trained: bool = False) -> torch.Tensor:
    """Frozen tensors of fewer bits are widened: only their storage is small."""
    with torch.no_grad():
        wide = torch.float32 if tensor.dtype in {torch.float16, torch.bfloat16} else tensor.dtype
        made: torch.Tensor = torch.empty(tensor.shape, dtype=wide)
    return made.requires_grad_(trained)


def _kinds(calls: Sequence[LayerCall]) -> list[Kind]:
    made: dict[Any, Kind] = {}
    for call in calls:
        if call.kind not in made:
            made[call.kind] = _capture_kind(call)
    return [made[call.kind] for call in calls]


def _capture_kind(call: LayerCall) -> Kind:
    refuse_changed(call)
    reached = [number for number, there in enumerate(call.tangents or ()) if there]
    inputs = [like.fake() for like in call.inputs]
    tangents = [Like(call.outputs[i].shape, call.outputs[i].dtype).fake() for i in reached]

    def joint(inputs: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[Any]:
        results, _ = call.run(inputs)
        if call.tangents is None:
            return [result.detach() for result in results]
        wanted = [x for x, like in zip(inputs, call.inputs, strict=True) if like.differentiable]
        outputs = [results[number] for number in reached]
        grads = torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
        return [*(result.detach() for result in results), *grads]

    graph = _trace(joint, (inputs, tangents), call.layer, call.path)
    return Kind(call.path, graph, len(call.outputs), call.checkpoint)


def _trace(
    function: Callable[..., Any], arguments: tuple[Any, ...], module: nn.Module, prefix: str
) -> fx.GraphModule:
    """Trace to core operators without mutations; nodes know their module in `meta["module"]`."""
    places = _Places(module, prefix)
    try:
        with places, quiet_torch():
            graph = make_fx(
                function,
                decomposition_table=decompositions(),
                tracing_mode="real",
                _allow_non_fake_inputs=True,
            )(*arguments)
    except SamestepError:
        raise
    except Exception as error:
        raise _cannot(places.now or "the step", error) from error
    places.mark(graph)
    refuse_undrawn(graph)
    return graph


_CAUSES: Final = (
    ("aten._local_scalar_dense", "it reads a tensor's value, as .item(), float(x) or `if x` do"),
    (".numpy() is not supported", "it takes a tensor as numpy's"),
    ("aten._pack_padded_sequence", "it packs sequences; give them padded instead"),
    ("DynamicOutputShape", "a shape depends on a tensor's values, as x[x > 0] and nonzero() do"),
    ("use_reentrant=True", "it uses checkpoints that are reentrant; write use_reentrant=False"),
)
"""What is found in torch's words for it, and ours."""


def _cannot(what: str, error: Exception) -> SamestepError:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    found = next((ours for theirs, ours in _CAUSES if theirs in said), "")
    reason = f"{found} ({said.split(';', maxsplit=1)[0][:80].rstrip('. ')})" if found else said
    rest = "" if found else "; a step must not depend on the values of tensors"
    return SamestepError(
        f"the vulkan backend cannot capture {what}{user_location(error)}: "
        f"{reason.rstrip('.')}{rest}; use a cpu or cuda worker for this model"
    )


class _Places:
    """While it is entered: which module each traced operator came from."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        dot = "." if prefix else ""
        self._names = {
            id(each): f"{prefix}{dot if name else ''}{name}"
            for name, each in module.named_modules()
        }
        self._stack: list[str] = [prefix]
        self._marks: list[tuple[int, str]] = []
        self._hooks: list[Any] = []

    @property
    def now(self) -> str:
        """The module whose forward was reached last."""
        return self._stack[-1]

    def __enter__(self) -> None:
        self._hooks = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave),
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        self._stack.append(self._names.get(id(module), self._stack[-1]))
        self._mark()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs, output
        if len(self._stack) > 1:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        mode = get_proxy_mode()
        if mode is not None:
            nodes = mode.tracer.graph.nodes
            self._marks.append((len(nodes), self._stack[-1]))

    def mark(self, graph: fx.GraphModule) -> None:
        """Write the modules' names into the nodes."""
        marks = iter([*self._marks, (len(graph.graph.nodes) + 1, "")])
        after, path = next(marks)
        here = self._stack[0]
        for number, node in enumerate(graph.graph.nodes):
            while number >= after:
                here = path
                after, path = next(marks)
            node.meta["module"] = here
