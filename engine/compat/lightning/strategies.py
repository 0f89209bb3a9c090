"""Strategies by Lightning's names and classes."""

from __future__ import annotations

from typing import Any

from engine.compat.lightning import strategy_arguments as strategies
from engine.compat.lightning.names import CLASSES
from engine.compat.refusals import refusing
from engine.strategies.base import Single, Strategy
from engine.strategies.ddp import DDP
from engine.strategies.fsdp import FSDP


class DDPStrategy(DDP, metaclass=strategies.AsBase):
    given = staticmethod(strategies.ddp)


class FSDPStrategy(FSDP, metaclass=strategies.AsBase):
    given = staticmethod(strategies.fsdp)


def SingleDeviceStrategy(device: Any = None, **options: Any) -> Single:
    return Single(**strategies.single(options))


ParallelStrategy = Strategy
__getattr__ = refusing("engine.compat.lightning.strategies", CLASSES)
