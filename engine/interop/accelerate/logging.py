"""Loggers that know the ranks: this library's."""

from engine.distributed.rank_logger import RankLogger as MultiProcessAdapter  # noqa: F401
from engine.distributed.rank_logger import get_logger as get_logger
