"""The module :mod:`engine.interop.accelerate.random_numbers` under the name that Accelerate has for it."""

from engine.interop.accelerate.random_numbers import *  # noqa: F403
