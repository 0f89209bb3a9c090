"""Loggers that know the ranks: this library's."""

from engine.distributed.rank_zero import RankLogger as MultiProcessAdapter  # noqa: F401
from engine.distributed.rank_zero import get_logger as get_logger
