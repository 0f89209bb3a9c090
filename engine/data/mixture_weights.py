"""The weights of a mixture as the user gives them: numbers, ``"proportional"``, ``"equal"``, by stage, or as repeats of each source."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import Any

from engine.config.duration import Duration, parse
from engine.data.mixture_draws import Stage
from engine.utils.errors import nearest

RULES = ("proportional", "equal")
_UNITS = ("samples", "tokens", "epochs", "steps")
_FORMS = "0, 10_000 (samples), '10_000 samples', '2 epochs', '1e9 tokens', '500 steps'"


@dataclass(frozen=True)
class StageStart:
    """When a stage of weights begins, in the user's unit."""

    amount: Fraction
    unit: str

    def __str__(self) -> str:
        return f"{self.amount if self.amount.denominator == 1 else float(self.amount)} {self.unit}"

    def draw(self, length: int | None, tokens_per_sample: int | None, samples_of_step: int | None) -> int | None:
        """The first draw of the stage; ``None`` if it is not known yet.

        Args:
            length: the draws in an epoch; ``None``: not known yet.
            samples_of_step: the samples of an optimizer step over all ranks; ``None``: not known.
        """
        if self.unit == "samples":
            return ceil(self.amount)
        if self.unit == "tokens":
            return None if tokens_per_sample is None else ceil(self.amount / tokens_per_sample)
        if length is None:
            return None
        if self.unit == "epochs":
            return ceil(self.amount * length)
        if samples_of_step is None:
            return None
        epochs, steps = divmod(int(self.amount), -(-length // samples_of_step))
        return epochs * length + steps * samples_of_step


@dataclass(frozen=True)
class WeightStage:
    """The shares of the sources from a start on; they add up to 1."""

    start: StageStart
    shares: tuple[Fraction, ...]


def parsed_weights(
    weights: Any, names: Sequence[str], sizes: Sequence[int | None], temperature: float
) -> list[WeightStage]:
    """Read the ``weights`` of a mixture.

    Args:
        sizes: the samples of each source; ``None`` for a stream that does not tell.

    Raises:
        ValueError, TypeError: the weights are not usable; the message says what to give.
    """
    if not isinstance(temperature, numbers.Real) or isinstance(temperature, bool) or not 0 < temperature < float("inf"):
        raise ValueError(
            f"Mixture(temperature={temperature!r}): it must be a number above 0; 1 keeps the weights, larger ones make them more equal"
        )
    if _is_by_stage(weights, names):
        stages = [WeightStage(_start(key), _shares(entry, names, sizes, temperature)) for key, entry in weights.items()]
        units = {stage.start.unit for stage in stages if stage.start.amount}
        if len(units) > 1:
            raise ValueError(
                f"Mixture(weights=...): the stages begin in several units ({', '.join(sorted(units))}), which cannot be ordered: give all of them "
                "in samples"
            )
        stages.sort(key=lambda stage: stage.start.amount)
        starts = [stage.start.amount for stage in stages]
        if starts[0]:
            raise ValueError(
                f"Mixture(weights=...): the first stage begins at {stages[0].start}, so there are no weights before: let it begin at 0"
            )
        if len(set(starts)) < len(starts):
            raise ValueError("Mixture(weights=...): two stages begin at the same time: leave one of them out")
    else:
        stages = [WeightStage(StageStart(Fraction(0), "samples"), _shares(weights, names, sizes, temperature))]
    for s, name in enumerate(names):
        if not any(stage.shares[s] for stage in stages):
            where = "in all stages" if len(stages) > 1 else "in weights"
            raise ValueError(
                f"Mixture: the source {name!r} has weight 0 {where}, so it would never be read: remove it from the sources, or give it a weight"
            )
    return stages


def repeated_weights(repeats: Any, names: Sequence[str], sizes: Sequence[int | None]) -> tuple[list[WeightStage], int]:
    """Read the ``repeats`` of a mixture. Returns the weights, and the draws in an epoch."""
    if not isinstance(repeats, Mapping):
        raise TypeError(
            f"Mixture(repeats={repeats!r}): give a dict of source name -> passes in an epoch, such as {{{names[0]!r}: 2}}; others are read once"
        )
    _refuse_unknown("repeats", repeats, names)
    _refuse_unsized("repeats", names, sizes)
    amounts = [
        _number("repeats", name, repeats.get(name, 1)) * (size or 0) for name, size in zip(names, sizes, strict=True)
    ]
    for name, amount in zip(names, amounts, strict=True):
        if not amount:
            raise ValueError(
                f"Mixture: the source {name!r} is repeated 0 times, so it would never be read: remove it from the sources, or give it a number"
            )
    total = sum(amounts)
    shares = tuple(amount / total for amount in amounts)
    return [WeightStage(StageStart(Fraction(0), "samples"), shares)], max(1, int(total))


def resolved(
    stages: Sequence[WeightStage],
    length: int | None,
    tokens_per_sample: int | None,
    samples_of_step: int | None,
) -> tuple[list[Stage], str]:
    """The stages whose first draw is known, and a text about the first one whose draw is not (empty: all are known). Arguments: see
    :meth:`StageStart.draw`."""
    located: list[Stage] = []
    problem = ""
    for stage in stages:
        draw = stage.start.draw(length, tokens_per_sample, samples_of_step)
        if draw is None:
            problem = problem or _problem_of(stage.start)
        elif located and draw <= located[-1].start:
            raise ValueError(
                f"Mixture(weights=...): the stage at {stage.start} begins with draw {draw}, and so does the one before it: leave one of them out"
            )
        else:
            located.append(Stage(draw, stage.shares))
    return located, problem


def _problem_of(start: StageStart) -> str:
    advice = f"Give the start in samples, as in weights={{0: ..., '{1_000_000} samples': ...}}"
    if start.unit == "tokens":
        return (
            f"a stage of the mixture's weights begins at {start}, and its sources do not all have the same tokens_per_sample, so the draw is not "
            f"known. {advice}"
        )
    if start.unit == "steps":
        return (
            f"a stage of the mixture's weights begins at {start}, and the samples of a step are not known for every number of ranks. {advice}. In a "
            "training with Fit, global_batch_size=<int> says it, too, without limit_train_batches and drop_last"
        )
    return f"a stage of the mixture's weights begins at {start}, and the length of an epoch is not known. {advice}, or samples= for the length"


def _is_by_stage(weights: Any, names: Sequence[str]) -> bool:
    return isinstance(weights, Mapping) and any(
        isinstance(entry, Mapping) or (isinstance(entry, str) and entry in RULES and key not in names)
        for key, entry in weights.items()
    )


def _start(key: Any) -> StageStart:
    """Read the start of a stage."""
    what = f"Mixture(weights=...): {key!r}"
    if isinstance(key, str):
        word = key.strip().lower().lstrip("0123456789_.e+ ")
        try:
            start = parse(key)
        except ValueError:
            raise ValueError(
                f"{what} is not the start of a stage{nearest(word, _UNITS)}; stages begin at {_FORMS}"
            ) from None
        if not word:
            raise ValueError(f"{what} has no unit; stages begin at {_FORMS}")
    elif isinstance(key, Duration):
        start = key
    elif isinstance(key, numbers.Integral) and not isinstance(key, bool):
        if int(key) < 0:
            raise ValueError(f"{what} is not the start of a stage; stages begin at {_FORMS}")
        start = Duration("samples", int(key))
    else:
        raise TypeError(f"{what} ({type(key).__name__}) is not the start of a stage; stages begin at {_FORMS}")
    if start.unit not in _UNITS:
        raise ValueError(f"{what} is not the start of a stage; stages begin at {_FORMS}")
    return StageStart(start.exact, start.unit)


def _shares(
    weights: Any, names: Sequence[str], sizes: Sequence[int | None], temperature: float
) -> tuple[Fraction, ...]:
    """The shares of the sources in one stage."""
    if isinstance(weights, str) and weights in RULES:
        if weights == "proportional":
            _refuse_unsized("weights='proportional'", names, sizes)
        values = [Fraction(size or 0) if weights == "proportional" else Fraction(1) for size in sizes]
    elif isinstance(weights, Mapping):
        _refuse_unknown("weights", weights, names)
        if missing := [name for name in names if name not in weights]:
            raise ValueError(
                f"Mixture(weights=...) has no weight for {', '.join(map(repr, missing))}: give every source a number (0: not read in this stage)"
            )
        values = [_number("weights", name, weights[name]) for name in names]
    else:
        hint = nearest(weights, RULES) if isinstance(weights, str) else ""
        raise (ValueError if isinstance(weights, str) else TypeError)(
            f"Mixture(weights={weights!r:.80}){hint}: give 'proportional', 'equal', a dict of source name -> number such as {{{names[0]!r}: 1}}, or "
            "a dict of stages, {0: ..., '10_000 samples': ...}"
        )
    if temperature != 1:
        values = [_tempered(name, value, temperature) for name, value in zip(names, values, strict=True)]
    total = sum(values)
    if not total:
        raise ValueError(
            "Mixture(weights=...): all weights are 0, so there is nothing to read: give a source a weight above 0"
        )
    return tuple(value / total for value in values)


def _tempered(name: str, value: Fraction, temperature: float) -> Fraction:
    """A weight at a temperature.

    Raises:
        ValueError: it is too large or too small for a number.
    """
    try:
        # Twelve digits, so that machines whose last digit differs have the same mixture.
        power = Fraction(f"{float(value) ** (1 / float(temperature)):.12g}") if value else value
    except (OverflowError, ZeroDivisionError, ValueError):
        power = None
    if power is None or (value and not power):
        raise ValueError(
            f"Mixture(temperature={temperature!r}): the weight of {name!r}, {float(min(value, Fraction(10**300))):.6g}, to the power of "
            f"1 / {float(temperature):.6g} is too large or too small for a share: give a temperature nearer to 1, or weights near 1"
        )
    return power


def _number(argument: str, name: str, value: Any) -> Fraction:
    """A weight as an exact number: 0.05 is the user's 1/20."""
    is_number = isinstance(value, (numbers.Real, Decimal)) and not isinstance(value, bool)
    if not is_number:
        raise TypeError(
            f"Mixture({argument}=...): the value for {name!r} is {value!r:.60} ({type(value).__name__}): give a number, 0 or more"
        )
    if not 0 <= value < float("inf"):
        raise ValueError(f"Mixture({argument}=...): the value for {name!r} is {value}: give a finite number, 0 or more")
    if isinstance(value, (numbers.Rational, Decimal)):
        return Fraction(value)
    return Fraction(repr(float(value)))


def _refuse_unknown(argument: str, values: Mapping[Any, Any], names: Sequence[str]) -> None:
    for name in values:
        if name not in names:
            raise ValueError(
                f"Mixture({argument}=...) names {name!r}, which is not a source{nearest(name, names)}; the sources are {', '.join(map(repr, names))}"
            )


def _refuse_unsized(what: str, names: Sequence[str], sizes: Sequence[int | None]) -> None:
    streams = [name for name, size in zip(names, sizes, strict=True) if size is None]
    if streams:
        raise ValueError(
            f"Mixture({what}) needs the number of samples of every source, and {', '.join(map(repr, streams))} is a stream, which has none: give "
            "weights={name: number}, or weights='equal'"
        )
