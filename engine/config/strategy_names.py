"""The names of the library's strategies and where each is defined, in the form in which other packages register theirs. Imports no strategy."""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint

GROUP = "engine.strategies"
"""The entry-point group of strategies, which are callables whose arguments all have defaults."""
_DEEPSPEED = "engine.strategies.deepspeed"
BUILT_IN = {
    name: EntryPoint(name, value, GROUP)
    for name, value in {
        "single": "engine.strategies.base:Single",
        "ddp": "engine.strategies.ddp:DDP",
        "fsdp": "engine.strategies.fsdp:FSDP",
        "deepspeed": f"{_DEEPSPEED}:DeepSpeed",
        "deepspeed_stage_0": f"{_DEEPSPEED}:stage_0",
        "deepspeed_stage_1": f"{_DEEPSPEED}:stage_1",
        "deepspeed_stage_2": f"{_DEEPSPEED}:stage_2",
        "deepspeed_stage_3": f"{_DEEPSPEED}:stage_3",
        "deepspeed_stage_2_offload": f"{_DEEPSPEED}:stage_2_offload",
        "deepspeed_stage_3_offload": f"{_DEEPSPEED}:stage_3_offload",
        "tp": "engine.strategies.mesh_parallel:tensor_parallel_only",
        "pp": "engine.strategies.mesh_parallel:pipeline_parallel_only",
        "mesh": "engine.strategies.mesh_parallel:MeshParallel",
    }.items()
}


def is_there(point: EntryPoint) -> bool:
    """Check whether this installation contains the code of one of the library's strategies. Imports the package that contains the module."""
    spec = importlib.util.find_spec(point.module)
    return spec is not None and spec.has_location  # a removed folder that still has its __pycache__ has none
