"""The module :mod:`engine.config.from_accelerate.plugins` under the name that Accelerate has for it."""

from engine.config.from_accelerate.plugins import *  # noqa: F403
