"""Tensor parallelism: the plan, which says what modules are sharded over the ranks of an axis and how, and its application."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from engine.strategies import quantized_weights
from engine.strategies.base import class_name
from engine.strategies.parameter_replacements import ParameterReplacements
from engine.transforms.blocks import user_module
from engine.utils.errors import nearest

Plan = Mapping[str, ParallelStyle | str]

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
}
"""Styles by their names in the plans of Hugging Face models."""


def plan_for(model: nn.Module, strategy_plan: Plan | None, mesh: DeviceMesh, sequence_parallel: bool) -> Plan | None:
    """The strategy's plan, else the one that the model's ``parallelize(mesh)`` returns, else a Hugging Face model's own.

    Returns:
        Styles by name of the module; ``None`` if ``parallelize`` has sharded the model itself.

    Raises:
        ValueError: there is no plan, or sequence parallel was requested and the plan has no style for it.
    """
    plan, source = strategy_plan, "MeshParallel(plan=...)"
    if plan is None:
        owner = user_module(model)
        if callable(getattr(type(owner), "parallelize", None)):
            source = f"{type(owner).__name__}.parallelize"
            plan = _call_parallelize(owner, mesh, sequence_parallel)
            if plan is None:
                return None
        else:
            plan, source = _tp_plan_of(model), "the model's own plan"
    if not isinstance(plan, Mapping) or not plan:
        raise ValueError(
            f"tensor parallel needs a plan for {class_name(model)}: give MeshParallel(plan={{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}}) "
            f"or define parallelize(self, mesh) that returns one (got {plan!r:.80})"
        )
    if sequence_parallel and not any(
        isinstance(s, SequenceParallel) or s == "sequence_parallel" for s in plan.values()
    ):
        raise ValueError(
            f"sequence_parallel=True, but {source} has no SequenceParallel style: give one to each norm and dropout between the blocks"
        )
    return plan


def _call_parallelize(owner: Any, mesh: DeviceMesh, sequence_parallel: bool) -> Any:
    parallelize = owner.parallelize
    if "sequence_parallel" in inspect.signature(parallelize).parameters:
        return parallelize(mesh, sequence_parallel=sequence_parallel)
    return parallelize(mesh)


def _tp_plan_of(model: nn.Module) -> Plan | None:
    """The plan of a Hugging Face model anywhere in ``model``, with names relative to ``model``."""
    for prefix, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            return {f"{prefix}.{name}" if prefix else name: style for name, style in plan.items()}
    return None


def fitting(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module, ParallelStyle]]:
    """The modules that a plan shards, in the model's order, each with its name and style; the last entry that matches a name applies.

    Raises:
        ValueError: an entry matches no module, has an unknown style, or matches quantized weights.
    """
    # In Fit's wrapper the user's module has the name "module".
    named = [(name.removeprefix("module."), m) for name, m in model.named_modules() if m is not model]
    chosen: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        matches = [name for name, _ in named if fnmatchcase(name, pattern.removeprefix("module."))]
        if not matches:
            names = [name for name, _ in named]
            raise ValueError(
                f"the tensor parallel plan has {pattern!r}, but {class_name(model)} has no such module{nearest(pattern, names)}; "
                f"there are {', '.join(names[:8])}, ..."
            )
        chosen.update(dict.fromkeys(matches, _style(pattern, style)))
    modules = [(name, m, chosen[name]) for name, m in named if name in chosen]
    for name, module, _ in modules:
        quantized_weights.check_not_cut(name, module)
    return modules


def _style(pattern: str, style: ParallelStyle | str) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in _STYLES:
        raise ValueError(
            f"the tensor parallel plan gives {pattern!r} the style {style!r}, which is unknown{nearest(str(style), _STYLES)}; "
            f"possible: {', '.join(_STYLES)}, or a style of torch.distributed.tensor.parallel"
        )
    return _STYLES[style]()


def shard(model: nn.Module, plan: Plan, mesh: DeviceMesh, replacements: ParameterReplacements) -> None:
    """Shard the modules of ``plan`` over ``mesh`` (one axis), in place; skip modules whose parameters only other ranks have.

    Raises:
        ValueError: the plan does not fit (see :func:`fitting`), or modules that share a parameter are sharded in different ways.
    """
    for name, module, style in fitting(model, plan):
        _check_even(name, module, style, mesh.size())
        if not any(map(replacements.is_elsewhere, module.parameters())):
            replacements.materialise(module)
            previous = dict(module.named_parameters(remove_duplicate=False))
            _shard_module(model, name, module, style, mesh)
            replacements.record(module, previous)
    _check_tied(model, plan)


def shard_copy(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Shard a copy of a model whose tensors have no values, in the way in which :func:`shard` shards the model."""
    for name, module, style in fitting(model, plan):
        _check_even(name, module, style, mesh.size())
        _shard_module(model, name, module, style, mesh)
    _check_tied(model, plan)


