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
    """Facts about one strategy, after ``connect``."""

    on_host: tuple[str, ...] = ()
    """Fields of :class:`engine.planning.rank_trace.Memory` that are in the host's memory between steps."""
    overlaps: bool = True
    """Whether collectives run beside the passes."""
    kept_tensors: Callable[[], Iterable[KeptTensors]] = tuple
    """The strategy's own tensors. Asked between operations: it must not compute."""
    schedule: str | None = None
    """The schedule of a pipeline, if there is one."""
    parts: int | None = None
    """Parts of a micro-batch in a pipeline; ``None``: as many as its schedule needs."""
    zero_stage: int = 0
    """The stage of ZeRO, where the formulas of its paper apply."""
    refusal: str = ""
    """The error of a plan that cannot be made."""
    alike: Callable[[], Sequence[int]] = lambda: (0,)
    """For each place in a pipeline, once the model is divided, the first place whose stages compute alike and hold at least as many parts of a
    micro-batch at once."""


_CASES = {"engine.strategies.deepspeed.strategy": "engine.planning.zero"}
"""By a strategy's module, the module that registers its case. Loaded when the strategy is planned, because few are."""


@singledispatch
def strategy_facts(strategy: Strategy) -> StrategyFacts:
    """The facts about ``strategy``. A package's own strategy adds its case by ``@strategy_facts.register``."""
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
    def alike() -> list[int]:
        assert strategy.pipeline is not None, "alike before setup"
        kinds, places = strategy.pipeline.kinds(), [0]
        for place in range(1, len(kinds)):
            middle = places[-1] > 0 and place != strategy.loss_stage and not SCHEDULES[strategy.schedule][2]
            places.append(places[-1] if middle and kinds[place] == kinds[places[-1]] else place)
        return places

    return replace(_fsdp(strategy), alike=alike, schedule=strategy.schedule, parts=strategy.num_microbatches)
