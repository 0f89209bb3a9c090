"""Tensor, pipeline and data parallelism together, on one mesh of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from engine.checkpoint.reader import Source
from engine.config.settings import Settings
from engine.distributed.group import Group
from engine.step.passes import Passes
from engine.step.scaler import Scaler
from engine.strategies import dtensors, tensor_parallel
from engine.strategies.fsdp import FSDP
from engine.strategies.mesh import data_group
from engine.strategies.pipeline import SCHEDULES, SPLIT_BACKWARD, Pipeline, Step
from engine.strategies.pipeline_parameters import StageParameters
from engine.strategies.pipeline_stages import stages_of
from engine.strategies.pipelined_passes import PipelinedPasses
from engine.transforms.blocks import user_module
from engine.transforms.compile import Transforms
from engine.transforms.offload import check_offload
from engine.utils.errors import nearest

_IN_FLIGHT = "a pipeline has several micro-batches in flight, whose activations do not come back in the order in which they leave"
_IN_PARTS = "its stages are on several ranks, and no rank runs the whole model"


@dataclass(kw_only=True)
class MeshParallel(FSDP):
    """Trains on a mesh of ranks with the axes ``pp, dp_replicate, dp_shard, cp, tp``; their sizes multiply to the number of processes.

    Along ``tp`` (neighbouring ranks) modules are sharded by a plan; along ``dp_shard`` each parameter is sharded further as by
    :class:`FSDP`, whose settings apply here too; along ``dp_replicate`` it is copied. One size may be -1 and is inferred. Ranks that differ
    in the ``dp_`` axes see different data. Gradients, norms, clipping and checkpoints are those of the whole model.

    With more than one ``tp`` rank, the plan is ``plan``, else what the model's method ``parallelize(self, mesh)`` returns (it may also shard
    the model itself and return ``None``), else a Hugging Face model's own plan; ``mesh`` has the axes with more than one rank. Modules that
    are not in the plan compute the same on every ``tp`` rank. A module must read its number of heads or channels from its
    tensors (``view(..., -1, head_size)``), because a rank has 1/tp of them.

    Along ``pp`` the model's depth is cut into stages: its method ``pipeline_stages(self)`` returns the modules that, called one after
    another, are its forward pass (``nn.Sequential`` does not need the method). On the ranks of the last stage ``training_step`` runs on each
    chunk of a micro-batch; it calls ``self(...)`` once, with tensors, and computes the loss from the result. A rank keeps the parameters of
    its own stages. Hooks around backward are not called, and only the last stage's ranks log values.
    """

    tp: int = 1
    """Number of ranks that the modules of the plan are sharded over."""
    pp: int = 1
    """Number of ranks that the model's depth is divided over; by the schedule a rank has one stage or two."""
    cp: int = 1
    """Number of ranks that a sequence is split over; more than 1 is not supported yet."""
    plan: tensor_parallel.Plan | None = None
    """By name of a module, a style of ``torch.distributed.tensor.parallel`` or its name (``"colwise"``, ``"rowwise"``, ...)."""
    sequence_parallel: bool = False
    """Require sequence parallelism in the plan; passed to ``parallelize(mesh, sequence_parallel=True)`` if that accepts it."""
    loss_parallel: bool = False
    """Compute the cross entropy on logits that are sharded over the vocabulary, without gathering them; the output layer must have the style
    ``ColwiseParallel(use_local_output=False)``."""
    schedule: str = "1f1b"
    """``"gpipe"``, ``"1f1b"``; with two stages per rank ``"interleaved"``, ``"zero_bubble"``, ``"zbv"``, ``"dualpipev"``, the last three only without
    ``dp_replicate`` and ``dp_shard``."""
    num_microbatches: int | None = None
    """Number of chunks that the pipeline splits each micro-batch into, by samples; by default the number of stages."""
    split: Sequence[str] = ()
    """Names of the modules with which the stages after the first begin; by default stages have about equal numbers of parameters."""
    _losses: AbstractContextManager[Any] | None = field(default=None, init=False, repr=False)
    _stages: StageParameters | None = field(default=None, init=False, repr=False)
    _holds: bool = field(default=False, init=False, repr=False)
    """Whether a prepared model is using the pipeline."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            names = ", ".join(SCHEDULES)
            raise ValueError(
                f"MeshParallel(schedule={self.schedule!r}) is unknown{nearest(self.schedule, SCHEDULES)}; possible: {names}"
            )
        count = self.num_microbatches
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(f"MeshParallel(num_microbatches={count!r}) must be an int of at least 1")

    @classmethod
    def from_megatron(
        cls,
        *,
        tp_degree: int = 1,
        pp_degree: int = 1,
        num_micro_batches: int | None = None,
        sequence_parallelism: bool = False,
        **settings: Any,
    ) -> MeshParallel:
        """Create a ``MeshParallel`` from Megatron-LM's names of settings; remaining ranks are data parallel, and sharded only by ``dp_shard``.

        Args:
            tp_degree, pp_degree: numbers of ranks for tensor and for pipeline parallelism.
            num_micro_batches: number of chunks of a micro-batch in the pipeline.
            sequence_parallelism: whether activations are split along the sequence between tensor-parallel regions.
            settings: fields of :class:`engine.MeshParallel`.
        """
        data = (
            {"dp_replicate": -1, "dp_shard": 1} if "dp_shard" not in settings and "dp_replicate" not in settings else {}
        )
        named = {
            "tp": tp_degree,
            "pp": pp_degree,
            "num_microbatches": num_micro_batches,
            "sequence_parallel": sequence_parallelism,
        }
        return cls(**{**named, **data, **settings})

    def _axes(self) -> dict[str, int]:
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }

    def check(self, settings: Settings, origins: Mapping[str, str], world_size: int | None) -> None:
        sizes = self._axes() if world_size is None else self._degrees(world_size)
        if sizes["pp"] > 1:
            Transforms(compile=settings.compile).check(_IN_PARTS, type(self).__name__)
            check_offload(settings.activation_offload, type(self).__name__, _IN_FLIGHT)

    def _degrees(self, world_size: int) -> dict[str, int]:
        sizes = super()._degrees(world_size)
        if sizes["cp"] > 1:
            raise ValueError(
                f"MeshParallel(cp={self.cp}): context parallel is not supported. On the CPU torch has no backward pass for it, on CUDA it has not "
                "been tried here; use tp with sequence_parallel to spread long sequences"
            )
        replicas = sizes["dp_replicate"] * sizes["dp_shard"]
        if sizes["pp"] > 1 and replicas > 1 and self.schedule in SPLIT_BACKWARD:
            raise ValueError(
                f"MeshParallel(schedule={self.schedule!r}) with dp_replicate={sizes['dp_replicate']}, dp_shard={sizes['dp_shard']}: this schedule's "
                "backward passes of weights alone leave gradients that torch does not reduce over these ranks; use 'interleaved' or '1f1b'"
            )
        return sizes

    def connect(self, group: Group) -> None:
        super().connect(group)
        pp, tp = self._sizes["pp"], self._sizes["tp"]
        self.pipelined = self.parts_differ = pp > 1
        self.fused = "runs forward and backward passes together" if pp > 1 else None
        self.compiles_whole = _IN_PARTS if pp > 1 else None
        self.keeps_activations = _IN_FLIGHT if pp > 1 else None
        self.data_group = self.loss_group = data_group(group, self._sizes)
        stage = group.rank // (group.world_size // pp)
        self.random_stream = self.data_group.rank * pp + stage
        _, stages_per_rank, backwards = SCHEDULES[self.schedule]
        stages = (stage, 2 * pp - 1 - stage if backwards else pp + stage)[:stages_per_rank]
        numbers = " and ".join(str(number + 1) for number in stages)
        self.role = f"pipeline stage{'s' * (stages_per_rank > 1)} {numbers} of {stages_per_rank * pp}" if pp > 1 else ""
        self.loss_stage = 0 if backwards else pp - 1
        self.has_loss = stage == self.loss_stage
        self.is_counted = self.has_loss and group.rank % tp == 0

    def passes(self, scaler: Scaler | None) -> Passes:
        return PipelinedPasses(self.window, self, scaler) if self.pipelined else super().passes(scaler)

    def setup(self, model: nn.Module) -> nn.Module:
        prepared = super().setup(model)
        if self.loss_parallel and self._losses is None:  # also for a module that an earlier run has sharded
            self._losses = loss_parallel()
            self._losses.__enter__()
        if self.pipelined:
            # An earlier run, with another object of this class, may have divided the model.
            stages: StageParameters = vars(user_module(model))["_stages"]
            if self._holds and self._stages is not stages:
                raise ValueError(
                    f"MeshParallel(pp={self._sizes['pp']}) with two models: one MeshParallel runs one pipeline; give the second an Engine "
                    "with its own MeshParallel, or use tp and dp_shard"
                )
            self._stages, self._replacements, self._holds = stages, stages.replacements, True
            stages.pipeline.weighted = None
        return prepared

    def _shard(self, model: nn.Module) -> None:
        """Shard the model along the axes in the only order that works: stages, tensor parallelism, transforms, ``fully_shard``."""
        stages = self._keep_own_stages(user_module(model)) if self.pipelined else None
        if self._sizes["tp"] > 1 and self._adopted is None:
            mesh = self.mesh()
            plan = tensor_parallel.plan_for(model, self.plan, mesh, self.sequence_parallel)
            if plan is not None:
                tensor_parallel.shard(model, plan, mesh["tp"], self._replacements)
            if stages is not None:
                stages.pipeline.shapes.change(partial(self._shard_copy, plan))
        self.transform(model)
        if self._sizes["dp_replicate"] * self._sizes["dp_shard"] > 1:
            self._shard_parts(model, [model] if stages is None else list(stages.pipeline.modules.values()))
        else:
            self._replacements.materialise(model)
            for parameter in model.parameters():
                if dtensors.is_dtensor(parameter) and parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(dtensors.to_parameter_layout)
        if stages is not None:
            stages.follow_replacements(model)

    def release(self) -> None:
        super().release()
        self._holds = False
        if self._losses is not None:
            self._losses.__exit__(None, None, None)
            self._losses = None

    def _place_of(self, number: int) -> tuple[int, int, int]:
        if self._stages is None:
            return super()._place_of(number)
        ranks, counts = self.group.world_size // self._sizes["pp"], self._stages.counts
        return sum(counts[: self.group.rank // ranks]), sum(counts), ranks

    def _holders(self, grad: Tensor) -> int:
        copies = 1 if self._stages is None else next((count for p, _, count in self._stages.tied if p.grad is grad), 1)
        return self.group.world_size // self._sizes["pp"] * copies

    def _draw_obstacle(self, parameters: Sequence[Tensor], differing: Set[str]) -> str:
        tied = set() if self._stages is None else {id(p) for p, _, _ in self._stages.tied}
        if any(id(p) in tied for p in parameters):
            return "stages of the pipeline share a parameter"
        return super()._draw_obstacle(parameters, differing)

    # -- the pipeline -----------------------------------------------------------------------------------------------------------

    def _keep_own_stages(self, model: nn.Module) -> StageParameters:
        """Divide the model into stages, and keep the parameters of this rank's."""
        pp = self._sizes["pp"]
        pipeline = Pipeline(
            model,
            self.schedule,
            self.num_microbatches or pp * SCHEDULES[self.schedule][1],
            self.mesh().get_group("pp"),
            self.group.device,
            self.precision,
        )
        parts = stages_of(model, pipeline.num_stages, self.split)
        stages = StageParameters(pipeline, self._replacements)
        stages.keep_own_stages(model, parts, self.group)
        model._stages = stages  # type: ignore[assignment]
        return stages

    @property
    def pipeline(self) -> Pipeline | None:
        """This rank's part of the pipeline; ``None`` without a pipeline, or before the model is divided into stages."""
        return None if self._stages is None else self._stages.pipeline

    def _shard_copy(self, plan: tensor_parallel.Plan | None, copied: nn.Module) -> None:
        """Apply tensor parallelism to a copy of the model without values; ``plan``: see :func:`engine.strategies.tensor_parallel.plan_for`."""
        mesh = self.mesh()
        if plan is None:
            tensor_parallel.plan_for(copied, None, mesh, self.sequence_parallel)
        else:
            tensor_parallel.shard_copy(copied, plan, mesh["tp"])

    def run_pipeline(self, step: Step, root: Callable[[Any, float], Tensor], batch: Any, last: bool) -> Any:
        """Run forward and backward of a micro-batch in chunks.

        Args:
            step, root, last: as in :class:`engine.strategies.pipelined_passes.Pipelines`.
        """
        assert self._stages is not None, "run_pipeline before setup"
        for structure in self._structures:  # the schedule calls stages, not the model whose forward hook checks this
            structure.check()
        return self._stages.train(step, root, batch, last)

    def _holders_of_stage(self) -> tuple[Group, dict[str, int]]:
        axes = {name: size for name, size in self._sizes.items() if name != "pp"}
        pp, count = self._sizes["pp"], self.group.world_size
        if pp == 1:
            return self.group, axes
        ranks = list(range(count))
        return self.group.part([ranks[begin : begin + count // pp] for begin in range(0, count, count // pp)]), axes

    def repoint(self, optimizer: Optimizer) -> None:
        super().repoint(optimizer)
        if self._stages is not None:
            self._stages.keep_own(optimizer)

    # -- checkpoints ------------------------------------------------------------------------------------------------------------

    def _full_state(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The tree with full tensors, on the first rank of each stage."""
        full: dict[str, Any] = dtensors.full_state(
            self.group, tree, self.group.rank % (self.group.world_size // self._sizes["pp"]) == 0
        )
        return full

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        state = super().model_state(module)
        return state if self._stages is None else self._stages.joined_model(self.group, module, state)

    def model_parts(self, module: nn.Module) -> dict[str, Any]:
        state = super().model_parts(module)
        return state if self._stages is None else self._stages.own_state(state)

    def optimizer_parts(self, optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
        state = super().optimizer_parts(optimizer, module)
        return state if self._stages is None else self._stages.with_all_names(optimizer, module, state)

    def load_optimizer(self, optimizer: Optimizer, module: nn.Module, state: dict[str, Any], source: Source) -> None:
        super().load_optimizer(
            optimizer,
            module,
            state if self._stages is None else self._stages.own_part(optimizer, module, state),
            source,
        )


def tensor_parallel_only() -> MeshParallel:
    """Create the strategy that ``strategy="tp"`` means: all ranks on the axis ``tp``."""
    return MeshParallel(tp=-1, dp_shard=1)


def pipeline_parallel_only() -> MeshParallel:
    """Create the strategy that ``strategy="pp"`` means: all ranks on the axis ``pp``."""
    return MeshParallel(pp=-1, dp_shard=1)
