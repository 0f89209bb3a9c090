"""Traces a step of a run of many ranks in one process, with the loop's own pieces and no data in memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from engine.data.datamodule import DataModule
from engine.loop import setup
from engine.loop.lifecycle import session
from engine.loop.run import Run
from engine.module import TrainModule
from engine.planning import memory_trace, torch_private
from engine.planning.fake_module import fake_batch, fake_module, make_fake
from engine.planning.first_batch import first_batch
from engine.planning.plan import RankTrace
from engine.planning.simulated_group import SimulatedGroup, simulated
from engine.planning.step_trace import StepTrace
from engine.step.share import shares
from engine.utils.seed import isolated
from engine.utils.tree import leaves

MOST_WINDOWS = 4
"""The first window makes the optimizer's state. DDP arranges its buckets anew in the second: a window counts once it communicates as the one before."""

Start = Callable[[TrainModule, SimulatedGroup], Run]
"""Makes a run of this module on this group."""
Note = Callable[[Run, Any], None]
"""Called once a run is set up, up to its first step, with a micro-batch."""


def trace(
    start: Start,
    module: TrainModule,
    train_loader: Any = None,
    *,
    world_size: int,
    nodes: int = 1,
    datamodule: DataModule | None = None,
    ranks: Sequence[int] = (0,),
    note: Note = lambda run, batch: None,
) -> list[RankTrace]:
    """One full step of each of these ranks in a job of ``world_size`` ranks on ``nodes`` machines.

    The module, the process's random numbers and torch's process groups are as before afterwards. ``note`` is called for each of the ranks.

    Raises:
        RuntimeError: this process is in a job already, or the module is in a run.
        ValueError: settings that do not fit together, as in a run.
    """
    if module.attached:
        raise RuntimeError(f"{type(module).__name__} is in a run: plan before it, or plan a new module")
    return [_trace(start, module, train_loader, rank, world_size, nodes, datamodule, note) for rank in ranks]


def _trace(
    start: Start,
    module: TrainModule,
    train_loader: Any,
    rank: int,
    world_size: int,
    nodes: int,
    datamodule: DataModule | None,
    note: Note,
) -> RankTrace:
    with ExitStack() as stack:
        stack.enter_context(isolated())
        group = stack.enter_context(simulated(rank, world_size, nodes))
        simulation = torch_private.Simulation()
        stack.enter_context(torch_private.swappable(simulation))
        with simulation:
            copied = fake_module(module)
        run = start(copied, group)
        stack.enter_context(session(run, datamodule))
        setup.training_loader(run, train_loader, datamodule)
        batch, samples = first_batch(run.train_loader)
        return _steps(run, simulation, train_loader, datamodule, batch, samples, note)


def _steps(
    run: Run,
    simulation: torch_private.Simulation,
    train_loader: Any,
    datamodule: DataModule | None,
    batch: Any,
    samples: int,
    note: Note,
) -> RankTrace:
    """Set up the training and run two windows; the second is recorded."""
    engine = run.engine
    size = run.window_at(0)
    engine.accumulate_grad_batches = size
    data = engine.data_group
    weights = shares(((samples,) * data.world_size,) * size, data.rank)
    observer = StepTrace(_axes(run))
    with simulation, observer:
        make_fake(run.module)
        observer.name(run.module)
        setup.training(run, train_loader, [], datamodule)
        observer.name(run.module)
        note(run, batch)
        fresh = partial(fake_batch, batch)
        run.optimization.begin()
        engine.window.accumulating = run.optimization.accumulates
        engine.window.agree = list  # all ranks are like this one
        window(run, [], fresh, weights, observer)
        for _ in range(MOST_WINDOWS - 1):
            before = observer.collectives.collectives()
            gc.collect()
            ready = [fresh()]
            observer.begin(run.module, _optimizers(run), leaves(ready))
            window(run, ready, fresh, weights, observer)
            observer.end()
            if observer.collectives.collectives() == before:
                break
    memory = observer.memory
    timeline = memory.timeline()
    return RankTrace(
        rank=run.rank,
        role="",
        samples=samples * size,
        micro_batches=size,
        peak=max(timeline, key=lambda moment: moment.memory.total),
        held_at_peak=memory.held_at_peak(),
        storages_at_peak=memory.storages_at_peak(),
        timeline=timeline,
        collectives=observer.collectives.collectives(),
        operations=observer.operations.operations(),
    )


def window(run: Run, ready: list[Any], fresh: Callable[[], Any], weights: Sequence[Any], observer: StepTrace) -> None:
    """One optimizer step, as :func:`engine.loop.train.train_epoch` makes it: one micro-batch at a time is in memory, ``ready`` or made by ``fresh``."""
    optimization, recorder = run.optimization, run.recorder
    for index, share in enumerate(weights):
        batch = ready.pop() if ready else fresh()
        observer.memory.mark(leaves(batch), memory_trace.INPUTS)
        run.engine.window.share = share
        recorder.size, recorder.batch = share.size, batch
        with observer.phase("forward"):
            outputs = optimization.micro(batch, index, share)
        observer.mark_gradients(_optimizers(run))
        if share.last:
            run.stepping = True
            with observer.phase("optimizer step"):
                optimization.step()
            run.stepping = False
        else:
            observer.mark_kept_gradients(run.module)
        batch = outputs = recorder.batch = None
    recorder.window += 1


def _optimizers(run: Run) -> list[Any]:
    return [getattr(each, "optimizer", each) for each in run.optimization.optimizers]


def _axes(run: Run) -> dict[str, tuple[int, ...]]:
    """The ranks of this rank's group on each axis of the strategy's mesh."""
    mesh_of = getattr(run.engine.strategy, "mesh", None)
    if mesh_of is None or run.world_size == 1:
        return {}
    mesh = mesh_of()
    names = mesh.mesh_dim_names or ()
    return {name: tuple(torch.distributed.get_process_group_ranks(mesh.get_group(name))) for name in names}
