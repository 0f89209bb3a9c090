"""Traces a step of a run of many ranks in one process, with the loop's own pieces and no data in memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.data.datamodule import DataModule
from engine.loop import setup
from engine.loop.lifecycle import session
from engine.loop.run import Run
from engine.loop.train import of_the_epoch
from engine.module import TrainModule, overrides
from engine.planning import storages, torch_private, zero
from engine.planning.fake_tensors import Simulation, fake_batch, fake_module, make_fake
from engine.planning.first_batch import first_batch
from engine.planning.inert import without_writing
from engine.planning.job import JobFacts
from engine.planning.missing_values import MissingValues
from engine.planning.plan import Moment, RankTrace
from engine.planning.simulated_group import CPU, SimulatedGroup, Target, simulated
from engine.planning.step_observer import StepObserver
from engine.step.share import shares
from engine.utils.seed import isolated
from engine.utils.tree import leaves

MOST_MICRO_BATCHES = 64
"""Of a module that steps by itself, until it does."""
MOST_WINDOWS = 4
"""The first window makes the optimizer's state. DDP rebuilds its buckets in the second: a window counts once it communicates as the last."""

EACH_STAGE = 4
"""In a longer pipeline a rank is not traced whose stages are like those before it: it computes the same, and holds at most as much."""

Start = Callable[[TrainModule, SimulatedGroup], Run]
"""Makes a run of this module on this group."""


def trace(
    start: Start,
    module: TrainModule | Callable[[], TrainModule],
    train_loader: Any = None,
    *,
    world_size: int,
    nodes: int = 1,
    datamodule: DataModule | None = None,
    ranks: Sequence[int] | None = None,
    facts: JobFacts | None = None,
    target: Target = CPU,
) -> list[RankTrace]:
    """One full step of each of these ranks in a job of ``world_size`` ranks on ``nodes`` machines; by default of rank 0, and under pipeline
    parallelism of one rank for each place in the pipeline (of a long one, for each that differs from the place before).

    The module, the process's random numbers and torch's process groups are as before afterwards. ``module`` may be a function that makes it: its
    tensors then never have values, whatever their size. ``facts`` are collected. For an accelerated ``target`` torch's optimizers choose their
    implementation as on CUDA rather than as on the CPU, and what a strategy keeps in the host's memory is left out.

    Raises:
        RuntimeError: this process is in a job already, or the module is in a run.
        ValueError: settings that do not fit together, as in a run.
    """
    if isinstance(module, TrainModule) and module.attached:
        raise RuntimeError(f"{type(module).__name__} is in a run: plan before it, or plan a new module")

    roles = Roles()

    def traced(rank: int, facts: JobFacts) -> RankTrace | None:
        return _trace(start, module, train_loader, rank, world_size, nodes, datamodule, facts, target, roles)

    with torch_private.as_on_accelerators() if target.accelerated else nullcontext():
        first = 0 if ranks is None else ranks[0]
        facts = facts or JobFacts()
        found = {first: traced(first, facts)}
        if found[first] is None:
            found[roles.with_loss] = traced(roles.with_loss, JobFacts())
        wanted = roles.apart() if ranks is None else dict.fromkeys(ranks, 1)
        for rank in wanted:
            found[rank] = found.get(rank) or traced(rank, facts if rank == first else JobFacts())
    return [_standing(trace, count) for rank, count in wanted.items() if (trace := found[rank]) is not None]


def _standing(trace: RankTrace, count: int) -> RankTrace:
    """The trace of a rank that stands for so many."""
    return trace if count == 1 else replace(trace, stands_for=count, role=f"{trace.role}, and {count - 1} more like it")


@dataclass
class Roles:
    """What the traces of the ranks of one pipeline know of each other. Of any other strategy, one rank stands for all."""

    ranks: tuple[int, ...] = ()
    """One of each stage; of any other strategy one."""
    likewise: Sequence[int] = (0,)
    """By a rank's place among these the first that computes alike and holds at least as much."""
    with_loss: int = 0
    """The one of them that computes the loss."""
    weighted: bool | None = None
    """Whether the loss is a ``Loss``, which real ranks tell each other; ``None``: not known yet."""

    def apart(self) -> dict[int, int]:
        """The ranks to trace, and how many each stands for."""
        if len(self.ranks) <= EACH_STAGE:
            return dict.fromkeys(self.ranks, 1)
        return dict(Counter(self.ranks[place] for place in self.likewise))


