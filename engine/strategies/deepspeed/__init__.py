"""DeepSpeed: ZeRO stages 0 to 3 with offload; its engine runs inside our loop."""

from __future__ import annotations

from functools import partial

from engine.strategies.deepspeed.strategy import DeepSpeed

stage_0, stage_1, stage_2, stage_3 = (partial(DeepSpeed, stage=stage) for stage in range(4))
stage_2_offload = partial(DeepSpeed, stage=2, offload_optimizer=True)
stage_3_offload = partial(DeepSpeed, stage=3, offload_optimizer=True, offload_parameters=True)

__all__ = ["DeepSpeed", "stage_0", "stage_1", "stage_2", "stage_2_offload", "stage_3", "stage_3_offload"]
