"""Activation offload on a CUDA device: the bits of a training without it, less memory, and no wait of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine

ROWS, WIDTH, STEPS = 8192, 512, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


def trained(offload: Any, **settings: Any) -> tuple[list[Tensor], int]:
    """Losses and weights, and the peak of memory beyond the start."""
    torch.manual_seed(0)
    engine = Engine(accelerator="cuda", activation_offload=offload, **settings)
    model = nn.Sequential(*(Block() for _ in range(8)))
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.randn(STEPS, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        for step, batch in enumerate(data):
            # The first steps take pinned memory, and compile.
            torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
            with engine.accumulate(model):
                loss = model(batch).square().mean()
                engine.backward(loss)
                losses.append(loss.detach())
                del loss
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    peak = torch.cuda.max_memory_allocated() - before
    numbers = [value.detach().cpu() for value in (*losses, *model.parameters())]
    engine.release()
    return numbers, peak


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": "full"}, {"compile": "blocks"}])
def test_same_bits_with_less_memory(precision: str, more: dict[str, Any]) -> None:
    plain, peak = trained(False, precision=precision, **more)
    offloaded, less = trained(True, precision=precision, **more)
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))
    assert less <= (0.95 if "activation_checkpointing" in more else 0.65) * peak, (less, peak)
