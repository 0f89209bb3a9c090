"""Fully sharded data parallelism: every rank has a shard of each parameter, gradient and optimizer state, and gathers blocks to compute."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from engine.checkpoint.reader import Source, own_state
from engine.checkpoint.tensor_files import Stored
from engine.config.settings import Settings
from engine.distributed.collectives import all_reduce, gather_json
from engine.distributed.group import Group
from engine.optim import treatment
from engine.step.gradient_sync import StepStream
from engine.step.optimizers import is_of_torch
from engine.strategies import deferred_init, dtensors, quantized_weights, shard_errors, sharded_norms, sharded_states
from engine.strategies.adopted_shards import AdoptedShards, adopted_shards
from engine.strategies.base import (
    Strategy,
    broadcast_from_rank_0,
    class_name,
    parameter_names,
    sum_over_ranks,
)
from engine.strategies.block_order import BlockOrder
from engine.strategies.mesh import degrees, make_mesh
from engine.strategies.model_structure import ShardedStructure
from engine.strategies.parameter_replacements import ParameterReplacements
from engine.strategies.tensor_class_states import SHARDED
from engine.strategies.update_scope import warn_of_matrices
from engine.strategies.whole_tensors import WholeSteps
from engine.transforms import blocks, float8
from engine.utils import accelerator, torch_private
from engine.utils.log import warn_once
from engine.utils.loss import LEAVE_OUT
from engine.utils.parameters import parameters_of


@dataclass(kw_only=True)
class FSDP(Strategy):
    """Trains with ``torch.distributed.fsdp.fully_shard``, whose settings are fields. In a single process nothing is sharded.

    The model is sharded in place: it becomes a subclass of its class and keeps its names and hooks; its parameters become ``DTensor``
    objects, with 1/N of each on every rank. All ranks start with rank 0's parameters and buffers; from then on each has its own buffers.

    Under ``*-mixed`` precision parameters are gathered in half precision and gradients are reduced in fp32; the shards and the
    optimizer state are fp32. Autocast stays on: softmax, norms and losses are computed in fp32 as in a single process. Inputs
    of blocks are cast to half precision; inputs of the whole model (including targets) are not.

    After ``Fit.run`` the module stays sharded on all ranks: ``fit.test(module)`` and further runs under the same strategy work, but a
    direct call of the module does not. Modules built in ``configure_model`` have no memory for parameters until they are sharded, block
    by block, so no rank ever has the whole model. They get the values of one process that runs the same ``configure_model``, whatever it does
    with them; a checkpoint's values replace these. Inside ``with fit.gathered(module):`` the module has its full weights, to export them.

    ``training_step`` must return a loss on every rank: ``Loss(out.sum() * 0, 0)`` leaves a micro-batch out, ``None`` is an error.
    """

    blocks: type[nn.Module] | str | Sequence[type[nn.Module] | str] | None = None
    """Modules whose parameters are gathered and freed together: classes, names of classes, or names of modules (``"layers.*"``). Default: what
    the model's method ``blocks()`` returns, if its class has one; else the members of each ``nn.ModuleList`` and ``nn.Sequential`` with at
    least two modules of one class with parameters. The rest of the model is one more block."""
    min_size: int = 0
    """The minimum number of parameters of a block; without ``blocks``, every module of at least that size is a block."""
    reshard_after_forward: bool | int | None = None
    """Free the gathered parameters after the forward pass and gather them again for backward. ``None``: do so in blocks, not in the rest of
    the model; a number: keep parameters sharded over this many ranks between the two passes."""
    dp_replicate: int = 1
    """Groups of ranks with the same shards (hybrid sharding, for example one group per node); gradients are averaged between them."""
    dp_shard: int = -1
    """The number of ranks that one copy of the model is sharded over; -1: all ranks divided by ``dp_replicate``."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are reduced; ``None``: fp32 under ``*-mixed`` precision, else the parameters' dtype."""
    cpu_offload: bool = False
    """Keep the shards, their gradients and the optimizer's state in host memory."""
    ignore: str | Sequence[str] = ()
    """Parameters, by name (``"head.*"``), that stay whole on every rank; their gradients are averaged as under DDP."""
    reduce_each_micro_batch: bool = False
    """Reduce gradients in every micro-batch of a window rather than in its last one, so that no rank ever has the full gradients."""
    _replacements: ParameterReplacements = field(default_factory=ParameterReplacements, init=False, repr=False)
    _sizes: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _mesh: DeviceMesh | None = field(default=None, init=False, repr=False)
    _structures: list[ShardedStructure] = field(default_factory=list, init=False, repr=False)
    _watches: list[RemovableHandle] = field(default_factory=list, init=False, repr=False)
    _adopted: AdoptedShards | None = field(default=None, init=False, repr=False)
    """The part that transformers has sharded of the model that is prepared at the moment."""
    _whole_steps: WholeSteps = field(default_factory=WholeSteps, init=False, repr=False)

    def __post_init__(self) -> None:
        who, min_size = type(self).__name__, self.min_size
        if not isinstance(min_size, int) or isinstance(min_size, bool) or min_size < 0:
            raise ValueError(f"{who}(min_size={min_size!r}) must be an int of at least 0")
        keep = self.reshard_after_forward
        if keep is not None and (not isinstance(keep, int) or keep < 0):
            raise ValueError(f"{who}(reshard_after_forward={keep!r}) must be True, False, None, or a number of ranks")
        for name, size in self._axes().items():
            degrees({name: size}, 0, who)

    def _axes(self) -> dict[str, int]:
        """The requested sizes of the mesh's axes, from the outermost to the innermost."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}

    def check(self, settings: Settings, origins: Mapping[str, str], world_size: int | None) -> None:
        if world_size is not None:
            self._degrees(world_size)

    def _degrees(self, world_size: int) -> dict[str, int]:
        """The sizes of the mesh's axes for this number of processes.

        Raises:
            ValueError: the product of the sizes differs from that number.
        """
        who, kept_over = type(self).__name__, self.reshard_after_forward
        sizes = degrees(self._axes(), world_size, who)
        shard = sizes["dp_shard"]
        if (
            shard > 1
            and kept_over is not None
            and not isinstance(kept_over, bool)
            and (shard % kept_over if kept_over else True)
        ):
            raise ValueError(
                f"{who}(reshard_after_forward={kept_over}) must divide the {shard} ranks that share one copy of the model"
            )
        return sizes

    def connect(self, group: Group) -> None:
        self._sizes = self._degrees(group.world_size)
        super().connect(group)
        self._mesh, self.matched_forward = None, group.world_size > 1

    @property
    def axes(self) -> dict[str, int]:
        return dict(self._sizes)

    # -- the model --------------------------------------------------------------------------------------------------------------

    def building(self) -> AbstractContextManager[Any]:
        return super().building() if self.group.cpu is None else deferred_init.values_recorded()

    def place(self, model: nn.Module) -> None:
        # Over several ranks each block goes to the device just before it is sharded: the whole model need not fit there.
        if self.group.cpu is None:
            super().place(model)

    def setup(self, model: nn.Module) -> nn.Module:
        if self.group.cpu is None:
            return model
        sharding = f"{', '.join(f'{name}={size}' for name, size in self._sizes.items())}, precision={self.precision}"
        previous = vars(model).get("_sharded_as")
        if previous is not None:
            if previous != sharding:
                raise ValueError(
                    f"{class_name(model)} was sharded with {previous}, but {sharding} is requested now: load a checkpoint into a new module"
                )
            self.sync([model], True)
        else:
            self._check(model)
            with deferred_init.recorded_further(
                model
            ):  # initial values have the model's own dtypes first, as in one process
                self.precision.convert(model)
            self._shard(model)
            model._sharded_as = sharding  # type: ignore[assignment]
        structure: ShardedStructure = vars(model).get("_structure") or ShardedStructure(
            model, type(self).__name__, None if self.parts_differ else self.group
        )
        structure.check()
        self._watches.append(structure.watch())
        self._structures.append(structure)
        model._structure = structure  # type: ignore[assignment]
        return model

    def release(self) -> None:
        self._structures.clear()
        self._whole_steps.leave()
        while self._watches:
            self._watches.pop().remove()

    def _check(self, model: nn.Module) -> None:
        """Check that the model is whole, or sharded by transformers as this strategy would; let rank 0 initialize parameters without values."""
        settings = {
            f.name: getattr(self, f.name) for f in fields(self) if f.init and getattr(self, f.name) != f.default
        }
        self._adopted = adopted_shards(model, self.group, type(self).__name__, self._sizes, self.precision, settings)
        shard_errors.check_model(model)
        quantized_weights.check_dtype(model, self.precision.autocast, f"precision={self.precision.name!r} under FSDP")
        self._replacements.begin(model, self.group)

    def _shard(self, model: nn.Module) -> None:
        self.transform(model)
        self._shard_parts(model, [model])
        shard_errors.watch_passes(model)

    def _shard_parts(self, model: nn.Module, roots: Sequence[nn.Module]) -> None:
        """Shard ``roots``, which are modules of ``model``, block by block; settings name parameters and modules as ``model`` does."""
        patterns = [self.ignore] if isinstance(self.ignore, str) else list(self.ignore)
        apart = set(blocks.matching(model.named_parameters(remove_duplicate=False), patterns, "FSDP(ignore=...)"))
        chosen = (
            [] if self.blocks is None else [self.blocks] if isinstance(self.blocks, (str, type)) else list(self.blocks)
        )
        units, adopted = blocks.blocks_of(model, chosen, self.min_size), self._adopted
        if adopted is not None:
            units = [m for m in units if not adopted.contains(m)]
            apart |= adopted.whole
        for root in roots:
            inside = {id(m) for m in root.modules() if m is not root}
            parts = [m for m in units if id(m) in inside]
            with_rest, between = blocks.shared(root, parts)
            apart |= between  # a block must not free parameters that another block uses
            for part in parts:
                self._fully_shard(part, apart | with_rest, inputs=True)
            if isinstance(root, FSDPModule):
                self._replacements.materialise(root)
            else:
                self._fully_shard(root, apart, inputs=False)
            root._reduces = True  # type: ignore[assignment]
            if self.precision.fp8 is not None and self.precision.fp8.gathers:
                float8.Scales(root, self.precision.fp8)
            current = {self._replacements.current(p) for p in apart}
            whole = [p for p in root.parameters() if p in current]
            if torch_private.fsdp_blocks(root):
                root._order = BlockOrder(root, self.loss_group, whole)  # type: ignore[assignment]
            else:
                for parameter in whole:
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(partial(self._average, root))

    def _fully_shard(self, module: nn.Module, ignored: set[Any], inputs: bool) -> None:
        self._replacements.materialise(module)
        ignored = {self._replacements.current(parameter) for parameter in ignored}
        previous = dict(module.named_parameters(remove_duplicate=False))
        half, fp8 = self.precision.autocast, self.precision.fp8
        if fp8 is not None and fp8.gathers:
            float8.cast_before_gather(module, ignored)
        reduce = self.reduce_dtype or (torch.float32 if half is not None else None)
        if self._is_complex(module, ignored):
            half = reduce = None
        fully_shard(
            module,
            mesh=self._data_mesh(),
            reshard_after_forward=self.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduce, cast_forward_inputs=inputs),
            offload_policy=CPUOffloadPolicy(pin_memory=accelerator.pins(self.group.device))
            if self.cpu_offload
            else OffloadPolicy(),
            ignored_params=ignored,
        )
        self._replacements.record(module, previous)
        quantized_weights.keep_scales(module)

    def _is_complex(self, module: nn.Module, ignored: set[Any]) -> bool:
        """Whether the trained parameters of a block are complex.

        Raises:
            ValueError: their dtypes differ.
        """
        parameters = {
            name: p
            for name, p in module.named_parameters()
            if p.requires_grad and p not in ignored and not dtensors.is_dtensor(p)
        }
        types = dict.fromkeys(p.dtype for p in parameters.values())  # a set's order differs between processes
        if len(types) > 1:
            most_common = max(types, key=lambda dtype: sum(p.dtype == dtype for p in parameters.values()))
            names = [name for name, p in parameters.items() if p.dtype != most_common]
            raise ValueError(
                f"{type(module).__name__} is a block of FSDP whose parameters have several types, {', '.join(sorted(map(str, types)))}, and FSDP "
                f"takes one: leave {', '.join(names[:5])} whole with FSDP(ignore=...), or convert them"
            )
        return any(dtype.is_complex for dtype in types)

    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks with this strategy's axes. Created at its first use, by all ranks together."""
        if self._mesh is None:
            self._mesh = make_mesh(self.group, self._sizes)
        return self._mesh

    def _data_mesh(self) -> DeviceMesh:
        if self._adopted is not None and self._adopted.mesh is not None:
            return self._adopted.mesh
        return self.mesh()["dp_shard"] if self._sizes["dp_replicate"] == 1 else self.mesh()["dp_replicate", "dp_shard"]

    def repoint(self, optimizer: Optimizer) -> None:
        is_lent = self._lend_whole_tensors(optimizer)
        for group in optimizer.param_groups:
            parameters = group["params"]
            for i, old in enumerate(parameters):
                new = self._replacements.current(old)
                if new is not old:
                    parameters[i] = new
                    if old in optimizer.state:
                        state = optimizer.state.pop(old)
                        if not is_lent:
                            state = {key: dtensors.shard_like(value, new) for key, value in state.items()}
                        optimizer.state[new] = state
            if is_lent:
                continue
            shard_errors.check_optimizer(optimizer, parameters)
            if type(optimizer).__module__.startswith("torchao.optim") and any(
                dtensors.is_dtensor(p) for p in parameters
            ):
                warn_once(f"{type(optimizer).__name__}: a checkpoint of this training will be an error: {SHARDED}")
        if not is_lent:
            self._switch_off_lists(optimizer)
            if any(map(dtensors.is_dtensor, parameters_of([optimizer]))):
                warn_of_matrices(optimizer)

    def _lend_whole_tensors(self, optimizer: Optimizer) -> bool:
        """Lend whole tensors to the optimizer's steps if it needs them. Return whether it does.

        This is the first that happens to an optimizer: what replaces its step later, such as a shared stream of random numbers, runs once a step.
        """
        if self.group.world_size == 1 or treatment(optimizer) is None:
            return False
        if self._whole_steps.step_of(optimizer) is None:
            self._whole_steps.add(optimizer, *self._holders_of_stage(), self.window)
        self.optimizer_parts_differ = True
        return True

    def _holders_of_stage(self) -> tuple[Group, dict[str, int]]:
        """The ranks that have the same part of the model's depth, and the axes of their mesh."""
        return self.group, dict(self._sizes)

    def _switch_off_lists(self, optimizer: Optimizer) -> None:
        """Switch ``foreach`` and ``fused`` off where a group has sharded and whole parameters: torch's kernels for lists take no mix of both."""
        for group in optimizer.param_groups:
            kinds = {dtensors.is_dtensor(p) for p in group["params"] if not self._replacements.is_elsewhere(p)}
            if len(kinds) > 1 and not (group.get("foreach") is False and not group.get("fused")):
                if group.get("foreach") or group.get("fused"):
                    warn_once(
                        f"{type(optimizer).__name__} has sharded and whole parameters in one group: foreach and fused are switched off for it"
                    )
                group.update({name: False for name in ("foreach", "fused") if name in group})
                # torch has set this when the optimizer was created as a fused one, and only fused kernels divide gradients.
                torch_private.forget_amp_scaling(optimizer)

    def share_parameters(self, model: nn.Module) -> None:
        broadcast_from_rank_0(self.group, [t.detach() for t in (*model.parameters(), *model.buffers())])

    # -- gradients --------------------------------------------------------------------------------------------------------------

    def sync(self, models: Sequence[nn.Module], enabled: bool) -> None:
        for model in models:
            if isinstance(model, FSDPModule) and vars(model)["_reduces"] != enabled:
                model._reduces = enabled  # type: ignore[assignment]
                if not self.reduce_each_micro_batch:
                    model.set_requires_gradient_sync(enabled)
                elif self.dp_replicate > 1:
                    model.set_requires_all_reduce(enabled)

    def traces(self, optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> list[tuple[Any, int]]:
        # Gradients of micro-batches that are not reduced yet are kept outside the parameters.
        unreduced = torch_private.unreduced_gradients(models)
        grads = (unreduced.get(id(p), p.grad) for p in parameters_of(optimizers))
        # A reduction adds to the shard inside a DTensor, and does not change the DTensor's own version.
        return [(None, 0) if grad is None else (grad, dtensors.local([grad])[0]._version) for grad in grads]

    def discard(self, models: Sequence[nn.Module]) -> None:
        torch_private.drop_unreduced_gradients(models)

    def _average(self, root: nn.Module, parameter: Tensor) -> None:
        """Average the gradient of a parameter that ``fully_shard`` ignores; averaging it twice does no harm."""
        if vars(root)["_reduces"] and parameter.grad is not None:
            group = self.loss_group
            dist.all_reduce(parameter.grad, group=group.wide)
            parameter.grad.div_(group.world_size)

    def backward_nothing(self, models: Sequence[nn.Module], last: bool) -> None:
        raise ValueError(
            f"training_step returned None on rank {self.group.rank} under {type(self).__name__}, whose backward passes all ranks run "
            f"together: {LEAVE_OUT}"
        )

    def explain(self, error: Exception, doing: str) -> str:
        if (text := super().explain(error, doing)) or self.group.world_size == 1:
            return text
        if doing.startswith("the step of "):
            return shard_errors.explanation_of_step(error, doing)
        return shard_errors.explanation(str(error), doing)

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        if self.group.world_size > 1:
            raise RuntimeError(
                "FSDP averages gradients during the backward pass of a prepared model; manual averaging needs strategy='ddp'"
            )

    def sum(self, value: Tensor | float) -> Tensor | float:
        return sum_over_ranks(self.group, value, self.is_counted)

    def local(self, grads: list[Tensor]) -> list[Tensor]:
        return grads if self.group.world_size == 1 else dtensors.local(grads)

    def norm(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        if self.group.world_size == 1:
            return super().norm(grads, norm_type)
        device = torch.device("cpu") if self.cpu_offload else self.group.device
        return sharded_norms.norm(self.group, grads, norm_type, self._holders, device)

    def norms(self, grads: Mapping[str, Tensor], norm_type: float = 2.0) -> dict[str, Tensor]:
        if self.group.world_size == 1:
            return super().norms(grads, norm_type)
        names_by_rank = gather_json(self.group, list(grads)) if self.parts_differ else [list(grads)]
        names = list(dict.fromkeys(itertools.chain.from_iterable(names_by_rank)))
        device = torch.device("cpu") if self.cpu_offload else self.group.device
        groups = [[grads[name]] if name in grads else [] for name in names]
        totals = sharded_norms.norms(self.group, groups, norm_type, self._holders, device)
        return dict(zip(names, totals.unbind(), strict=True))

    def norm_of_each(self, grads: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        if self.group.world_size == 1:
            return super().norm_of_each(grads)
        device = torch.device("cpu") if self.cpu_offload else self.group.device
        first, count, ranks = self._place_of(len(grads))
        return sharded_norms.norm_of_each(self.group, grads, first, count, self._holders, ranks, device)

    def _place_of(self, number: int) -> tuple[int, int, int]:
        """Where this rank's ``number`` gradients are among those of all ranks, how many there are of these, and how many ranks have the same."""
        return 0, number, self.group.world_size

    def _holders(self, grad: Tensor) -> int:
        """The number of ranks that have a shard or a copy of this gradient."""
        return self.group.world_size

    def step_stream(self, optimizer: Optimizer) -> StepStream | None:
        if self.group.world_size == 1:
            return None
        parameters = [p for p in parameters_of([optimizer]) if not p.is_meta]
        differing = dtensors.sharded_axes(parameters) | {"pp"}
        number, coordinates = 0, self._coordinates()
        for name, size in self._sizes.items():
            if name in differing:
                number = number * size + coordinates[name]
        obstacle = self._whole_steps.draw_obstacle(optimizer) or self._draw_obstacle(parameters, differing)
        return StepStream(number, obstacle)

    def _coordinates(self) -> dict[str, int]:
        """This rank's index along each axis of the mesh."""
        quotient, coordinates = self.group.rank, {}
        for name in reversed(self._sizes):
            quotient, coordinates[name] = divmod(quotient, self._sizes[name])
        return coordinates

    def _draw_obstacle(self, parameters: Sequence[Tensor], differing: Set[str]) -> str:
        """Why ranks that hold copies of some of the parameters would draw different numbers for them; empty if they would not.

        Args:
            differing: the axes along which ranks draw from different streams.
        """
        if "dp_shard" not in differing and any(map(dtensors.is_uneven, parameters)):
            return "each rank has whole parameters beside shards whose sizes differ between the ranks (FSDP(ignore=...), or shared by blocks)"
        return ""

    def agree(self, flag: Tensor) -> Tensor:
        largest: Tensor = all_reduce(self.group, flag, "max")
        return largest

    # -- checkpoints ------------------------------------------------------------------------------------------------------------

    def part_like(self, stored: Stored, parameter: Tensor) -> Tensor:
        if (
            dtensors.is_dtensor(parameter)
            and stored.shape == parameter.shape
            and not self._whole_steps.lends(parameter)
        ):
            return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
        return super().part_like(stored, parameter)

    def optimizer_parts(self, optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
        own_state(module)
        self._whole_steps.settle_owners(optimizer)
        if self.group.world_size > 1 and not is_of_torch(optimizer):
            lent = self._whole_steps.lent_by(optimizer)
            sharded_states.check(self.group, optimizer, parameter_names(optimizer, module), lent)
        return super().optimizer_parts(optimizer, module)

    def load_optimizer(self, optimizer: Optimizer, module: nn.Module, state: dict[str, Any], source: Source) -> None:
        own_state(module)
        self._whole_steps.settle_owners(optimizer)
        state = self._whole_steps.own_part(optimizer, state, parameter_names(optimizer, module))
        super().load_optimizer(optimizer, module, state, source)
        if self._whole_steps.step_of(optimizer) is None:
            self._switch_off_lists(optimizer)  # a run of another strategy may have saved them switched on

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        return self._full_state(own_state(module))

    def _full_state(self, tree: dict[str, Any]) -> dict[str, Any]:
        full: dict[str, Any] = dtensors.full_state(self.group, tree, self.group.is_main)
        return full
