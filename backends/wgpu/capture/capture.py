"""Trace a task's step, or a model's forward, to graphs of core operators.

The step (forward, loss, backward) becomes one outer graph in which forward and backward of each
call of a repeated layer are one node each. Each kind of call becomes a separate graph with forward
and backward. Tensors are fake, so no values are computed; shapes are static.
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

from backends.losses.coupled_loss import copy_for_in_place_changes
from backends.wgpu.capture.added_rows import compute_added_rows_separately
from backends.wgpu.capture.attention import AttentionPolicy, never_fuses
from backends.wgpu.capture.draws import refuse_foreign_draws, refuse_undeclared_draws
from backends.wgpu.capture.half_products import half_products
from backends.wgpu.capture.layer_call import (
    LayerCall,
    TensorSpec,
    close_layers,
    refuse_changed_call,
)
from backends.wgpu.capture.model_attention import can_trace_sdpa, replace_attention
from backends.wgpu.capture.rewrites import Rewrites
from backends.wgpu.capture.substitution import named_tensors, substitute_tensors
from backends.wgpu.graph.decompositions import decompositions
from backends.wgpu.graph.passes import silence_torch_log
from protocol.base.errors import SamestepError, user_location

Arrays = Mapping[str, torch.Tensor]

SCALE: Final = "the loss's scale"
"""Name of the array with the loss scale and its reciprocal, in float16 steps."""
_SEEDS: Final = 4_096
"""Number of seeds in a trace: more than any model's random calls. Only the used seeds are
uploaded."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of layer call.

    Attributes:
        path: Name of the first layer of this kind.
        graph: Placeholders: inputs, then the gradients of the outputs that have one. Outputs:
            results, then a gradient (or None) for each differentiable input.
        results: Number of outputs that are results.
        checkpoint: Whether backward recomputes forward.
    """

    path: str
    graph: fx.GraphModule
    results: int
    checkpoint: bool


@dataclass(frozen=True, slots=True)
class ModelResult:
    """Outputs of a call of the whole module, flat, and their structure."""

    tensors: tuple[TensorSpec, ...]
    structure: pytree.TreeSpec


@dataclass(slots=True)
class Capture:
    """A traced step or forward.

    Attributes:
        graph: Placeholders: the module's tensors, the seeds, the arrays.
        tensors: Names of the module's tensors in placeholder order; a tied tensor once.
        arrays: Names or numbers of the arrays.
        kinds: The kind of each layer call, by call number.
        calls: The layer calls.
        seeds: Number of seeds; each has shape (2,).
        outputs: Shape and dtype of the graph's outputs.
        results: For a forward, the structure of the module's outputs.
        model_results: For a step, the outputs of each call of the module by the loss; None for a
            call with outputs that are not tensors.
        fields: Number of embeddings, the last outputs, which are computed before everything else.
    """

    graph: fx.GraphModule
    tensors: tuple[str, ...]
    arrays: tuple[str, ...]
    kinds: list[Kind]
    calls: list[LayerCall] = field(default_factory=list)
    seeds: int = 1
    outputs: tuple[TensorSpec | None, ...] = ()
    results: pytree.TreeSpec | None = None
    model_results: tuple[ModelResult | None, ...] = ()
    fields: int = 0


def capture_step(
    module: nn.Module,
    loss: Callable[[Any, Arrays], torch.Tensor],
    trained_names: Sequence[str],
    arrays: Arrays,
    fuses: AttentionPolicy = never_fuses,
    *,
    closes_layers: bool = True,
    is_float16: bool = False,
    fields: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Capture:
    """Trace loss and gradients of a training step.

    Args:
        module: The module on the host; it is not changed.
        loss: Returns the summed loss.
        trained_names: Names of the trainable tensors.
        arrays: Arrays with the shapes and dtypes to trace; their values are not used.
        fuses: Which attention becomes one operator.
        closes_layers: Whether a call of a repeated layer becomes one node.
        is_float16: Whether products are computed in float16. This adds the array `SCALE`: the
            factors of the loss before backward, and of gradients afterwards.
        fields: Returns the embeddings that the loss has computed, if any.

    Returns:
        Outputs: the loss, the gradient or None of each of `trained_names`, and the fields.

    Raises:
        SamestepError: The step depends on values, or cannot be traced.
    """

    def step(inputs: Arrays, tensors_by_name: Arrays) -> list[torch.Tensor | None]:
        scale = inputs.get(SCALE)
        loss_sum = loss(module, {name: x for name, x in inputs.items() if name != SCALE})
        loss_sum = loss_sum.float() if is_float16 else loss_sum
        if loss_sum.dim():
            raise SamestepError(
                f"expected a loss that is one sum, got shape {tuple(loss_sum.shape)}"
            )
        gradients = _gradients(loss_sum, [tensors_by_name[name] for name in trained_names], scale)
        embeddings = [embedding.detach() for embedding in fields()]
        field_counts[:] = [len(embeddings)]
        return [loss_sum.detach(), *gradients, *embeddings]

    field_counts = [0]
    results: list[ModelResult | None] = []

    def record_result(_module: nn.Module, _args: Any, output: Any) -> None:
        results.append(_model_result(output))

    with (
        trace_modes(module, train=True, fuses=fuses) as checkpoint,
        half_products(enabled=is_float16),
        module.register_forward_hook(record_result),
    ):
        trace = _Trace(module, frozenset(trained_names), checkpoint, fuses, closes_layers)
        scale_array = {SCALE: torch.ones(2)} if is_float16 else {}
        capture = trace.capture(step, {**arrays, **scale_array})
    capture.model_results, (capture.fields,) = tuple(results), field_counts
    return capture


def _model_result(output: Any) -> ModelResult | None:
    flat, structure = pytree.tree_flatten(output)
    if not all(isinstance(item, torch.Tensor) for item in flat):
        return None
    return ModelResult(tuple(map(TensorSpec.of, flat)), structure)


def capture_coupled(
    module: nn.Module,
    losses: Callable[[Any, Arrays], torch.Tensor],
    trained_names: Sequence[str],
    arrays: Arrays,
    fuses: AttentionPolicy = never_fuses,
) -> Capture:
    """Trace a loss over all samples of a step, and its gradients.

    Args:
        module: The module on the host; it is not changed.
        losses: Returns the loss of each sample, (samples,), for the module and the arrays.
        trained_names: Names of the trainable tensors.
        arrays: Arrays with the shapes and dtypes to trace; float32 arrays get gradients.
        fuses: Which attention becomes one operator.

    Returns:
        Outputs: the losses; then for each name of `trained_names`, and for each float32 array, the
        gradient of the sum of the losses, or None.
    """
    embeddings = [name for name, array in arrays.items() if array.is_floating_point()]

    def step(inputs: Arrays, tensors_by_name: Arrays) -> list[torch.Tensor | None]:
        sample_losses = losses(module, copy_for_in_place_changes(inputs))
        targets = [
            *(tensors_by_name[name] for name in trained_names),
            *(inputs[name] for name in embeddings),
        ]
        return [sample_losses.detach(), *_gradients(sample_losses.float().sum(), targets, None)]

    with trace_modes(module, train=True, fuses=fuses) as checkpoint:
        trace = _Trace(module, frozenset(trained_names), checkpoint, fuses)
        return trace.capture(step, arrays, frozenset(embeddings))


def _gradients(
    value: torch.Tensor, targets: Sequence[torch.Tensor], scale: torch.Tensor | None
) -> Sequence[torch.Tensor | None]:
    if not value.requires_grad:
        return [None] * len(targets)
    if scale is None:
        return torch.autograd.grad(value, targets, allow_unused=True)
    gradients: Any = torch.autograd.grad(value, targets, scale[0], allow_unused=True)
    return [None if grad is None else grad * scale[1] for grad in gradients]


def capture_forward(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fuses: AttentionPolicy = never_fuses,
    *,
    is_float16: bool = False,
) -> Capture:
    """Trace a call of the module in evaluation mode; outputs are the result's tensors, flat.

    Raises:
        SamestepError: As in `capture_step`, or a result is not a tensor.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    arrays = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    structures: list[pytree.TreeSpec] = []

    def forward(inputs: Arrays, tensors_by_name: Arrays) -> list[torch.Tensor | None]:
        del tensors_by_name
        flat = [inputs.get(str(i), leaf) for i, leaf in enumerate(leaves)]
        arguments, keywords = pytree.tree_unflatten(flat, structure)
        with torch.no_grad():
            results, spec = pytree.tree_flatten(module(*arguments, **keywords))
        structures.append(spec)
        return pytree.tree_map(_to_float32, results) if is_float16 else results

    with trace_modes(module, train=False, fuses=fuses), half_products(enabled=is_float16):
        trace = _Trace(module, frozenset(), checkpoint=False, fuses=fuses)
        capture = trace.capture(forward, arrays)
    capture.results = structures[-1]
    return capture


