"""A training of a few steps that all launchers run: the same bits are expected of each. Its arguments: root, where to write the result, options.

``--slow S``: each of the first 200 steps takes S seconds, unless the scheduler has restarted the job. ``--die``: rank 1 is killed at step 5 once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from engine import Callback, Fit, TrainModule


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Events(Callback):
    def __init__(self, root: Path, slow: float, die: bool) -> None:
        self.root, self.slow, self.die = root, slow, die

    def on_train_start(self, run: Any, module: Any) -> None:
        self.ranks = run.world_size

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if run.step < 200 and not int(os.environ.get("SLURM_RESTART_COUNT", "0")):
            time.sleep(self.slow)
        if run.rank == 0 and run.step == 3:
            (self.root / "trains").touch()
        if self.die and run.rank == 1 and run.step == 5 and not (self.root / "died").exists():
            (self.root / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    args.root.mkdir(parents=True, exist_ok=True)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
    callbacks: list[Any] = [
        Events(args.root, args.slow, args.die),
        ModelCheckpoint(every="4 steps" if args.die else "1000 steps"),
    ]
    fit = Fit(max_steps=args.steps, seed=3, accelerator="cpu", root_dir=args.root, callbacks=callbacks)
    module = Net()
    result = fit.run(module, loader, resume="auto")
    if fit.is_main_process:
        weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
        told = {
            "step": result.step,
            "status": result.status,
            "weights": hashlib.sha256(weights).hexdigest(),
            "ranks": callbacks[0].ranks,
        }
        args.result.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