def _trace(
    start: Start,
    module: TrainModule | Callable[[], TrainModule],
    train_loader: Any,
    rank: int,
    world_size: int,
    nodes: int,
    datamodule: DataModule | None,
    facts: JobFacts,
    target: Target,
    roles: Roles,
) -> RankTrace | None:
    """The trace of a rank; ``None`` if the rank with the loss has to be traced before it."""
    with set_up(start, module, train_loader, rank, world_size, nodes, datamodule, facts, target) as made:
        run, simulation, answers = made
        assert run.train_loader is not None
        roles.ranks = _axes(run).get("pp", (rank,))
        strategy: Any = run.engine.strategy
        if strategy.pipelined:
            roles.with_loss = roles.ranks[strategy.loss_stage]
            if rank != roles.with_loss and roles.weighted is None:
                return None
        batch, samples = first_batch(run.train_loader)
        found = _steps(run, simulation, answers, train_loader, datamodule, batch, samples, facts, target, roles)
        if strategy.pipelined:
            roles.weighted, roles.likewise = bool(strategy.weighted), strategy.likewise()
        own = module if isinstance(module, TrainModule) else run.module
        return replace(found, missing=(*found.missing, *_compiled(run, own), *_validation(run, datamodule, samples)))


@contextmanager
def set_up(
    start: Start,
    module: TrainModule | Callable[[], TrainModule],
    train_loader: Any,
    rank: int,
    world_size: int,
    nodes: int,
    datamodule: DataModule | None,
    facts: JobFacts,
    target: Target = CPU,
) -> Iterator[tuple[Run, Simulation, MissingValues]]:
    """A simulated run with its module, without values, and its training loader; arguments as of :func:`trace`."""
    with ExitStack() as stack:
        stack.enter_context(isolated())
        stack.enter_context(zero.apart())
        group = stack.enter_context(simulated(rank, world_size, nodes, target))
        answers = MissingValues()
        simulation = Simulation(answers)
        stack.enter_context(torch_private.usable(simulation.fake, answers))
        stack.enter_context(torch_private.agreeing_stages())
        stack.enter_context(torch_private.plain_outputs())
        with simulation:
            copied = fake_module(module) if isinstance(module, TrainModule) else _made(module, answers)
        facts.built(copied)
        run = start(copied, group)
        stack.enter_context(zero.usable(group))
        run.find_train_loader = partial(setup.training_loader, run, train_loader, datamodule)
        stack.enter_context(session(run, datamodule, lambda: simulation))
        setup.training_loader(run, train_loader, datamodule)
        yield run, simulation, answers


class NeedsValues(ValueError):
    """A module reads values of its tensors while it is made, so it cannot be made of tensors without them. The message names the line."""


def _made(module: Callable[[], TrainModule], answers: MissingValues) -> TrainModule:
    """What the function makes; an answer in the place of a value could make another module."""
    try:
        made = module()
    except Exception as error:
        if not answers.explain(error):
            raise
        raise NeedsValues(f"{answers.place(error)}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if found := answers.sentences():
        raise NeedsValues(f"{found[0].partition(': the plan')[0]} while the module is made")
    return made


def _steps(
    run: Run,
    simulation: Simulation,
    answers: MissingValues,
    train_loader: Any,
    datamodule: DataModule | None,
    batch: Any,
    samples: int,
    facts: JobFacts,
    target: Target,
    roles: Roles,
) -> RankTrace:
    """Set up the training and run two windows; the second is recorded."""
    engine = run.engine
    size = run.window_at(0)
    engine.accumulate_grad_batches = size
    data = engine.data_group
    weights = shares(((samples,) * data.world_size,) * size, data.rank)
    observer = StepObserver(_axes(run), target.accelerated)
    with simulation, observer, torch_private.eager():
        make_fake(run.module)
        observer.name(run.module)
        setup.training(run, train_loader, [], datamodule)
        # A plan takes a few steps more than a short training has, and a schedule may end with it.
        run.set_optimizers(run.optimizers, run.schedulers, automatic=False)
        observer.name(run.module)
        pipeline: Any = engine.strategy
        if pipeline.pipelined:
            pipeline.weighted = roles.weighted
        facts.ready(run, batch)
        engine.window.agree = list  # all ranks are like this one
        with without_writing():
            _begin(run, answers)
            size, error = _windows(run, partial(fake_batch, batch), weights, observer, answers)
    memory = observer.memory
    away = memory.leave_out(engine.strategy.on_host) if target.accelerated else {}
    timeline = memory.timeline()
    found = _found(run, observer, timeline, samples, size)
    return replace(found, on_host=away, missing=(*answers.sentences(), *([] if error is None else [error])))


def _found(run: Run, observer: StepObserver, timeline: tuple[Moment, ...], samples: int, size: int) -> RankTrace:
    """What was recorded, of so many micro-batches with so many samples each."""
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
        overlaps=getattr(run.engine.strategy, "overlaps", True),
    )


