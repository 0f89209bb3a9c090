"""Plans of memory beside a real GPU: the allocator's decisions are torch's own, and a plan's peak is that of the run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.ranks import PATIENCE_S, clean_environment

DECISIONS = """
import random
import torch
from engine.planning.device_memory import CachingAllocator

torch.cuda.init()
streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
ours, alive, numbers = CachingAllocator(), [], random.Random(0)
begun = torch.cuda.memory_reserved()
assert begun == 0, begun
for step in range(3000):
    if alive and numbers.random() < 0.48:
        real, block = alive.pop(numbers.randrange(len(alive)))
        del real
        ours.free(block)
    else:
        size, stream = int(2 ** numbers.uniform(0, 25)), numbers.randrange(2)
        with torch.cuda.stream(streams[stream]):
            alive.append((torch.empty(size, dtype=torch.uint8, device="cuda"), ours.allocate(size, stream)))
    found = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert found == (ours.allocated, ours.reserved), (step, found, ours.allocated, ours.reserved)
print("equal")
"""

PEAK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        block = lambda: nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.net = nn.Sequential(nn.Embedding(4096, 512), *[block() for _ in range(6)], nn.Linear(512, 4096))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = DataLoader(TensorDataset(torch.randint(4096, (64, 256))), 16)
settings = {"max_steps": 4, "precision": "bf16-mixed", "devices": 1, "gradient_clip_val": 1.0}
memory = torch.cuda.get_device_properties(0).total_memory
plan = Fit(**settings).plan(Net(), data, world_size=1, device=f"h100,{memory}")
torch.cuda.reset_peak_memory_stats()
Fit(**settings).run(Net(), data)
found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
print(plan.need, found)
assert abs(plan.need.rounded / found[0] - 1) <= 0.1, (plan.need, found)
assert abs(plan.need.reserved / found[1] - 1) <= 0.15, (plan.need, found)
"""


@pytest.mark.parametrize("script", [DECISIONS, PEAK], ids=["decisions", "peak"])
def test_a_gpu_agrees(script: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", script]
    ran = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr[-3000:]