@contextmanager
def trace_modes(
    module: nn.Module, *, train: bool, fuses: AttentionPolicy = never_fuses
) -> Iterator[bool]:
    """Set the module's modes for a trace and restore them; yield whether backward recomputes
    layers.

    A model whose attention implementation is not torch's function uses its eager implementation,
    which consists of core operators.
    """
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    checkpointed_modules = [
        submodule
        for submodule in module.modules()
        if getattr(submodule, "gradient_checkpointing", False)
    ]
    configs = {
        id(c): c for submodule in module.modules() if (c := getattr(submodule, "config", None))
    }
    attention = [
        (config, config._attn_implementation)  # noqa: SLF001
        for config in configs.values()
        if getattr(config, "_attn_implementation", None) is not None
    ]
    try:
        module.train(train)
        for submodule in checkpointed_modules:
            submodule.gradient_checkpointing = False  # type: ignore[assignment]
        for config, implementation in attention:
            if implementation != "sdpa" or not can_trace_sdpa():
                config._attn_implementation = "eager"  # noqa: SLF001
        with (
            replace_attention(module, fuses),
            compute_added_rows_separately(module),
            refuse_foreign_draws(),
            _without_onednn(),
        ):
            yield bool(checkpointed_modules)
    finally:
        for config, implementation in attention:
            config._attn_implementation = implementation  # noqa: SLF001
        for submodule in checkpointed_modules:
            submodule.gradient_checkpointing = True  # type: ignore[assignment]
        for submodule, mode in modes:
            submodule.training = mode


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Disable oneDNN, so that recurrent layers become plain products."""
    enabled = torch._C._get_mkldnn_enabled()  # noqa: SLF001
    torch._C._set_mkldnn_enabled(False)  # noqa: SLF001
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace's options."""

    module: nn.Module
    trained_names: frozenset[str]
    checkpoint: bool
    fuses: AttentionPolicy
    closes_layers: bool = True

    def capture(
        self,
        function: Callable[[Arrays, Arrays], list[torch.Tensor | None]],
        arrays: Arrays,
        differentiable: frozenset[str] = frozenset(),
    ) -> Capture:
        """Trace a function of (arrays, the module's tensors by name).

        Args:
            function: Returns the outputs.
            arrays: Example arrays.
            differentiable: Names of the arrays whose gradients are outputs.
        """
        tensors_by_name = named_tensors(self.module)
        first_names: dict[int, str] = {}
        for name, tensor in tensors_by_name.items():
            first_names.setdefault(id(tensor), name)
        names = tuple(first_names.values())
        calls: list[LayerCall] = []
        used_seeds = [0]  # seed 0 is for draws outside closed layers

        def run_traced(tensors: list[torch.Tensor], seeds: torch.Tensor, inputs: list[Any]) -> Any:
            def next_seed() -> torch.Tensor:
                used_seeds.append(len(used_seeds))
                return seeds[used_seeds[-1]]

            by_name = dict(zip(names, tensors, strict=True))
            tensors_under_all_names = {
                name: by_name[first_names[id(tensor)]] for name, tensor in tensors_by_name.items()
            }
            with ExitStack() as stack:
                stack.enter_context(substitute_tensors(self.module, tensors_under_all_names))
                closed = close_layers(
                    self.module, next_seed, checkpoint=self.checkpoint, fuses=self.fuses
                )
                layer_calls = stack.enter_context(closed) if self.closes_layers else []
                stack.enter_context(Rewrites(seeds[0], self.fuses))
                results = function(dict(zip(arrays, inputs, strict=True)), tensors_under_all_names)
                calls.extend(layer_calls)
                return results

        with FakeTensorMode(allow_non_fake_inputs=True):
            tensors = [
                _fake(tensors_by_name[name], requires_grad=name in self.trained_names)
                for name in names
            ]
            seeds = torch.empty((_SEEDS, 2), dtype=torch.int32)
            inputs = [
                _fake(array, requires_grad=n in differentiable) for n, array in arrays.items()
            ]
            graph = _trace(run_traced, (tensors, seeds, inputs), self.module, "")
            kinds = _capture_kinds(calls)
        _copy_changed_arrays(graph, len(inputs))
        (output_node,) = (node for node in graph.graph.nodes if node.op == "output")
        outputs = tuple(
            None if n is None else TensorSpec.of(n.meta["val"]) for n in output_node.args[0]
        )
        return Capture(graph, names, tuple(arrays), kinds, calls, len(used_seeds), outputs)


