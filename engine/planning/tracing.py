"""Chooses which ranks of a simulated job are traced, and traces each from start to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.settings import Settings
from engine.data.datamodule import DataModule
from engine.loop.run import Run
from engine.loop.setup import set_up_training
from engine.module import TrainModule, overrides
from engine.planning import torch_private
from engine.planning.fake_tensors import make_fake
from engine.planning.job import JobFacts
from engine.planning.rank_trace import Moment, RankTrace
from engine.planning.simulated_run import SimulatedJob, SimulatedRun, first_batch, simulated_run
from engine.planning.step_observer import StepObserver
from engine.planning.strategy_facts import strategy_facts
from engine.planning.traced_epoch import trace_epoch
from engine.step.gradient_sync import GradientSync
from engine.step.position import shares
from engine.strategies.base import Strategy
from engine.strategies.mesh_parallel import MeshParallel

MOST_TRACED_SEPARATELY = 4
"""The maximum number of ranks in a pipeline that are all traced. In a longer pipeline a rank whose stages are like those of the rank before it is not
traced: it computes the same, and holds at most as much memory."""


def trace(job: SimulatedJob, facts: JobFacts) -> list[RankTrace]:
    """Trace one full step of rank 0; under pipeline parallelism, of one rank for each group of ranks that do the same (see
    :data:`MOST_TRACED_SEPARATELY`).

    The module, the process's random numbers and torch's process groups are the same afterwards as before. ``facts`` receives the facts about
    the job. If ``job.kind`` is an accelerator, torch's optimizers choose their implementation as on CUDA rather than as on the CPU, and the
    traces leave out what a strategy keeps in the host's memory.

    Raises:
        RuntimeError: this process is in a job already, or the module is in a run.
        ValueError: settings that do not fit together, as in a run.
    """
    module = job.module
    if isinstance(module, TrainModule) and module.attached:
        raise RuntimeError(f"{type(module).__name__} is in a run: plan before it, or plan a new module")

    pipeline = PipelineKnowledge()
    with torch_private.optimizers_as_on_accelerators() if job.kind.is_accelerator else nullcontext():
        traces = {0: trace_rank(job, 0, facts, pipeline)}
        if traces[0] is None:
            traces[pipeline.loss_rank] = trace_rank(job, pipeline.loss_rank, JobFacts(), pipeline)
        to_trace = pipeline.ranks_to_trace()
        for rank in to_trace:
            traces[rank] = traces.get(rank) or trace_rank(job, rank, facts if rank == 0 else JobFacts(), pipeline)
    return [_as_representative(trace, count) for rank, count in to_trace.items() if (trace := traces[rank]) is not None]


def _as_representative(trace: RankTrace, count: int) -> RankTrace:
    """Return ``trace`` marked as the trace of one rank that represents ``count`` ranks, in its ``stands_for`` and in its ``role``."""
    return trace if count == 1 else replace(trace, stands_for=count, role=f"{trace.role}, and {count - 1} more like it")


@dataclass
class PipelineKnowledge:
    """The facts about the ranks of one pipeline that are known so far; each traced rank adds to them. Under any other strategy, one rank represents
    all."""

    ranks: tuple[int, ...] = ()
    """One rank of each pipeline stage, in order; under any other strategy one rank."""
    representatives: Sequence[int] = (0,)
    """For each index in ``ranks``, the index of the rank that is traced in its place: the first one that computes the same and holds at least as
    much."""
    loss_rank: int = 0
    """The rank that computes the loss."""
    weighted: bool | None = None
    """Whether the module returns a ``Loss``, which the ranks of a real job tell each other; ``None``: not known yet."""

    def ranks_to_trace(self) -> dict[int, int]:
        """The ranks to trace, each with the number of ranks that it represents."""
        if len(self.ranks) <= MOST_TRACED_SEPARATELY:
            return dict.fromkeys(self.ranks, 1)
        return dict(Counter(self.ranks[index] for index in self.representatives))


def trace_rank(job: SimulatedJob, rank: int, facts: JobFacts, pipeline: PipelineKnowledge) -> RankTrace | None:
    """Trace one rank. Return ``None`` if the rank that computes the loss has to be traced first."""
    with simulated_run(job, rank, facts) as simulated:
        run = simulated.run
        assert run.train_loader is not None
        pipeline.ranks = _axes(run).get("pp", (rank,))
        strategy = run.engine.strategy
        pipelined = strategy if isinstance(strategy, MeshParallel) and strategy.pipelined else None
        if pipelined is not None:
            pipeline.loss_rank = pipeline.ranks[pipelined.loss_stage]
            if rank != pipeline.loss_rank and pipeline.weighted is None:
                return None
        batch, samples = first_batch(run.train_loader)
        trace = _traced_training(job, simulated, batch, samples, facts, pipeline)
        if pipelined is not None and pipelined.pipeline is not None:
            pipeline.weighted, pipeline.representatives = (
                bool(pipelined.pipeline.weighted),
                strategy_facts(pipelined).representatives(),
            )
        module = job.module if isinstance(job.module, TrainModule) else run.module
        missing = (*_compiled(job.resolved.settings, module), *_validation(run, job.datamodule, samples))
        return replace(trace, missing=(*trace.missing, *missing))


class _IdenticalRanks(GradientSync):
    """Takes the place of the strategy where a plan's ranks agree about their losses: every other rank is taken to be like this one.

    Args:
        strategy: the plan's strategy, which sums up counts.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self.group = strategy, strategy.group
        self.data_group, self.loss_group = strategy.data_group, strategy.loss_group

    def sum(self, value: Tensor | float) -> Tensor | float:
        return self._strategy.sum(value)


