"""The settings of a learning rate schedule, such as its length, that a checkpoint has and ``configure_optimizers`` gives."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from engine.utils.positioned_rates import is_function_of_position, move_to

_PHASES = "_schedule_phases"
"""The key under which ``OneCycleLR`` saves where its phases end, which its settings ``pct_start`` and ``three_phase`` decide."""


class ConfiguredSchedule:
    """A scheduler as ``configure_optimizers`` returned it, noted before a checkpoint's state is loaded into it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._state = copy.deepcopy(scheduler.state_dict())
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
        self._groups = [{name: _copied(value) for name, value in group.items() if name != "params"} for group in groups]

    def replaced(self, saved: Mapping[str, Any]) -> list[str]:
        """The settings that the ``saved`` state replaces, as ``"CosineAnnealingLR: T_max=4 (configured: 8)"``."""
        return [
            f"{kind}: {name.lstrip('_')}{'' if name == _PHASES else f'={_text(stored)} (configured: {_text(configured)})'}"
            for kind, name, configured, stored in _differences(self.scheduler, self._state, saved)
        ]

    def changed_rate(self, saved: Mapping[str, Any]) -> str | None:
        """The rate that functions of a ``LambdaLR``, which no checkpoint has, give in place of the saved one, as text; ``None``: the same."""
        scheduler, rates, base_rates = self.scheduler, saved.get("_last_lr"), saved.get("base_lrs")
        if not isinstance(scheduler, LambdaLR) or not isinstance(rates, list) or not isinstance(base_rates, list):
            return None
        position = saved.get("last_epoch", 0)
        for function, rate, base in zip(scheduler.lr_lambdas, rates, base_rates, strict=False):
            new = float(base * function(position))
            if not math.isclose(float(rate), new, rel_tol=1e-6, abs_tol=1e-12):
                return f"lr={new:.6g} at its step {position} (the checkpoint's: {float(rate):.6g})"
        return None

    def check_length(self, path: Path | str, saved: Mapping[str, Any]) -> None:
        """Check that a schedule that cannot go on beyond its end is not shorter in the checkpoint than it is configured.

        Raises:
            ValueError: it is.
        """
        if not isinstance(self.scheduler, OneCycleLR):
            return
        stored, configured = saved.get("total_steps"), self.scheduler.total_steps
        if isinstance(stored, int) and stored < configured:
            raise ValueError(
                f"{path} has OneCycleLR with total_steps={stored}, behind which it cannot step, and total_steps={configured} is configured: "
                f"Resume({str(path)!r}, hyperparameters='configured') (fit run: --hyperparameters configured) takes the new length, with the "
                "rates of a run of that length; or train no longer than the checkpoint's schedule"
            )

    def continue_configured(self, saved: Mapping[str, Any], siblings: Sequence[Any]) -> None:
        """Continue with the configured settings where the ``saved`` state, which is loaded, has others: with the rates that a run with these settings
        would have now.

        Args:
            siblings: the run's other schedulers.

        Raises:
            ValueError: what these rates are is unknown.
        """
        scheduler = self.scheduler
        if not self._differs(saved):
            return
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            for _, name, configured, _ in _differences(scheduler, self._state, saved):
                setattr(scheduler, name, configured)
            return
        optimizer = scheduler.optimizer
        problem = (
            f"Resume(hyperparameters='configured'): {type(scheduler).__name__} has other settings than the checkpoint's "
            f"({', '.join(self.replaced(saved))}), and "
        )
        if any(getattr(other, "optimizer", None) is optimizer for other in siblings):
            raise ValueError(
                f"{problem}another scheduler changes the rates of the same optimizer: join them (SequentialLR, ChainedScheduler), or configure the "
                "saved settings"
            )
        if len(self._groups) != len(_first_part(scheduler).base_lrs):
            raise ValueError(f"{problem}parameter groups were added after it was created: configure the saved settings")
        scheduler.load_state_dict(self._state)
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(values)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*lr_scheduler\.step\(\)", UserWarning)
            if is_function_of_position(scheduler):  # its position may be a number of tokens
                move_to(scheduler, _steps(saved))
                return
            for _ in range(_steps(saved)):
                scheduler.step()

    def _differs(self, saved: Mapping[str, Any]) -> bool:
        nested = any(isinstance(part, LambdaLR) for part in getattr(self.scheduler, "_schedulers", ()))
        return bool(nested or self.changed_rate(saved) or any(_differences(self.scheduler, self._state, saved)))


def _differences(
    scheduler: Any, state: Mapping[str, Any], saved: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any, Any]]:
    """The class, name, configured and saved value of each setting that differs, in ``scheduler`` and the schedulers that it joins.

    Settings are what the constructor takes and the state has under the same name.
    """
    kind = type(scheduler).__name__
    names = {*inspect.signature(type(scheduler)).parameters, "_milestones"} - {"last_epoch", "verbose"}
    settings = names & state.keys() & saved.keys()
    are_equal = True
    for name in sorted(settings):
        if not isinstance(state[name], Tensor) and _plain(state[name]) != _plain(saved[name]):
            are_equal = False
            yield kind, name, state[name], saved[name]
    if are_equal and _plain(state.get(_PHASES)) != _plain(saved.get(_PHASES)):
        yield kind, _PHASES, state[_PHASES], saved.get(_PHASES)
    for function, stored in zip(state.get("lr_lambdas") or (), saved.get("lr_lambdas") or (), strict=False):
        if isinstance(function, dict) and isinstance(stored, dict):
            for name in sorted(function.keys() & stored.keys()):
                if _plain(function[name]) != _plain(stored[name]):
                    yield kind, name, function[name], stored[name]
    parts, inner, inner_saved = (
        getattr(scheduler, "_schedulers", ()),
        state.get("_schedulers"),
        saved.get("_schedulers"),
    )
    if isinstance(inner, list) and isinstance(inner_saved, list) and len(inner) == len(inner_saved) == len(parts):
        for part, part_state, part_saved in zip(parts, inner, inner_saved, strict=True):
            yield from _differences(part, part_state, part_saved)


def _first_part(scheduler: Any) -> Any:
    """The scheduler, or the first of those that it joins."""
    parts = getattr(scheduler, "_schedulers", None)
    return _first_part(parts[0]) if parts else scheduler


def _steps(saved: Mapping[str, Any]) -> int:
    """How often a scheduler has stepped; a ``ChainedScheduler`` as often as each of its parts."""
    steps: int = saved["last_epoch"] if "last_epoch" in saved else _steps(saved["_schedulers"][0])
    return steps


def _plain(value: Any) -> Any:
    """A value in the form in which it comes from a file."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _text(value: Any) -> str:
    if isinstance(value, Mapping):  # the milestones of MultiStepLR
        return str([int(key) for key in sorted(value, key=int)])
    return f"{value:.6g}" if isinstance(value, float) else f"{value!s:.40}"


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