def _copy_changed_arrays(graph: fx.GraphModule, arrays: int) -> None:
    """Insert copies of inputs that the loss changes in place."""
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    batch = inputs[len(inputs) - arrays :]
    written_sources = {_view_source(node.args[0]) for node in nodes if _is_in_place(node)}
    for placeholder in batch:
        if placeholder in written_sources:
            with graph.graph.inserting_before(placeholder.next):
                copy = graph.graph.call_function(torch.ops.aten.clone.default, (placeholder,))
            copy.meta = dict(placeholder.meta)
            placeholder.replace_all_uses_with(copy)
            copy.args = (placeholder,)


def _is_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _view_source(node: Any) -> Any:
    """Return the source of a view, or the node itself."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.args:
        node = node.args[0]
    return node


def _to_float32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype == torch.float16
    return value.float() if is_half else value


def _fake(tensor: torch.Tensor, *, requires_grad: bool = False) -> torch.Tensor:
    """Return a fake tensor; half-precision tensors become float32, since only their storage is
    16-bit."""
    with torch.no_grad():
        dtype = torch.float32 if tensor.dtype in {torch.float16, torch.bfloat16} else tensor.dtype
        tensor_: torch.Tensor = torch.empty(tensor.shape, dtype=dtype)
    return tensor_.requires_grad_(requires_grad)


def _capture_kinds(calls: Sequence[LayerCall]) -> list[Kind]:
    kinds: dict[Any, Kind] = {}
    for call in calls:
        if call.kind not in kinds:
            kinds[call.kind] = _capture_kind(call)
    return [kinds[call.kind] for call in calls]


def _capture_kind(call: LayerCall) -> Kind:
    refuse_changed_call(call)
    output_numbers = [
        number for number, has_grad in enumerate(call.outputs_with_grad or ()) if has_grad
    ]
    inputs = [spec.fake() for spec in call.inputs]
    grad_outputs = [
        TensorSpec(call.outputs[i].shape, call.outputs[i].dtype).fake() for i in output_numbers
    ]

    def forward_and_backward(
        inputs: list[torch.Tensor], grad_outputs: list[torch.Tensor]
    ) -> list[Any]:
        results, _ = call.run(inputs)
        if call.outputs_with_grad is None:
            return [result.detach() for result in results]
        targets = [x for x, spec in zip(inputs, call.inputs, strict=True) if spec.is_differentiable]
        outputs = [results[number] for number in output_numbers]
        grads = torch.autograd.grad(outputs, targets, grad_outputs, allow_unused=True)
        return [*(result.detach() for result in results), *grads]

    graph = _trace(forward_and_backward, (inputs, grad_outputs), call.layer, call.path)
    return Kind(call.path, graph, len(call.outputs), call.checkpoint)


def _trace(
    function: Callable[..., Any], arguments: tuple[Any, ...], module: nn.Module, prefix: str
) -> fx.GraphModule:
    """Trace to core operators without in-place changes; `meta["module"]` names each node's
    module."""
    modules = _NodeModules(module, prefix)
    try:
        with modules, silence_torch_log():
            graph = make_fx(
                function,
                decomposition_table=decompositions(),
                tracing_mode="real",
                _allow_non_fake_inputs=True,
            )(*arguments)
    except SamestepError:
        raise
    except Exception as error:
        raise _capture_error(modules.current or "the step", error) from error
    modules.annotate(graph)
    refuse_undeclared_draws(graph)
    return graph


_CAUSES: Final = (
    ("aten._local_scalar_dense", "it reads a tensor's value, as .item(), float(x) or `if x` does"),
    (".numpy() is not supported", "it converts a tensor to NumPy"),
    ("aten._pack_padded_sequence", "it packs sequences; pad them instead"),
    ("DynamicOutputShape", "a shape depends on a tensor's values, as x[x > 0] and nonzero() do"),
    ("use_reentrant=True", "it uses reentrant checkpoints; set use_reentrant=False"),
)
"""For a part of torch's message, the explanation to show."""


