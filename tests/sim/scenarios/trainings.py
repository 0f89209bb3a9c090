"""What the scenarios about the library share: a module, its data, and a watch over what the device reports during a training."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import simulated as sim
import torch
from torch import Tensor, nn

from engine import Callback, Fit, Loss, TrainModule

BOUNDARY = 5  # steps between log boundaries


class Net(TrainModule):
    """A small net; it keeps its losses on the device.

    Args:
        optimizer: makes the optimizer of its parameters.
        weighted: give ``Loss(sum, count)`` with counts that differ.
        overflow_at: the batch whose loss is infinite.
    """

    def __init__(
        self,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        weighted: bool = False,
        overflow_at: int = -1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4))
        self.make, self.weighted, self.overflow_at = optimizer or adamw(fused=True), weighted, overflow_at
        self.kept: list[Tensor] = []

    def forward(self, batch: Any) -> Tensor:
        return self.net(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        each = (self.net(x) - y).square().mean(1)
        self.kept.append(each.detach().mean())
        loss = each.mean()
        if batch_idx == self.overflow_at:
            loss = loss * torch.inf
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", each.detach().max(), reduce="max", on_epoch=True)
        if self.weighted:
            count = (x[:, 0] > 0).sum()
            return Loss((each * (x[:, 0] > 0)).sum(), count)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", (self(batch) - batch[1]).square().mean())

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test", (self(batch) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())

    @property
    def losses(self) -> list[float]:
        return [loss.item() for loss in self.kept]

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach().cpu() for parameter in self.parameters()]


class ManualNet(Net):
    """It steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.kept.append(loss.detach())
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss)


def adamw(**how: bool) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **how)


def sgd(**how: bool) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **how)


def batches(count: int = 20, size: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)) for _ in range(count)
    ]


class Watch(Callback):
    """Writes down what the device reports from the first step to the end of the training, and memory at each epoch's end."""

    def __init__(self) -> None:
        self.waits: list[sim.Wait] = []
        self.reserved: list[int] = []

    def on_train_start(self, run: Any, module: nn.Module) -> None:
        sim.clear()

    def on_train_epoch_end(self, run: Any, module: nn.Module) -> None:
        self.reserved.append(torch.sim.memory_reserved())

    def on_train_end(self, run: Any, module: nn.Module) -> None:
        self.waits = [wait for wait in sim.waits() if wait.in_training]

    def quiet(self, *allowed: str) -> None:
        """No race, and no wait but where values are published, an epoch ends, or in functions of these names."""
        assert sim.races() == [], "\n".join(sim.races())
        # await_pending: the verdict about a step, read when the next one is queued: the device has work. _returns_true: a capability is tried once.
        # report_nan: the loss, where values are published. report_nonfinite: the weights, after the last step.
        free = {
            "publish_due",
            "report_nan",
            "report_nonfinite",
            "end_epoch",
            "await_pending",
            "_returns_true",
            *allowed,
        }
        found = [wait for wait in self.waits if not free & {place.rpartition(" ")[2] for place in wait.stack}]
        assert found == [], "\n".join(map(str, found))


def trained(accelerator: str, module: Net, data: Any = None, quiet: bool = True, **settings: Any) -> Net:
    """``module`` after a run of ``Fit``; on the simulated device without a race or a wait between log boundaries."""
    watch = Watch()
    callbacks = [*settings.pop("callbacks", []), *([watch] if accelerator == "sim" else [])]
    rest: dict[str, Any] = {"devices": 1, "log_every_n_steps": BOUNDARY, "root_dir": folder(), **settings}
    allowed, resume = rest.pop("allowed", ()), rest.pop("resume", None)
    Fit(accelerator=accelerator, callbacks=callbacks, **rest).run(
        module, batches() if data is None else data, resume=resume
    )
    if accelerator == "sim" and quiet:
        watch.quiet(*allowed)
    return module


def same(make: Callable[[], Net], data: Any = None, **settings: Any) -> None:
    """A run on the simulated device is quiet, and has the losses and weights of one on the CPU, bit for bit."""
    on_cpu, on_sim = (trained(accelerator, make(), data, **settings) for accelerator in ("cpu", "sim"))
    assert on_sim.kept[0].device.type == "sim"
    assert on_sim.losses == on_cpu.losses, (on_sim.losses, on_cpu.losses)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(on_sim.weights, on_cpu.weights, strict=True))


def folder() -> Path:
    """A new folder, the same on all ranks."""
    made = Path(sys.argv[1]) / str(next(_NUMBERS))
    made.mkdir(exist_ok=True)
    return made


_NUMBERS = itertools.count()
