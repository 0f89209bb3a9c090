"""FLOPs of attention, which a plan computes with the CPU's operator."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engine.planning.counters import OperationCounter


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.trace = OperationCounter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.trace.note(operator, args, kwargs or {}, result, "forward")
        return result


def test_attention_by_hand() -> None:
    q, k, v = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (10, 20, 20))
    with Watch() as watch:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    counted = {each.name: each.flops * each.count for each in watch.trace.operations() if each.flops}
    # Scores and their product with the values: 2 x 10 x 20 x 8 FLOPs each, for 2 samples and 3 heads.
    forward = 2 * (2 * 10 * 20 * 8) * 2 * 3
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert counted == {name: forward, f"{name}_backward": forward * 5 // 2}