def _capture_error(location: str, error: Exception) -> SamestepError:
    description = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    cause = next((explanation for pattern, explanation in _CAUSES if pattern in description), "")
    reason = (
        f"{cause} ({description.split(';', maxsplit=1)[0][:80].rstrip('. ')})"
        if cause
        else description
    )
    suffix = "" if cause else "; a step must not depend on the values of tensors"
    return SamestepError(
        f"the vulkan backend cannot capture {location}{user_location(error)}: "
        f"{reason.rstrip('.')}{suffix}; use a cpu or cuda worker for this model"
    )


class _NodeModules:
    """Context that records the module of each traced operator."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        dot = "." if prefix else ""
        self._names = {
            id(submodule): f"{prefix}{dot if name else ''}{name}"
            for name, submodule in module.named_modules()
        }
        self._stack: list[str] = [prefix]
        self._positions: list[tuple[int, str]] = []
        self._hooks: list[Any] = []

    @property
    def current(self) -> str:
        """The module whose forward is running."""
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
        self._record_position()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs, output
        if len(self._stack) > 1:
            self._stack.pop()
        self._record_position()

    def _record_position(self) -> None:
        mode = get_proxy_mode()
        if mode is not None:
            nodes = mode.tracer.graph.nodes
            self._positions.append((len(nodes), self._stack[-1]))

    def annotate(self, graph: fx.GraphModule) -> None:
        """Store the modules' names in the nodes."""
        positions = iter([*self._positions, (len(graph.graph.nodes) + 1, "")])
        boundary, path = next(positions)
        module = self._stack[0]
        for number, node in enumerate(graph.graph.nodes):
            while number >= boundary:
                module = path
                boundary, path = next(positions)
            node.meta["module"] = module
