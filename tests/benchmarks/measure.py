"""Fair timing: whole runs, interleaved, start-up subtracted, each compared with the bare loop of the same round."""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
from cases import Case, Contender, Work
from torch.nn.utils import parameters_to_vector

CHECK_STEPS = 20


@dataclass(frozen=True)
class Sample:
    """What one contender needs for a step of one case. Medians over the rounds, microseconds."""

    case: str
    contender: str
    kind: str
    """``"bare"``, ``"ours"`` or ``"peer"``."""
    step_us: float
    over_us: float
    """Time above the bare loop of the same round; 0 for the bare loop itself."""
    over_quartiles_us: tuple[float, float]
    """Lower and upper quartile of ``over_us``: how far the rounds agree."""
    fastest_over_us: float
    """The same from the fastest runs of all rounds: on a busy machine, whose noise only ever adds, the steadier number."""
    ratio: float
    """Time divided by that of the bare loop of the same round."""


@dataclass
class Times:
    """Seconds of one contender's runs, a short one and a long one a round. Their difference holds no start-up."""

    steps: int
    """Steps that a long run has more than a short one."""
    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)

    def steps_us(self) -> list[float]:
        """Microseconds of a step, one value a round."""
        return [(long - short) / self.steps * 1e6 for short, long in zip(self.short, self.long, strict=True)]

    def fastest_us(self) -> float:
        return (min(self.long) - min(self.short)) / self.steps * 1e6


@dataclass(frozen=True)
class Watch:
    """How a run is timed: ``before`` is called in front of it (a barrier, where there are several processes), ``clock`` gives seconds.

    The processor time of a loop that never waits is its wall-clock time on an idle machine, and hardly moves
    on a busy one (quartiles of a 150 us step, with both cores in other use: 3 us against 30 us). Processes that
    wait for each other need the wall clock.
    """

    clock: Callable[[], float] = time.process_time
    before: Callable[[], None] = lambda: None


def seconds(train: Callable[[Work], object], work: Work, watch: Watch) -> float:
    """Time of one whole run.

    The collector stays on, so that everyone pays for the cycles that he makes, but what was imported
    before is taken out of its sight: otherwise all would pay for the size of the largest peer.
    """
    gc.collect()
    gc.freeze()
    watch.before()
    start = watch.clock()
    train(work)
    return watch.clock() - start


def disagreement(case: Case, contender: Contender, expected: torch.Tensor) -> str:
    """Why a contender's weights after a few steps are not those of the bare loop; empty when they are."""
    found = parameters_to_vector(contender.train(case.work(CHECK_STEPS)).parameters()).detach()
    # Peers differ in what they run in bf16 around the loss; a lost or doubled step is off by far more than this.
    tolerance = 1e-2 if case.bf16 else 1e-6
    if torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
        return ""
    return f"other weights than the bare loop after {CHECK_STEPS} steps (off by {(found - expected).abs().max():.1e})"


def admit(case: Case, bare: Contender, others: Sequence[Contender]) -> tuple[list[Contender], dict[str, str]]:
    """Those that do the case's work, and for each of the others what is wrong with it. Also warms everything up.

    Raises what one of ours raises, and ``AssertionError`` when ours trains other weights than the bare loop.
    """
    expected = parameters_to_vector(bare.train(case.work(CHECK_STEPS)).parameters()).detach()
    able, wrong = [], {}
    for contender in others:
        if not contender.can(case):
            continue
        try:
            reason = disagreement(case, contender, expected)
        except Exception as error:
            if contender.kind != "peer":
                raise
            reason = f"{type(error).__name__}: {error}"
        assert not reason or contender.kind == "peer", f"{case.name}, {contender.name}: {reason}"
        if reason:
            wrong[contender.name] = reason
        else:
            able.append(contender)
    return able, wrong


def interleave(case: Case, contenders: Sequence[Contender], rounds: int, steps: int, watch: Watch) -> dict[str, Times]:
    """The times of ``rounds`` runs of ``steps`` steps and of a tenth of them, by contender.

    Everyone runs once in a round, and each round starts with another one, so that a busy moment of the
    machine or its warming up meets all alike.
    """
    short, long = case.work(max(1, steps // 10)), case.work(steps)
    found: dict[str, Times] = {contender.name: Times(long.steps - short.steps) for contender in contenders}
    for turn in range(rounds):
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            found[contender.name].short.append(seconds(contender.train, short, watch))
            found[contender.name].long.append(seconds(contender.train, long, watch))
    return found


def summarise(case: Case, contenders: Sequence[Contender], found: dict[str, Times], bare: Contender) -> list[Sample]:
    """One ``Sample`` a contender; differences and ratios are taken inside a round first, then their median."""
    samples = []
    bare_steps, bare_fastest = found[bare.name].steps_us(), found[bare.name].fastest_us()
    for contender in contenders:
        steps = found[contender.name].steps_us()
        over = [mine - base for mine, base in zip(steps, bare_steps, strict=True)]
        low, _, high = quantiles(over, n=4) if len(over) > 1 else (over[0],) * 3
        samples.append(
            Sample(
                case=case.name,
                contender=contender.name,
                kind=contender.kind,
                step_us=median(steps),
                over_us=median(over),
                over_quartiles_us=(low, high),
                fastest_over_us=found[contender.name].fastest_us() - bare_fastest,
                ratio=median(mine / base for mine, base in zip(steps, bare_steps, strict=True)),
            )
        )
    return samples


def measure(
    cases: Sequence[Case],
    bare: Contender,
    others: Sequence[Contender],
    *,
    rounds: int,
    steps: int,
    watch: Watch,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[list[Sample], dict[str, str]]:
    """All samples of these cases, and ``"case, contender": reason`` for everyone who could not take part."""
    samples: list[Sample] = []
    wrong: dict[str, str] = {}
    admitted: list[list[Contender]] = []
    for case in cases:
        able, unfit = admit(case, bare, others)
        admitted.append([bare, *able])
        wrong |= {f"{case.name}, {name}": reason for name, reason in unfit.items()}
    for case, contenders in zip(cases, admitted, strict=True):
        tell(f"{case.name}: {rounds} rounds of {steps} steps")
        samples += summarise(case, contenders, interleave(case, contenders, rounds, steps, watch), bare)
    return samples, wrong


def machine() -> dict[str, object]:
    """What the numbers depend on: versions, cores, threads, how busy the machine is with other things (1-minute load)."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def tell(line: str) -> None:
    """A line of progress, apart from the results."""
    print(line, file=sys.stderr, flush=True)
