"""Models that other tools have wrapped already: their gradients would be reduced twice, or by nobody who knows of windows."""

from __future__ import annotations

from torch import nn

# By name: importing them takes longer than everything else here.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "settings of it go into the strategy: DDP(find_unused_parameters=True), for example",
    "torch.nn.parallel.data_parallel.DataParallel": "strategy='ddp' with a process for each device does its work",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "strategy='fsdp' shards it",
    "deepspeed.runtime.engine.DeepSpeedEngine": "strategy='deepspeed' makes the engine",
}


def check_plain(model: nn.Module) -> None:
    """Raise unless no part of ``model`` is wrapped for distributed training already.

    Raises:
        ValueError: names the part, the wrapper and what to give in its place.
    """
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            advice = _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
            if advice is not None:
                where = f"its part {name!r}" if name else "it"
                raise ValueError(
                    f"the model ({type(model).__name__}) is to be prepared, but {where} is wrapped in {base.__name__} already: give the plain module "
                    f"({name + '.' if name else ''}module); {advice}"
                )
