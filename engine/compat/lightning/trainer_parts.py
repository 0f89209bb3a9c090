"""Objects that are attributes of :class:`engine.compat.lightning.trainer_view.TrainerView`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from engine.compat.lightning.events import RunningStage, TrainerFn, TrainerStatus, original
from engine.compat.lightning.names import OF_STRATEGIES, OF_STRATEGY
from engine.data.loader import BatchTransfer
from engine.distributed.collectives import broadcast_object
from engine.engine import Engine
from engine.loop.loaders import hooked_transfer
from engine.prepared import raw
from engine.utils.accelerator import count, device_type
from engine.utils.extensions import attribute_error


@dataclass(frozen=True)
class TrainerState:
    """The state of a trainer, with Lightning's enums."""

    status: TrainerStatus
    fn: TrainerFn | None
    """The method that was called; ``None`` before the first call."""
    stage: RunningStage | None
    """The stage that is running; ``None`` if nothing is."""

    @property
    def finished(self) -> bool:
        """Whether the latest call has finished."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """Whether the latest call has finished, or was interrupted."""
        return self.status in ("finished", "interrupted")


class RunCallbacks(list[Any]):
    """The callbacks of a run. They are fixed, so changing this list is an error."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "trainer.callbacks: the callbacks of a run are fixed: give them to the Trainer, return them from configure_callbacks, or change "
            "trainer.callbacks before fit"
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)  # a copy or a pickle of it is a plain list


class AcceleratorConnector:
    """The devices that a trainer uses, as a replacement for Lightning's private object of this name, which published packages read.

    Args:
        accelerator, devices: ``Fit``'s settings.

    Raises:
        ValueError, RuntimeError: this machine has no such device.
    """

    def __init__(self, accelerator: str = "auto", devices: Any = "auto") -> None:
        kind = device_type(accelerator)
        indices = list(devices) if isinstance(devices, (list, tuple)) else range(count(kind, devices))
        self._accelerator_flag = kind
        self._devices_flag: int | list[int] = len(indices) if kind == "cpu" else list(indices)
        self._parallel_devices = [torch.device("cpu") if kind == "cpu" else torch.device(kind, i) for i in indices]
        self.is_distributed = len(indices) > 1


class ProfilerView:
    """``trainer.profiler``: names parts of the code for torch's profiler, which ``callbacks.Profiler`` writes."""

    dirpath = filename = None

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    @contextmanager
    def profile(self, action_name: str) -> Iterator[None]:
        """Inside the block the profiler sees ``action_name``."""
        with torch.profiler.record_function(action_name):
            yield

    def start(self, action_name: str) -> None:
        """Begin the part ``action_name``."""
        self._open[action_name] = torch.profiler.record_function(action_name)
        self._open[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        """End the part ``action_name``."""
        self._open.pop(action_name).__exit__(None, None, None)

    def describe(self) -> None:
        """Do nothing: a profiler reports by itself at the training's end."""

    def summary(self) -> str:
        """An empty text: a profiler reports by itself."""
        return ""


class StrategyView:
    """The part of Lightning's ``trainer.strategy`` that modules use; the strategy itself is ``run.engine.strategy``."""

    def __init__(self, run: Any) -> None:
        self._engine: Engine = run.engine
        self._run = run

    def __getattr__(self, name: str) -> NoReturn:
        sentence = OF_STRATEGIES.get(name, OF_STRATEGY)
        raise attribute_error(self, name, sentence)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._engine.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0."""
        return self._engine.is_main_process

    @property
    def global_rank(self) -> int:
        """The rank of this process in the job."""
        return self._engine.process_index

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine."""
        return self._engine.local_process_index

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return self._engine.num_processes

    model = lightning_module = property(lambda self: original(self._run.module), doc="The module.")
    optimizers = property(lambda self: [raw(optimizer) for optimizer in self._run.optimizers], doc="The optimizers.")
    lr_scheduler_configs = property(lambda self: list(self._run.schedulers), doc="The trainer's.")

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return ``batch`` on ``device``, by default this process's, moved by the hooks of the data module or the module."""
        transfer = hooked_transfer(self._run.module, self._run.datamodule, dataloader_idx) or BatchTransfer()
        return transfer.move(batch, device or self.root_device, None)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint file or folder that ``TrainerView.save_checkpoint`` has written; only rank 0 deletes it."""
        path = Path(filepath)
        if self.is_global_zero and path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. ``name`` is not used."""
        self._run.check_all_evaluate("barrier()")
        self._engine.wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the ``obj`` of rank ``src`` on every rank, with its tensors on the CPU; all ranks must call this."""
        self._run.check_all_evaluate("broadcast()")
        return broadcast_object(self._engine.group, obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or with ``all=False`` any rank, passed a true ``decision``; all ranks must call this."""
        self._run.check_all_evaluate("reduce_boolean_decision()")
        votes = int(self._engine.reduce(torch.tensor(int(decision), device=self.root_device)))
        return votes == self.world_size if all else votes > 0
