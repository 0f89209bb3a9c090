"""Models that transformers has sharded when it loaded them: their layout is compared with the strategy's, which trains them as they are.

``from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=8))`` shards with ``fully_shard`` and with ``DTensor`` objects, as
:class:`engine.FSDP` and :class:`engine.MeshParallel` do, on a mesh of its own. Nothing of transformers is imported here.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.distributed.group import Group
from engine.step.precision import Precision
from engine.strategies.base import class_name
from engine.utils import torch_private
from engine.utils.parameters import is_sharded, mesh_axes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SINCE = "5.20"
"""The first version of transformers whose models say that they were sharded when they were loaded."""
_KEPT_SETTINGS = (
    *("pp", "dp_replicate", "dp_shard", "cp", "tp", "reduce_each_micro_batch"),
    *("schedule", "num_microbatches", "split"),
)
"""Settings of strategies that do not say how to shard a model."""
_DATA_AXES = ("dp_replicate", "dp_shard")
_REDUCED_LATER = "replicated_with_grad_allreduce"
"""The style of norms between layers that tensor parallelism cuts: each rank has the gradient of its own heads."""


def adopted_shards(
    model: nn.Module,
    group: Group,
    who: str,
    sizes: Mapping[str, int],
    precision: Precision,
    settings: Mapping[str, object],
) -> AdoptedShards | None:
    """Find out how transformers has sharded a model, and check that the strategy would train it so. ``None`` for a model with whole parameters.

    Args:
        who: the strategy's class, for errors.
        sizes: the axes of its mesh.
        settings: its settings that are not the defaults.

    Raises:
        ValueError: somebody else has sharded it, or the strategy, its sizes, settings or precision contradict what transformers was asked for.
    """
    loaded = _loaded_in_shards(model)
    shards = {name: p for name, p in model.named_parameters() if is_sharded(p)}
    if not loaded and not shards:
        return None
    inside = {id(p) for part in loaded.values() for p in part.parameters()}
    strangers = [name for name, p in shards.items() if id(p) not in inside]
    if strangers:
        raise ValueError(
            f"{class_name(model)} is sharded in part, but not as a whole ({', '.join(strangers[:3])}): give the module that was prepared before, or "
            f"a new one with whole parameters, which {who} shards. Calls of fully_shard and parallelize_module belong to the strategy: "
            "FSDP(blocks=...) names blocks, MeshParallel(plan=...) styles"
        )
    if not shards:  # transformers has made a mesh, but its plan names no layer of the model
        raise ValueError(
            f"{_call(next(iter(loaded.values())).config)} has sharded no parameter of {class_name(model)}: load it without, and {who} shards it"
        )
    for name, part in loaded.items():
        if "_is_adopted" in vars(part):
            raise ValueError(
                f"{name or class_name(model)} was prepared before, as a part of another module: give that module, or load the model again"
            )
        _check_request(part.config, f"{name}." if name else "", who, sizes, precision, settings)
    for name, parameter in shards.items():
        _check_layout(name, parameter, group, sizes)
    _check_layers(model, loaded.values(), sizes)
    return AdoptedShards(model, list(loaded.values()))


def check_whole(model: nn.Module, who: str) -> None:
    """Check that transformers has not sharded the model, for strategies that take whole ones only.

    Raises:
        ValueError: it has.
    """
    for part in _loaded_in_shards(model).values():
        raise ValueError(
            f"{who} was asked to train {class_name(model)}, which {_call(part.config)} has sharded, and {who} needs whole parameters: use "
            f"{_strategy_for(_sizes(part.config))}, or load the model without distributed_config"
        )


@contextmanager
def saved_as_whole(model: nn.Module) -> Iterator[None]:
    """Let ``save_pretrained`` on one rank write the parameters as they are in the block, where they are whole; it would wait for other ranks."""
    configs = {id(part.config): part.config for part in _loaded_in_shards(model).values()}
    requests = {key: config.distributed_config for key, config in configs.items()}
    for config in configs.values():
        config.distributed_config = None
    try:
        yield
    finally:
        for key, config in configs.items():
            config.distributed_config = requests[key]


class AdoptedShards:
    """The part of a model that stays as transformers has sharded it.

    Args:
        model: what the strategy prepares.
        loaded: transformers' models in it.
    """

    def __init__(self, model: nn.Module, loaded: list[nn.Module]) -> None:
        self._modules = {id(m) for part in loaded for m in part.modules()}
        managed = torch_private.fsdp_modules(model)
        self.mesh: DeviceMesh | None = torch_private.fsdp_mesh(managed) if managed else None
        """The mesh over which ``fully_shard`` has sharded the model; ``None`` if only tensor parallelism has."""
        inside = {p: None for m in managed for p in m.parameters() if not is_sharded(p)}
        self.whole: set[nn.Parameter] = set(inside)
        """Parameters in sharded blocks that came later and are whole, such as an adapter's; ``fully_shard`` cannot take them into a block again."""
        torch_private.begin_fsdp_again(model)
        for part in loaded:
            part._is_adopted = True  # type: ignore[assignment]
            if not managed:
                _reduce_each_pass(part)

    def contains(self, module: nn.Module) -> bool:
        """Whether a module is one that transformers has loaded, or has one in it."""
        return any(id(m) in self._modules for m in module.modules())


