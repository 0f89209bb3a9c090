"""Loggers that know the ranks: this library's."""

from engine.distributed.rank_work import RankLogger as MultiProcessAdapter  # noqa: F401
from engine.distributed.rank_work import get_logger as get_logger
