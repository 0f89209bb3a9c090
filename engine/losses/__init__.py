"""Losses over large vocabularies that never make their logits; see the README beside this file. Names are imported when first used."""

from engine.utils.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
