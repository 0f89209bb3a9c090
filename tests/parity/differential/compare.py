"""Where what the library gave differs from what it must give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .cases import REPLICATED, Case, pipelined
from .reference import Trained

Answers = list[dict[str, Any]]
"""What each rank reports: a :class:`Trained` as JSON."""

BOUNDS = {"64-true": 1e-9, "32-true": 2e-4, "16-mixed": 0.05, "bf16-mixed": 0.15}
"""Of an error, relative to the largest value of a quantity (of weights: to the largest change by the training)."""


def differences(case: Case, expected: Trained, runs: Sequence[Answers]) -> list[str]:
    """What is wrong, a line each; ``runs`` has each run's answers."""
    found: list[str] = []
    found += _steps(case, expected, runs)
    if case.noisy:
        return found or _replicas(case, runs)
    if not found:
        found += _weights(case, expected, runs)
        found += _numbers("learning rate", expected.lrs, _merged(runs, "lrs"), 1e-12)
        if case.clip == "norm" and not case.manual and case.closure in ("", "warmup"):
            norms = {step: [value] for step, value in expected.norms.items()}
            found += _numbers(
                "gradient norm", norms, {step: [value] for step, value in _merged(runs, "norms").items()}, _bound(case)
            )
        found += _logs(case, expected, runs)
        for rank, answer in enumerate(runs[-1]):
            for what, want, have in zip(
                ("evaluation", "evaluation of the second loader"), expected.evaluated, answer["evaluated"], strict=False
            ):
                found += _numbers(
                    f"{what} on rank {rank}", {expected.steps: want}, {expected.steps: have}, _bound(case)
                )
            if len(expected.evaluated) != len(answer["evaluated"]):
                found.append(
                    f"evaluation on rank {rank}: {len(answer['evaluated'])} loaders, expected {len(expected.evaluated)}"
                )
            found += _numbers(
                f"predictions on rank {rank}",
                {expected.steps: expected.predictions},
                {expected.steps: answer["predictions"]},
                _bound(case),
            )
    return found


def _bound(case: Case) -> float:
    return BOUNDS["bf16-mixed" if case.ddp == "bf16" else case.precision]


def _merged(runs: Sequence[Answers], name: str, rank: int = 0) -> dict[int, Any]:
    return {int(step): value for answers in runs for step, value in answers[rank][name].items()}


def _steps(case: Case, expected: Trained, runs: Sequence[Answers]) -> list[str]:
    found = []
    for rank, answer in enumerate(runs[-1]):
        if answer["steps"] != expected.steps:
            found.append(f"steps on rank {rank}: {answer['steps']}, expected {expected.steps}")
    seen: dict[str, Counter[int]] = {}
    pieces = (item for answers in runs for answer in _distinct(case, answers) for item in answer["seen"].items())
    for place, numbers in pieces:
        seen[place] = seen.get(place, Counter()) + Counter(numbers)
    if pipelined(case.strategy, case.second):
        return found
    last = {place.split(":")[0]: place for place in expected.seen}
    for place, numbers in expected.seen.items():
        missing, more = Counter(numbers) - seen.get(place, Counter()), seen.get(place, Counter()) - Counter(numbers)
        repeated = place in last.values()  # a rank that has run out repeats some
        if missing or (more and not repeated):
            found.append(
                f"samples of step {place}: {sorted(seen.get(place, Counter()).elements())}, expected {numbers}"
            )
    found += [
        f"samples of step {place}: {sorted(seen[place].elements())}, expected none"
        for place in seen
        if place not in expected.seen
    ]
    return found


def _distinct(case: Case, answers: Answers) -> Answers:
    """One rank of those that see the same samples: neighbours, of tensor parallel."""
    parallel = any(name.startswith("tp2") for name in (case.strategy, case.second))
    twice = (
        parallel
        and len(answers) % 2 == 0
        and all(a["seen"] == b["seen"] for a, b in zip(answers[::2], answers[1::2], strict=True))
    )
    return answers[::2] if twice else answers


