"""FLOPs of operators that torch counts otherwise or not at all: attention on the CPU, products in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
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


N, M, P, BATCH = 2, 3, 5, 7


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (lambda a, b, out: out.addmm_(a, b), 2 * N * M * P),
        (lambda a, b, out: torch.addmm(out, a, b), 2 * N * M * P),
        (lambda a, b, out: torch.mm(a, b, out=out), 2 * N * M * P),
        (lambda a, b, out: torch.addmm(out, a, b, out=torch.empty(0)), 2 * N * M * P),
        (lambda a, b, out: out[0].addmv_(b.t(), a[0]), 2 * M * P),
        (lambda a, b, out: torch.mv(b.t(), a[0]), 2 * M * P),
        (lambda a, b, out: out.addbmm_(a.expand(BATCH, N, M), b.expand(BATCH, M, P)), 2 * BATCH * N * M * P),
        (
            lambda a, b, out: out.repeat(BATCH, 1, 1).baddbmm_(a.expand(BATCH, N, M), b.expand(BATCH, M, P)),
            2 * BATCH * N * M * P,
        ),
    ],
)
def test_products_in_place_and_of_vectors_by_hand(call: Callable[..., Tensor], flops: int) -> None:
    a, b, out = torch.ones(N, M), torch.ones(M, P), torch.ones(N, P)
    with Watch() as watch:
        call(a, b, out)
    assert sum(each.flops * each.count for each in watch.trace.operations()) == flops