def _shard_module(model: nn.Module, name: str, module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    previous = dict(module.named_parameters(remove_duplicate=False))
    try:
        parallelize_module(module, mesh, style, src_data_rank=None)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"tensor parallel: {type(style).__name__} cannot shard {name!r} ({type(module).__name__}): {error}"
        ) from error
    _free_full_tensors(module)
    sharded = dict(module.named_parameters(remove_duplicate=False))
    replaced = {id(old): sharded[key] for key, old in previous.items() if sharded[key] is not old}
    for key, old in previous.items():
        sharded[key].requires_grad_(old.requires_grad)  # torch's styles set requires_grad on every parameter
    for inner in model.modules():  # tied parameters stay tied
        for key, parameter in inner._parameters.items():
            if parameter is not None and id(parameter) in replaced:
                inner._parameters[key] = replaced[id(parameter)]


def _free_full_tensors(module: nn.Module) -> None:
    """Copy shards that are views of full tensors, so that the full tensors are freed."""
    for inner in module.modules():
        for key, parameter in inner._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            local = parameter.detach().to_local()
            if local.untyped_storage().nbytes() > local.numel() * local.element_size():
                copied_shard = DTensor.from_local(
                    local.clone(),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                inner._parameters[key] = nn.Parameter(copied_shard, parameter.requires_grad)


def _check_even(name: str, module: nn.Module, style: ParallelStyle, ranks: int) -> None:
    """Check that a linear layer whose shard is exchanged as a plain tensor is sharded evenly, because torch then assumes equal shards."""
    if not isinstance(module, nn.Linear):
        return
    if (
        isinstance(style, ColwiseParallel)
        and style.use_local_output
        and all(p.is_shard() for p in style.output_layouts)
    ):
        size, side = module.out_features, "outputs"
    elif isinstance(style, RowwiseParallel) and all(p.is_shard() for p in style.input_layouts):
        size, side = module.in_features, "inputs"
    else:
        return
    if size % ranks:
        raise ValueError(
            f"tensor parallel: {name!r} has {size} {side}, not divisible by tp={ranks}: change the layer, tp, or the plan"
        )


def _check_tied(model: nn.Module, plan: Plan) -> None:
    """Check that modules which share a sharded parameter are all in the plan."""
    entries = fitting(model, plan)
    planned = {id(inner) for _, m, _ in entries for inner in m.modules()}
    for name, module in model.named_modules():
        if id(module) not in planned and any(hasattr(p, "placements") for p in module._parameters.values()):
            parameters = list(module._parameters.values())
            shared = next(n for n, m, _ in entries if any(p is q for p in m.parameters() for q in parameters))
            raise ValueError(
                f"tensor parallel: {name.removeprefix('module.')!r} shares a parameter with {shared!r}, which the plan shards: give it its "
                "own style ('embedding_rowwise' and 'colwise' shard an embedding and its output layer alike)"
            )
