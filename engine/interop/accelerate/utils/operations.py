"""The module :mod:`engine.interop.accelerate.operations` under the name that Accelerate has for it."""

from engine.interop.accelerate.operations import *  # noqa: F403