# -- what transformers was asked for ----------------------------------------------------------------------------------------------------


def _loaded_in_shards(model: nn.Module) -> dict[str, Any]:
    """The models that transformers has sharded when it loaded them, by name.

    Raises:
        ValueError: the installed version shards in another way.
    """
    loaded: dict[str, Any] = {}
    for name, module in model.named_modules():
        if vars(module).get("_mesh_manager") is not None:
            loaded[name] = module
        elif (vars(module).get("_tp_size") or 1) > 1 or vars(module).get("_device_mesh") is not None:
            library = _library(module)
            version = getattr(sys.modules.get(library), "__version__", "of this installation")
            raise ValueError(
                f"{type(module).__name__} was sharded by {library} {version} when it was loaded, in a way that is not known here: upgrade to "
                f"{library} {_SINCE} or later, or load the model without tp_plan and distributed_config and let strategy='fsdp' or 'tp' shard it"
            )
    return loaded


def _library(model: nn.Module) -> str:
    """The package whose ``from_pretrained`` has loaded the model."""
    return next(base.__module__.partition(".")[0] for base in type(model).__mro__ if "from_pretrained" in vars(base))


def _sizes(config: Any) -> dict[str, int]:
    """The numbers of ranks that transformers was asked for, by the strategy's names of axes."""
    request = config.distributed_config
    return {"pp": request.pp_size, "dp_replicate": request.dp_replicate_size, "dp_shard": request.fsdp_size, "tp": request.tp_size}  # fmt: skip


def _call(config: Any) -> str:
    """The call that has sharded the model."""
    request = config.distributed_config
    sizes = {
        "fsdp_size": request.fsdp_size,
        "dp_replicate_size": request.dp_replicate_size,
        "tp_size": request.tp_size,
        "pp_size": request.pp_size,
        "ep_size": request.ep_size,
    }
    return f"DistributedConfig({', '.join(f'{name}={size}' for name, size in sizes.items() if size > 1)})"


def _listed(sizes: Mapping[str, int]) -> str:
    """The axes with several ranks."""
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one rank"


def _strategy_for(sizes: Mapping[str, int]) -> str:
    """The strategy that trains a model with these sizes."""
    axes = [name for name, size in sizes.items() if size > 1]
    if axes == ["dp_shard"]:
        return "strategy='fsdp'"
    if axes == ["tp"]:
        return "strategy='tp'"
    who = "MeshParallel" if "tp" in axes else "FSDP"
    return f"{who}({', '.join(f'{name}={sizes[name]}' for name in ('dp_replicate', 'dp_shard', 'tp') if name in axes)})"


