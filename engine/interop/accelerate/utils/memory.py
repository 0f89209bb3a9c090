"""The module :mod:`engine.utils.batch_sizes` under the name that Accelerate has for it."""

from engine.utils.batch_sizes import *  # noqa: F403
