"""A custom strategy, local SGD: every process steps by itself, and every k steps their parameters are averaged (Stich 2019).

    python examples/custom_strategy.py                 # two processes, averaged every 8 steps
    python examples/custom_strategy.py --every 1       # the same as DDP, for plain SGD

An installed package makes it available by name, ``Fit(strategy="local_sgd")``, with an entry point (setup.cfg):

    [options.entry_points]
    engine.strategies =
        local_sgd = my_package:LocalSGD
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from digits import Digits, DigitsData
from torch import Tensor, nn
from torch.optim import Optimizer

from engine import Fit, Strategy


@dataclass(kw_only=True)
class LocalSGD(Strategy):
    """Communicates 1/``every`` of what DDP does. Gradients are those of this rank's samples, so clipping and norms are too."""

    every: int = 8
    """Steps between two averages."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"LocalSGD(every={self.every}) must be at least 1")

    def setup(self, model: nn.Module) -> nn.Module:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        return model

    def repoint(self, optimizer: Optimizer) -> None:
        """Called once for each optimizer: from now on, its steps are counted."""
        taken = 0

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal taken
            taken += 1
            if taken % self.every == 0:
                self.average([p for group in optimizer.param_groups for p in group["params"]])

        optimizer.register_step_post_hook(after_step)

    @torch.no_grad()
    def average(self, tensors: list[Tensor]) -> None:
        """The mean over all ranks, in place."""
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for tensor, mean in zip(
            tensors, (flat / self.group.world_size).split([t.numel() for t in tensors]), strict=True
        ):
            tensor.copy_(mean.view_as(tensor))

    def sum(self, value: Tensor | float) -> Tensor | float:
        """Sum over the samples of all ranks: so ``Loss(sum, count)`` weighs tokens rather than ranks."""
        total = torch.as_tensor(value, dtype=torch.float64).clone()
        dist.all_reduce(total)
        return total

    def agree(self, flag: Tensor) -> Tensor:
        """A step that is skipped on one rank is skipped on all, so that their step counts agree."""
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag

    def model_parts(self, module: nn.Module) -> dict[str, Any]:
        """For checkpoints: the state that the ranks share."""
        self.average(list(module.parameters()))
        return super().model_parts(module)


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits by local SGD.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--every", type=int, default=8, help="steps between two averages")
    parser.add_argument("--max-epochs", type=int, default=10)
    args = parser.parse_args()
    fit = Fit(
        strategy=LocalSGD(every=args.every),
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.max_epochs,
        seed=1,
        root_dir="runs/local_sgd",
    )
    module, data = Digits(4e-3, args.max_epochs), DigitsData(32)
    fit.run(module, datamodule=data)
    metrics = fit.test(module, datamodule=data)[0]
    if fit.is_main_process:
        print(f"test accuracy: {100 * metrics['test/accuracy']:.2f}%")


if __name__ == "__main__":
    main()