def _compiled(run: Run, module: nn.Module) -> list[str]:
    """What is not known of a compiled step; ``module``: the user's."""
    compiled = (
        getattr(inner, "_compiled_call_impl", None) or type(inner).__name__ == "OptimizedModule"
        for inner in module.modules()
    )
    if not run.settings.compile and not any(compiled):
        return []
    return [
        "torch.compile is left out: the plan is of the eager step; compiled, it keeps fewer activations and moves fewer bytes"
    ]


def _validation(run: Run, datamodule: DataModule | None, samples: int) -> list[str]:
    """Validation is not traced. Only with larger batches than the training's can it need more memory."""
    module, settings = run.module, run.settings
    off = settings.limit_val_batches == 0 or settings.val_every is None
    if off or not overrides(module, "validation_step"):
        return []
    given = datamodule.val_dataloader() if datamodule is not None else None
    found = module.val_dataloader() if given is None else given
    loaders = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else [found]
    largest = max((size for each in loaders if isinstance(size := getattr(each, "batch_size", 0), int)), default=0)
    if largest <= samples:
        return []
    return [
        f"validation is not traced: its batches have {largest} samples, the training's {samples}, so that it may need more memory than the step"
    ]


def _begin(run: Run, answers: MissingValues) -> None:
    """What a training does before its first batch."""
    run.optimization.begin()
    run.engine.window.accumulating = run.optimization.accumulates
    for hook in (*run.hooks.on_fit_start, *run.hooks.on_train_start, *run.hooks.on_train_epoch_start):
        try:
            of_the_epoch(run, [hook])
        except Exception as error:
            answers.leave_out(hook, error)


def _windows(
    run: Run, fresh: Callable[[], Any], weights: Sequence[Any], observer: StepObserver, answers: MissingValues
) -> tuple[int, str | None]:
    """Run windows until one communicates as the one before; the last is recorded. Its micro-batches, and what ended it early, in a sentence."""
    before = None
    for _ in range(MOST_WINDOWS):
        gc.collect()
        ready = [fresh()]
        observer.begin(run.module, _optimizers(run), leaves(ready), run.engine.strategy.kept())
        try:
            count = window(run, ready, fresh, weights, observer)
        except Exception as error:
            if not answers.explain(error):
                raise
            return len(weights), f"the plan ends at {answers.place(error)}: {type(error).__name__}: {error}"
        finally:
            observer.end()
        now = observer.collectives.collectives()
        if now == before:
            break
        before = now
    if not run.optimization.accumulates and run.state.step == 0:
        return count, f"no optimizer has stepped in {count} micro-batches of {type(run.module).__name__}.training_step"
    return count, None


def window(run: Run, ready: list[Any], fresh: Callable[[], Any], weights: Sequence[Any], observer: StepObserver) -> int:
    """One optimizer step, as :func:`engine.loop.train.train_epoch` makes it; returns how many micro-batches it has.

    One at a time is in memory: ``ready``, then ``fresh``. A module that steps by itself (``automatic_optimization = False``) gets micro-batches
    until it does.
    """
    optimization, recorder, hooks, state = run.optimization, run.recorder, run.hooks, run.state
    steps, count = state.step, 0
    alike = optimization.accumulates and not getattr(optimization, "keeps", False)  # LBFGS computes each of them again
    longest = 1 if optimization.accumulates else MOST_MICRO_BATCHES
    for share, times in _distinct(weights) if alike else [(share, 1) for share in weights] * longest:
        batch, index = ready.pop() if ready else fresh(), state.batch_idx
        observer.repeat(times)
        observer.memory.mark(leaves(batch), storages.INPUTS)
        run.engine.window.share = share
        recorder.size, recorder.batch = share.size, batch
        with observer.phase("forward"):
            for hook in hooks.on_train_batch_start:
                hook(run, run.module, batch, index)
            outputs = optimization.micro(batch, index, share)
        count, state.batch_idx = count + times, index + times
        observer.mark_gradients(_optimizers(run))
        observer.mark_kept(run.engine.strategy.kept())
        if share.last:
            run.stepping = True
            with observer.phase("optimizer step"):
                optimization.step()
            run.stepping = False
            observer.mark_kept(run.engine.strategy.kept())
        else:
            observer.mark_kept_gradients(run.module)
        with observer.phase("end"):
            for hook in hooks.on_train_batch_end:
                hook(run, run.module, outputs, batch, index)
        batch = outputs = recorder.batch = None
        if not optimization.accumulates and state.step > steps:
            break
    recorder.window += 1
    return count


def _distinct(weights: Sequence[Any]) -> list[tuple[Any, int]]:
    """The micro-batches of a window that differ, and how often each comes: those between the first, which makes gradients, and the last are alike."""
    if len(weights) < 4:
        return [(share, 1) for share in weights]
    return [(weights[0], 1), (weights[1], len(weights) - 2), (weights[-1], 1)]


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
