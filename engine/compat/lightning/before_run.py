"""Placeholder for the run in a ``Trainer`` that has not started one: has the facts that are known already, under the attributes of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from engine.compat.lightning.trainer_parts import AcceleratorConnector
from engine.config.settings import Settings
from engine.distributed.environments import Environment, detect
from engine.loop.run import Run
from engine.loop.state import TrainState
from engine.step.precision import Precision


@dataclass(frozen=True)
class MachinesBeforeRun:
    """The numbers of processes and machines that the settings ask for."""

    local_world_size: int
    num_nodes: int


@dataclass(frozen=True)
class GroupBeforeRun:
    """Placeholder for a run's process group, which has this process alone."""

    environment: MachinesBeforeRun
    rank = 0
    world_size = 1
    cpu = None


class _NotStarted:
    """Base of the placeholders: attributes that only a run has raise an error that says so."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no run has started: {name} is not known yet")


class EngineBeforeRun(_NotStarted):
    """Placeholder for a run's engine, with the devices, the ranks and the precision."""

    def __init__(self, settings: Settings, environment: Environment) -> None:
        devices = AcceleratorConnector(settings.accelerator, settings.devices)._parallel_devices
        self.precision = Precision.parse(settings.precision)
        self.group = GroupBeforeRun(MachinesBeforeRun(len(devices), settings.num_nodes))
        self.device: torch.device = devices[environment.local_rank % len(devices)]
        self.process_index, self.local_process_index = environment.rank, environment.local_rank
        self.num_processes, self.is_main_process = environment.world_size, environment.rank == 0

    def wait_for_everyone(self) -> None:
        """Return at once: this process is alone (:meth:`BeforeRun.check_all_evaluate`)."""

    def reduce(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``: this process is alone."""
        return value


class BeforeRun(_NotStarted):
    """Placeholder for the run in :class:`engine.compat.lightning.trainer_view.TrainerView`."""

    epoch = step = 0
    validated_step = -1
    stage = stop_reason = ""
    evaluating = stopping = interrupted = terminated = False
    module = datamodule = train_loader = exception = num_train_batches = loaded_from = stop_request = None
    samples = first_step = 0
    values: Mapping[str, Any] = MappingProxyType({})
    """The logged values of the run that this placeholder takes the place of."""
    optimizers: tuple[Any, ...] = ()
    schedulers = num_eval_batches = waiting_stops = optimizers

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.max_epochs, self.max_steps, self.callbacks = settings.max_epochs, settings.max_steps, settings.callbacks
        self.window_at, self.state = settings.accumulate_at, TrainState()
        self._environment = environment = detect(os.environ)
        self.rank, self.local_rank, self.world_size = environment.rank, environment.local_rank, environment.world_size
        self.is_main_process = self.rank == 0

    @classmethod
    def instead_of(cls, run: Run | BeforeRun, settings: Settings, values: Mapping[str, Any]) -> BeforeRun:
        """A placeholder that can be pickled, with the counters of ``run`` and the logged ``values``."""
        placeholder = cls(settings)
        placeholder.epoch, placeholder.step, placeholder.samples = run.epoch, run.step, run.samples
        placeholder.values = {name: value.item() for name, value in values.items()}
        return placeholder

    def check_all_evaluate(self, call: str) -> None:
        """Check that this process can answer ``call``, a method of ``trainer.strategy``, without other ranks.

        Raises:
            RuntimeError: there are several, which meet in a run.
        """
        if self.world_size > 1:
            raise RuntimeError(
                f"trainer.strategy.{call} before a run: {self.world_size} ranks were started, and they meet in a run only: "
                "call it in setup() or later"
            )

    def set_limit(self, name: str, value: int | None) -> None:
        """Set the limit ``name`` (``"max_epochs"`` or ``"max_steps"``) of the training to ``value``; see :meth:`engine.Run.set_limit`."""
        setattr(self, name, value)

    @cached_property
    def engine(self) -> EngineBeforeRun:
        """The placeholder for the engine; created at its first use, because asking for a missing device raises an error."""
        return EngineBeforeRun(self.settings, self._environment)
