"""The module :mod:`engine.interop.accelerate.settings` under the name that Accelerate has for it."""

from engine.interop.accelerate.settings import *  # noqa: F403