def _replicas(case: Case, runs: Sequence[Answers]) -> list[str]:
    """Where ranks that hold the same parameters differ: to the bit."""
    found = []
    for part, answers in enumerate(runs):
        if (case.second if part else case.strategy) in REPLICATED:
            for rank, answer in enumerate(answers):
                for step, values in answer["weights"].items():
                    if values != answers[0]["weights"][step]:
                        found.append(f"weights after step {step}: rank {rank} differs from rank 0")
                        break
    return found


def _weights(case: Case, expected: Trained, runs: Sequence[Answers]) -> list[str]:
    found = []
    change = max(
        [1e-3, *(abs(a - b) for w in expected.weights.values() for a, b in zip(w, expected.initial, strict=True))]
    )
    for part, answers in enumerate(runs):
        name = case.second if part else case.strategy
        for rank, answer in enumerate(answers):
            if name in REPLICATED:
                steps = {int(step): value for step, value in answer["weights"].items()}
                found += [
                    f"{line}, rank {rank}"
                    for line in _numbers("weights", expected.weights, steps, _bound(case), change, False)
                ]
    for rank, answer in enumerate(runs[-1]):
        if answer["final"] or not rank:
            at_end = answer["final"]
            found += _numbers(
                f"state at the end, rank {rank}:",
                {expected.steps: expected.final},
                {expected.steps: at_end},
                _bound(case),
                change,
            )
    return found[:3]


def _numbers(
    what: str,
    expected: dict[int, list[float]],
    found: dict[int, list[float]],
    bound: float,
    scale: float | None = None,
    complete: bool = True,
) -> list[str]:
    """The first step at which values differ."""
    for step, values in sorted(expected.items()):
        if step not in found:
            if complete:
                return [f"{what} after step {step}: missing"]
            continue
        if len(values) != len(found[step]):
            return [f"{what} after step {step}: {len(found[step])} values, expected {len(values)}"]
        size = scale if scale is not None else max([1e-6, *map(abs, values)])
        for index, (want, have) in enumerate(zip(values, found[step], strict=True)):
            if not _close(want, have, bound * size):
                return [f"{what} after step {step}, value {index}: {have!r}, expected {want!r}"]
    return []


def _close(want: float, have: float, within: float) -> bool:
    return (math.isnan(want) and math.isnan(have)) or abs(want - have) <= within


def _logs(case: Case, expected: Trained, runs: Sequence[Answers]) -> list[str]:
    found: list[str] = []
    every = [range(len(answers)) for answers in runs]
    for rank in range(min(map(len, every))):
        logs: dict[int, dict[str, float]] = {}
        for answers in runs:
            for step, values in answers[rank]["logs"].items():
                logs.setdefault(int(step), {}).update(values)
        for step, values in sorted(expected.logs.items()):
            for name, want in values.items():
                have = logs.get(step, {}).get(name)
                if have is None:
                    if not _may_miss(case, step, name, want):
                        found.append(f"logged {name} at step {step}: missing, rank {rank}")
                elif not math.isnan(want) and not _close(want, have, _bound(case) * max(1.0, abs(want))):
                    found.append(f"logged {name} at step {step}: {have!r}, expected {want!r}, rank {rank}")
        for step, values in sorted(logs.items()):
            extra = [name for name in values if name.startswith("val") and name not in expected.logs.get(step, {})]
            if extra:
                found.append(f"logged {extra} at step {step}, expected none, rank {rank}")
        if found:
            break
    return found[:3]


def _may_miss(case: Case, step: int, name: str, want: float) -> bool:
    if math.isnan(want):  # a mean over nothing
        return True
    if case.door == "engine":
        return not name.startswith("val") or name == "val_squares"
    return case.killed and step == case.resume and name == "loss_step"
