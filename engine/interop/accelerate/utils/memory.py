"""The module :mod:`engine.interop.accelerate.memory` under the name that Accelerate has for it."""

from engine.interop.accelerate.memory import *  # noqa: F403