def _check_request(
    config: Any,
    prefix: str,
    who: str,
    sizes: Mapping[str, int],
    precision: Precision,
    settings: Mapping[str, object],
) -> None:
    """Compare what transformers was asked for with the strategy."""
    request, call = config.distributed_config, _call(config)
    subject = f"{prefix.removesuffix('.') or 'the model'}, which {call} has sharded"
    if request.pp_size > 1 or request.ep_size > 1:
        kind = "its pipeline" if request.pp_size > 1 else "its experts"
        raise ValueError(
            f"{who} cannot train {subject}: it divides {kind} among the ranks in a way of its own. Load it with fsdp_size or "
            "tp_size, or without distributed_config"
        )
    layout = _sizes(config)
    if any(sizes.get(axis, 1) != layout.get(axis, 1) for axis in {*sizes, *layout}):
        raise ValueError(
            f"{who} was asked for {_listed(sizes)}, but {subject}, has {_listed(layout)}: use {_strategy_for(layout)}, or load the model without "
            "distributed_config"
        )
    if request.fsdp_cpu_offload:
        raise ValueError(
            f"{who} cannot train {subject} with fsdp_cpu_offload=True: load it without distributed_config and use FSDP(cpu_offload=True)"
        )
    contradicting = [name for name in settings if name not in _KEPT_SETTINGS]
    if contradicting:
        name = contradicting[0]
        raise ValueError(
            f"{who}({name}={settings[name]!r}) says how to shard {subject}, already: leave {name} out, or load the model without distributed_config"
        )
    _check_precision(request, subject, precision)


def _check_precision(request: Any, subject: str, precision: Precision) -> None:
    """Compare the dtypes in which transformers gathers and reduces with the precision."""
    if precision.fp8 is not None:
        raise ValueError(
            f"precision={precision.name!r} with {subject}: its layers cannot be replaced by fp8 layers any more; load it without distributed_config"
        )
    if request.fsdp_size * request.dp_replicate_size == 1:
        return
    gathered = torch.bfloat16 if request.fsdp_mixed_precision else None
    if gathered == precision.autocast:
        return
    dtype = (
        "gathers parameters in bf16 (fsdp_mixed_precision=True)"
        if gathered
        else "gathers parameters in their own dtype"
    )
    if gathered is not None:
        advice = "use precision='bf16-mixed', or leave fsdp_mixed_precision out"
    elif precision.autocast == torch.bfloat16:
        advice = "load it with DistributedConfig(..., fsdp_mixed_precision=True)"
    else:
        advice = "use precision='bf16-mixed' and fsdp_mixed_precision=True, or load it without distributed_config"
    raise ValueError(f"precision={precision.name!r} was asked for, but {subject}, {dtype}: {advice}")


def _check_layout(name: str, parameter: Any, group: Group, sizes: Mapping[str, int]) -> None:
    """Check that a parameter lies on the ranks that the strategy's mesh would give it, in pieces that checkpoints can describe."""
    mesh, placements = parameter.device_mesh, parameter.placements
    axes = mesh_axes(parameter)
    if mesh.device_type != group.device.type:
        raise ValueError(
            f"{name} was loaded on {mesh.device_type!r}, but the training runs on {group.device.type!r}: choose another accelerator, or load the "
            "model without distributed_config"
        )
    ranks = {axis: size for axis, size in sizes.items() if size > 1 or axis in axes}
    if set(axes) <= set(ranks):
        grid = torch.arange(group.world_size).reshape(tuple(ranks.values()))
        position = (grid == group.rank).nonzero()[0]
        for dim, axis in reversed(list(enumerate(ranks))):
            if axis not in axes:
                grid = grid.select(dim, int(position[dim]))
        if torch.equal(grid, mesh.mesh):
            _check_pieces(name, parameter, mesh, placements)
            return
    raise ValueError(
        f"{name} lies on the ranks {mesh.mesh.tolist()} of a mesh with the axes {', '.join(axes)}, which are not those of the strategy "
        f"({', '.join(f'{axis}={size}' for axis, size in sizes.items())} on {group.world_size} ranks): load the model with a DistributedConfig of "
        "this job, or without one"
    )


