"""Loggers: callbacks that record logged metrics, one backend per file. ``__init__.pyi`` lists the names."""

from engine.utils.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__, hidden=["TRACKERS"])
