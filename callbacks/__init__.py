"""Callbacks for :class:`engine.Fit`: what to show, what to record, when to save and when to stop.

Each is one file and is imported when its name is first used, so that a run pays only for what it attaches. ``__init__.pyi`` lists the names.
``engine.callbacks`` is this package under a second name, for projects that have a ``callbacks.py`` of their own.
"""

from engine.utils.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
