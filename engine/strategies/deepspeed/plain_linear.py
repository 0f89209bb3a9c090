"""``torch.nn.functional.linear``, which DeepSpeed replaces for the rest of the process when it shards parameters."""

from __future__ import annotations

import sys

from torch.nn import functional


def restore() -> None:
    """Put torch's own back. DeepSpeed's saves memory while it trains, and cannot be compiled, scripted or exported afterwards."""
    sharding = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    own = getattr(getattr(sharding, "InsertPostInitMethodToModuleSubClasses", None), "linear_bk", None)
    if own is not None:
        functional.linear = own
