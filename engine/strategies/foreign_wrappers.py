"""Detects models that are already wrapped by other tools: their gradients would be reduced twice, or in every micro-batch."""

from __future__ import annotations

from torch import nn

from engine.config.strategy_names import BUILT_IN

# Names instead of classes, because importing these takes longer than everything else here.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "its settings belong to the strategy: DDP(find_unused_parameters=True)",
    "torch.nn.parallel.data_parallel.DataParallel": "use strategy='ddp' with a process for each device",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "strategy='fsdp' shards it",
}


def check_plain(model: nn.Module) -> None:
    """Raise if any part of ``model`` is wrapped for distributed training already.

    Raises:
        ValueError: a part is wrapped; the message names the part, the wrapper and what to pass instead.
    """
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            advice = _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
            if advice is None and "step" in vars(base) and (package := base.__module__.partition(".")[0]) in BUILT_IN:
                advice = f"strategy={package!r} creates the engine"  # an engine of a package that one of our strategies is named after
            if advice is not None:
                where = f"its part {name!r}" if name else "it"
                raise ValueError(
                    f"the model ({type(model).__name__}) cannot be prepared: {where} is wrapped in {base.__name__} already; give the plain module "
                    f"({name + '.' if name else ''}module); {advice}"
                )
