"""This library's rank-aware loggers under Accelerate's names."""

from engine.distributed.rank_work import RankLogger as MultiProcessAdapter  # noqa: F401
from engine.distributed.rank_work import get_logger as get_logger
