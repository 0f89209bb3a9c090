"""transformers' and peft's models in ``Fit`` and ``Engine``: see from_transformers.md in this folder."""

from engine.huggingface.files import Publication
from engine.huggingface.loss import CountedLoss
from engine.huggingface.module import HFModule
from engine.huggingface.optimizers import parameter_groups

__all__ = ["CountedLoss", "HFModule", "Publication", "parameter_groups"]
