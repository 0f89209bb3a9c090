"""A PyTorch trainer: ``Fit`` runs the loop, ``Engine`` serves your own loop. Names are imported when first used; ``__init__.pyi`` lists them."""

from engine.utils.lazy_names import lazy_names

__version__ = "0.1.0"
# Without callbacks, which ``from engine import *`` would import.
__getattr__, __dir__, _names = lazy_names(__name__, __file__, hidden=["callbacks"])
__all__ = ["__version__", *_names]
