"""Accelerate's process-wide objects, which describe this process and its latest training loop. The engine does not read them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, ClassVar

import torch

from engine.compat.accelerate.arguments import flag_of
from engine.compat.accelerate.utils.dataclasses import DistributedType, GradientAccumulationPlugin
from engine.distributed.group import Group
from engine.distributed.join import join_here, own_environment
from engine.distributed.rank_work import only
from engine.engine import Engine


class _Shared:
    """Base of classes whose instances all share the same attributes."""

    _shared_state: ClassVar[dict[str, Any]]

    @property
    def initialized(self) -> bool:
        return bool(self._shared_state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_this_process, (type(self),)

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._shared_state.clear()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"`{type(self).__name__}` object has no attribute {name!r}: make an Accelerator first")


def _of_this_process(kind: type[_Shared]) -> _Shared:
    """A pickled state, which describes the process that reads the pickle; it joins nothing."""
    state = object.__new__(kind)
    state.__dict__ = kind._shared_state
    return state


class PartialState(_Shared):
    """The processes of this job; creating the first instance joins it. The methods are those of :class:`engine.Engine`."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    group: Group
    distributed_type: Any
    debug: bool
    fork_launched = False

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        """``kwargs``: ``timeout`` of joining and of collectives, and ``backend``, which must be the device's default. Others raise an error."""
        self.__dict__ = self._shared_state
        cpu = cpu or flag_of("ACCELERATE_USE_CPU")
        if not self.initialized:
            self._join(cpu, **kwargs)
        elif cpu and self.device.type != "cpu":
            raise ValueError(
                f"cpu=True, but this process computes on {self.device} already: give it to the first Accelerator"
            )

    def _join(
        self, cpu: bool, timeout: timedelta | None = None, backend: str | None = None, **further_arguments: Any
    ) -> None:
        """Join the job and set the shared attributes."""
        if unsupported := [name for name, value in further_arguments.items() if value is not None]:
            raise ValueError(
                f"{', '.join(unsupported)}: the launcher's variables say how processes join (fit env); leave it out"
            )
        device_name = os.environ.get("ACCELERATE_TORCH_DEVICE", "")
        cpu = cpu or device_name == "cpu"
        group = join_here(
            own_environment(), "cpu" if cpu else "auto", timeout=timeout or timedelta(minutes=30), debug=False
        )
        kind = group.device.type
        if device_name not in ("", kind, str(group.device)):
            raise ValueError(
                f"ACCELERATE_TORCH_DEVICE={device_name}: this process computes on {group.device}; choose among several devices with "
                "CUDA_VISIBLE_DEVICES, and leave it out"
            )
        if backend not in (None, "nccl", torch.distributed.get_default_backend_for_device(kind)):
            raise ValueError(f"backend={backend!r}: the device decides it; leave it out")
        type_of_several = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU"}.get(kind, f"MULTI_{kind.upper()}")
        self.group, self.debug = group, flag_of("ACCELERATE_DEBUG_MODE")
        self.distributed_type = DistributedType[type_of_several if group.world_size > 1 else "NO"]

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}\nNum processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\nLocal process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    use_distributed = property(lambda self: self.group.world_size > 1)
    backend = property(lambda self: torch.distributed.get_backend() if self.use_distributed else None)

    def on_local_process(self, function: Any = None, local_process_index: int = 0) -> Any:
        return only(function, lambda: self.group.local_rank == local_process_index)

    def destroy_process_group(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        self.group.close()


for _name in (
    *("device", "process_index", "local_process_index", "num_processes", "is_main_process", "is_local_main_process"),
    *("is_last_process", "print", "on_main_process", "on_local_main_process", "on_last_process", "on_process"),
    *("wait_for_everyone", "main_process_first", "local_main_process_first", "split_between_processes"),
):
    setattr(PartialState, _name, vars(Engine)[_name])  # these methods only use self.group


class AcceleratorState(PartialState):
    """:class:`PartialState` with the settings of the newest :class:`Accelerator`."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **settings: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized or settings:
            defaults = {"mixed_precision": mixed_precision or "no", "deepspeed_plugin": None, "fsdp_plugin": None}
            self.__dict__.update({**vars(PartialState(cpu)), **defaults, **settings})

    def __repr__(self) -> str:
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"


class GradientState(_Shared):
    """The loader that is being iterated over, and whether the latest micro-batch ends its accumulation window."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    plugin: Any
    sync_gradients: bool
    dataloader_references: list[Any]
    """Loaders that are being iterated over, the innermost last."""

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.__dict__.update(plugin=GradientAccumulationPlugin(), sync_gradients=True, dataloader_references=[])
        if gradient_accumulation_plugin is not None:
            self.plugin = gradient_accumulation_plugin

    num_steps = property(lambda self: int(self.plugin.num_steps))
    plugin_kwargs = property(lambda self: self.plugin.to_kwargs())
    adjust_scheduler = property(lambda self: self.plugin.adjust_scheduler)
    sync_with_dataloader = property(lambda self: self.plugin.sync_with_dataloader)
    in_dataloader = property(lambda self: bool(self.dataloader_references))
    active_dataloader = property(lambda self: self.dataloader_references[-1] if self.in_dataloader else None)
    end_of_dataloader = property(lambda self: self.in_dataloader and self.active_dataloader.end_of_dataloader)
    remainder = property(lambda self: self.active_dataloader.remainder if self.in_dataloader else -1)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients
