"""This library's two doors, through public names only."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from cases import Batch, Contender, Work, loss_of, make_optimizer
from torch import Tensor, nn

from engine import Callback, Engine, Fit, TrainModule

# No file is written here (nothing saves, nothing logs to disk), but the default would be a folder beside the user's own runs.
ROOT = tempfile.gettempdir()


class Module(TrainModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)


class Logged(Module):
    def __init__(self, net: nn.Module, count: int) -> None:
        super().__init__(net)
        self.names = [f"loss {i}" for i in range(count)]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        for name in self.names:
            self.log(name, loss)
        return loss


class Nothing(Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        pass

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def train_by_fit(work: Work) -> nn.Module:
    case, net = work.case, work.build()
    fit = Fit(
        accelerator="cpu",
        devices=2 if case.ddp else 1,
        strategy="ddp" if case.ddp else "auto",
        precision="bf16-mixed" if case.bf16 else "32-true",
        max_steps=work.steps,
        accumulate_grad_batches=case.window,
        val_every=None,
        callbacks=[Nothing() for _ in range(case.callbacks)],
        root_dir=ROOT,
    )
    # Fit shares a list of batches out to its ranks; the other loops give all of it to each.
    fit.run(Logged(net, case.logs) if case.logs else Module(net), work.data * 2 if case.ddp else work.data)
    return net


def train_by_engine(work: Work) -> nn.Module:
    case, net = work.case, work.build()
    engine = Engine(
        accelerator="cpu", precision="bf16-mixed" if case.bf16 else "32-true", accumulate_grad_batches=case.window
    )
    model, optimizer = engine.prepare(net, make_optimizer(net))
    data = engine.prepare(work.data) if case.loader else work.data
    for batch in data:
        with engine.accumulate(model) if case.window > 1 else nullcontext():
            loss = loss_of(model, batch)
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return net


def load_fit() -> Contender:
    return Contender("Fit", "ours", train_by_fit, logs=True, callbacks=True)


def load_engine() -> Contender:
    return Contender("Engine", "ours", train_by_engine)
