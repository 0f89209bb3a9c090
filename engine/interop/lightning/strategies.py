"""Strategies by Lightning's names and classes."""

from __future__ import annotations

from typing import Any

from engine.config.from_lightning import strategies
from engine.config.lightning_names import CLASSES
from engine.config.other_trainers import refusing
from engine.strategies.base import Single, Strategy
from engine.strategies.ddp import DDP
from engine.strategies.fsdp import FSDP


def DDPStrategy(**options: Any) -> DDP:
    return DDP(**strategies.ddp(options))


def FSDPStrategy(**options: Any) -> FSDP:
    return FSDP(**strategies.fsdp(options))


def SingleDeviceStrategy(device: Any = None, **options: Any) -> Single:
    return Single(**strategies.single(options))


ParallelStrategy = Strategy
__getattr__ = refusing(__name__, CLASSES)
