"""transformers' and peft's models in ``Fit`` and ``Engine``: see from_transformers.md beside this folder."""

from engine.interop.transformers.files import Publication
from engine.interop.transformers.loss import CountedLoss
from engine.interop.transformers.module import HFModule
from engine.interop.transformers.optimizers import parameter_groups

__all__ = ["CountedLoss", "HFModule", "Publication", "parameter_groups"]
