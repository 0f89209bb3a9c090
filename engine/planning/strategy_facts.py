"""The facts about a strategy that a plan needs besides the trace of its step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

from torch import Tensor

from engine.strategies.base import Strategy
from engine.strategies.fsdp import FSDP
from engine.strategies.mesh_parallel import MeshParallel
from engine.strategies.pipeline import SCHEDULES

KeptTensors = tuple[str, list[Tensor], bool]
"""Tensors that a strategy keeps: their field of :class:`engine.planning.rank_trace.Memory`, the tensors, and whether they are in the host's
memory."""


@dataclass(frozen=True)
class StrategyFacts:
    """Facts about one strategy, known once it is connected to its process group."""

    on_host: tuple[str, ...] = ()
    """Fields of :class:`engine.planning.rank_trace.Memory` whose tensors are in the host's memory between steps."""
    overlaps: bool = True
    """Whether collectives run concurrently with the passes."""
    kept_tensors: Callable[[], Iterable[KeptTensors]] = tuple
    """Returns the tensors that the strategy itself keeps. Called between operations, so it must not run any."""
    schedule: str | None = None
    """The schedule of a pipeline, if there is one."""
    parts: int | None = None
    """Parts that a pipeline splits a micro-batch into; ``None``: as many as its schedule needs."""
    zero_stage: int = 0
    """The stage of ZeRO if the formulas of its paper apply, else 0."""
    refusal: str = ""
    """The error message if the strategy cannot be planned; empty if it can."""
    representatives: Callable[[], Sequence[int]] = lambda: (0,)
    """Returns, for each rank of a pipeline once its model is divided, the first rank whose stages compute the same and hold at least as many parts of
    a micro-batch at once."""


_CASES = {"engine.strategies.deepspeed.strategy": "engine.planning.zero"}
"""Module of a strategy -> the module that registers its facts, which is imported only when such a strategy is planned."""


@singledispatch
def strategy_facts(strategy: Strategy) -> StrategyFacts:
    """The facts about ``strategy``. Another package adds those of its own strategy with ``@strategy_facts.register``."""
    cases = [_CASES[kind.__module__] for kind in type(strategy).__mro__ if kind.__module__ in _CASES]
    if not cases:
        return StrategyFacts()
    importlib.import_module(cases[0])
    return strategy_facts(strategy)


@strategy_facts.register
def _fsdp(strategy: FSDP) -> StrategyFacts:
    return StrategyFacts(on_host=("parameters", "gradients", "optimizer_state") if strategy.cpu_offload else ())


@strategy_facts.register
def _mesh(strategy: MeshParallel) -> StrategyFacts:
    """The facts about a mesh, whose pipeline may have ranks that represent others."""

    def representatives() -> list[int]:
        assert strategy.pipeline is not None, "asked before setup"
        kinds, first_alike = strategy.pipeline.kinds(), [0]
        _, _, is_v_shaped = SCHEDULES[strategy.schedule]
        for rank in range(1, len(kinds)):
            # The first rank represents itself alone, as each rank of a V-shaped schedule does; the rank with the loss is always traced.
            in_the_middle = first_alike[-1] > 0 and rank != strategy.loss_stage and not is_v_shaped
            first_alike.append(first_alike[-1] if in_the_middle and kinds[rank] == kinds[first_alike[-1]] else rank)
        return first_alike

    return replace(
        _fsdp(strategy),
        representatives=representatives,
        schedule=strategy.schedule,
        parts=strategy.num_microbatches,
    )
