"""Loggers: callbacks that record logged metrics, one backend per file."""

from __future__ import annotations

from .base import Logger as Logger
from .base import Moment as Moment
