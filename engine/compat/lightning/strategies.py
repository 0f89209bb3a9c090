"""Strategies by Lightning's names and classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.compat.checked_arguments import as_device, checking_arguments
from engine.compat.lightning import strategy_arguments as strategies
from engine.config.typed_values import convert_arguments, hints
from engine.distributed.group import Group
from engine.strategies.base import Single, Strategy
from engine.strategies.ddp import DDP
from engine.strategies.fsdp import FSDP


class AsBase(type):
    """Metaclass of classes with Lightning's names: a call creates an object of the base class. ``translate`` converts the arguments."""

    translate: Callable[[Any], dict[str, Any]]

    def __call__(cls, *args: Any, **options: Any) -> Any:
        base = cls.__bases__[0]
        if isinstance(
            base, AsBase
        ):  # not when the class is defined: packages that define it are also imported for other purposes
            named = next(kind for kind in cls.__mro__ if not isinstance(kind, AsBase))
            raise TypeError(f"{cls.__name__}({base.__name__}): subclass engine.{named.__name__}, whose methods differ")
        if args:
            raise TypeError(f"{cls.__name__} takes its arguments by name")
        return base(**convert_arguments(cls.__name__, hints(base), cls.translate(options)))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__bases__[0])


class DDPStrategy(DDP, metaclass=AsBase):
    """:class:`engine.DDP` with Lightning's arguments."""

    translate = staticmethod(strategies.ddp)


class FSDPStrategy(FSDP, metaclass=AsBase):
    """:class:`engine.FSDP` with Lightning's arguments."""

    translate = staticmethod(strategies.fsdp)


class SingleDeviceStrategy(Single):
    """A single process, which computes on ``device``."""

    @checking_arguments()
    def __init__(self, device: torch.device | str | int | None = None, **options: Any) -> None:
        super().__init__(**strategies.single(options))
        self.device = as_device("SingleDeviceStrategy", device)

    def trainer_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The values of ``Trainer``'s arguments that select this device.

        Raises:
            ValueError: ``arguments`` select another device.
        """
        if self.device is None:
            return {"strategy": "single_device"}
        kind, index = self.device.type, self.device.index
        is_same = arguments["accelerator"] in ("auto", kind) or (kind != "cpu" and arguments["accelerator"] == "gpu")
        if not is_same or arguments["devices"] not in ("auto", 1, "1", index, [index]):
            raise ValueError(
                f"SingleDeviceStrategy(device='{self.device}') contradicts Trainer(accelerator={arguments['accelerator']!r}, "
                f"devices={arguments['devices']!r}): leave these two out"
            )
        devices = 1 if index is None or kind == "cpu" else [index]
        return {"strategy": "single_device", "accelerator": kind, "devices": devices}

    def connect(self, group: Group) -> None:
        super().connect(group)
        device = self.device or group.device
        if device.type != group.device.type or device.index not in (None, group.device.index or 0):
            raise ValueError(
                f"SingleDeviceStrategy(device='{device}'), but this process computes on {group.device}: give Fit(accelerator={device.type!r}, "
                f"devices=[{device.index or 0}])"
            )


ParallelStrategy = Strategy