def _traced_training(
    job: SimulatedJob, simulated: SimulatedRun, batch: Any, samples: int, facts: JobFacts, pipeline: PipelineKnowledge
) -> RankTrace:
    """Set up the training and trace its epoch, whose micro-batches are all ``batch``, of ``samples`` samples. Return the trace."""
    run = simulated.run
    engine = run.engine
    run.loaders.row_lengths = None  # the longest rows, as they are read, need the most memory
    size = run.loaders.largest_window()
    engine.accumulate_grad_batches = size
    data = engine.data_group
    weights = shares(((samples,) * data.world_size,) * size, data.rank)
    observer = StepObserver(_axes(run), job.kind.is_accelerator)
    with simulated.simulation, observer, torch_private.eager():
        make_fake(run.module)
        observer.name(run.module)
        if engine.activation_offload is not None:
            engine.activation_offload.copies = observer.copies
        set_up_training(run)
        # A plan takes a few steps more than a short training has, and a schedule may end with it.
        run.set_optimizers(run.optimizers, run.schedulers, automatic=False)
        observer.name(run.module)
        if isinstance(engine.strategy, MeshParallel) and engine.strategy.pipeline is not None:
            engine.strategy.pipeline.weighted = pipeline.weighted
        facts.from_run(run, batch, compiled=bool(job.resolved.settings.compile))
        engine.window.weights.agreement.gradient_sync = _IdenticalRanks(engine.strategy)
        end = trace_epoch(simulated, batch, weights, observer)
    memory = observer.memory
    on_host = memory.move_to_host(strategy_facts(engine.strategy).on_host) if job.kind.is_accelerator else {}
    trace = _recorded(run, observer, memory.timeline(), samples, end.micro_batches)
    missing = simulated.missing_values.sentences()
    return replace(trace, on_host=on_host, missing=missing if end.missing is None else (*missing, end.missing))


def _recorded(run: Run, observer: StepObserver, timeline: tuple[Moment, ...], samples: int, size: int) -> RankTrace:
    """Put together the trace of the recorded step, which had ``size`` micro-batches of ``samples`` samples each."""
    memory = observer.memory
    return RankTrace(
        rank=run.rank,
        role=run.engine.strategy.role,
        samples=samples * size,
        micro_batches=size,
        peak=max(timeline, key=lambda moment: moment.memory.total),
        held_at_peak=memory.held_at_peak(),
        allocations=memory.allocations(),
        timeline=timeline,
        collectives=observer.collectives.collectives(),
        operations=observer.operations.operations(),
        offloaded=None if run.engine.activation_offload is None else observer.copies.traffic(),
        overlaps=strategy_facts(run.engine.strategy).overlaps,
    )


def _compiled(settings: Settings, module: nn.Module) -> list[str]:
    """The sentence that the plan leaves out ``torch.compile``, in a list; an empty list if nothing is compiled. ``module``: the user's module."""
    compiled = (
        getattr(inner, "_compiled_call_impl", None) or type(inner).__name__ == "OptimizedModule"
        for inner in module.modules()
    )
    if not settings.compile and not any(compiled):
        return []
    return [
        "torch.compile is left out: the plan is of the eager step; compiled, it keeps fewer activations and moves fewer bytes"
    ]


def _validation(run: Run, datamodule: DataModule | None, samples: int) -> list[str]:
    """The sentence that validation is not traced, in a list; an empty list if validation needs no more memory than training, whose batches are as
    large."""
    module, settings = run.module, run.settings
    never_validates = settings.limit_val_batches == 0 or run.val_every.is_never
    if never_validates or not overrides(module, "validation_step"):
        return []
    from_data = datamodule.val_dataloader() if datamodule is not None else None
    value = module.val_dataloader() if from_data is None else from_data
    loaders = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    largest = max((size for loader in loaders if isinstance(size := getattr(loader, "batch_size", 0), int)), default=0)
    if largest <= samples:
        return []
    return [
        f"validation is not traced: its batches have {largest} samples, the training's {samples}, so that it may need more memory than the step"
    ]


def _axes(run: Run) -> dict[str, tuple[int, ...]]:
    """The ranks of this rank's group on each axis of the strategy's mesh."""
    mesh_of = getattr(run.engine.strategy, "mesh", None)
    if mesh_of is None or run.world_size == 1:
        return {}
    mesh = mesh_of()
    names = mesh.mesh_dim_names or ()
    return {name: tuple(torch.distributed.get_process_group_ranks(mesh.get_group(name))) for name in names}
