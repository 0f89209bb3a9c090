"""The parts of a plan."""

from __future__ import annotations

from engine.planning.rank_trace import Collective as Collective
from engine.planning.rank_trace import Memory as Memory
from engine.planning.rank_trace import Moment as Moment
from engine.planning.rank_trace import Operation as Operation
from engine.planning.rank_trace import RankTrace as RankTrace
