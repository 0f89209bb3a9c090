"""Lightning's names over this library: ``import engine.interop.lightning as L``, and a Lightning project runs."""

from __future__ import annotations

from engine.data.combined_loaders import CombinedLoader as CombinedLoader
from engine.interop.lightning import callbacks as callbacks
from engine.interop.lightning import loggers as loggers
from engine.interop.lightning import strategies as strategies
from engine.interop.lightning.callback import Callback as Callback
from engine.interop.lightning.callback import adapted as adapted
from engine.interop.lightning.module import LightningDataModule as LightningDataModule
from engine.interop.lightning.module import LightningModule as LightningModule
from engine.interop.lightning.trainer import Trainer as Trainer
from engine.utils.seed import seed_everything as seed_everything