def _check_pieces(name: str, parameter: Any, mesh: Any, placements: Any) -> None:
    """Check that each rank has one piece of a parameter, and not interleaved ones."""
    for axis, placement in enumerate(placements):
        if torch_private.is_strided_shard(placement):
            later = [
                mesh.size(i)
                for i, other in enumerate(placements)
                if i > axis and getattr(other, "dim", None) == placement.dim
            ]
            if placement.split_factor == math.prod(later):
                continue
        elif placement.is_shard() or placement.is_replicate():
            continue
        raise ValueError(
            f"{name} {list(parameter.shape)} is {placement} along {mesh_axes(parameter)[axis]}: each rank has several pieces of it (a style "
            "for layers that are packed in one matrix), which a checkpoint cannot describe. Use fsdp_size, or load the model without "
            "distributed_config"
        )


def _check_layers(model: nn.Module, loaded: Iterable[nn.Module], sizes: Mapping[str, int]) -> None:
    """Check that tensor parallelism knows the sizes of the layers it has cut, and that with ``fully_shard`` around it each weight is in one block."""
    cut_twice = sizes.get("tp", 1) > 1 and any(sizes.get(name, 1) > 1 for name in _DATA_AXES)
    if cut_twice and (styled := next((m for part in loaded for m in _styled(part, _REDUCED_LATER)), None)) is not None:
        raise ValueError(
            f"{class_name(model)} has {type(styled).__name__} layers that compute with the heads of one rank, and a model that "
            "was loaded with fsdp_size and tp_size adds their gradients several times in a window: use one of the two, or load the model without "
            "distributed_config and use FSDP"
        )
    names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not is_sharded(parameter):
                continue
            name = f"{prefix}.{key}" if prefix else key
            axes = mesh_axes(parameter)
            if cut_twice and set(axes) == {"tp"}:
                raise ValueError(
                    f"{name} was added to a model after it had been loaded with fsdp_size and tp_size, and no rank would average its "
                    "gradient: add adapters to models with fsdp_size or tp_size alone, or load the model without distributed_config"
                )
            if cut_twice and id(parameter) in names:
                raise ValueError(
                    f"{name} and {names[id(parameter)]} share a parameter, which a model that was loaded with fsdp_size and tp_size does "
                    "not train exactly: use one of the two, or load the model without distributed_config and use MeshParallel"
                )
            names[id(parameter)] = name
            shape = list(parameter.shape)
            if isinstance(module, nn.Linear) and key == "weight" and shape[1:] != [module.in_features]:
                raise ValueError(
                    f"{name} has the shape {shape}, but its layer takes {module.in_features} inputs: this adapter "
                    "does not fit layers whose inputs tensor parallelism divides (o_proj, down_proj). Target others (q_proj, k_proj, v_proj, "
                    "gate_proj, up_proj), use fsdp_size, or load the model without distributed_config"
                )


# -- gradients that ranks have in part -------------------------------------------------------------------------------------------------


def _reduce_each_pass(model: Any) -> None:
    """Let each backward pass sum, over the ranks of ``tp``, its own part of gradients that each rank has for its own heads.

    transformers sums the gradient that is accumulated so far, and so counts a window's first micro-batches several times.
    """
    for module in _styled(model, _REDUCED_LATER):
        vars(module).pop("forward", None)  # all that transformers' forward does is to register the hook
        tp = model._mesh_manager.get_mesh("tp").get_group()
        for parameter in module.parameters(recurse=False):
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True).register_hook(partial(_summed, tp))
            parameter.requires_grad_(is_trained)  # a frozen one may be trained later


def _styled(model: Any, style: str) -> Iterator[nn.Module]:
    """The modules to which transformers' plan gives a style."""
    plan = model.tp_plan or {}
    for name, module in model.named_modules():
        if plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) == style:
            yield module


def _summed(ranks: dist.ProcessGroup, gradient: Tensor) -> Tensor:
    """The sum of a gradient over the ranks."""
    total = gradient.clone()
    dist.all_reduce(total, group=ranks)
    return total
