"""Other trainers, each in its own documented idiom with everything optional switched off (bars, loggers, checkpoints).

Each function imports one library and returns its contender. An ``ImportError`` means that it, or something it needs, is not installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from cases import Batch, Contender, Work, loss_of, make_optimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Batches:
    """A list of batches as an iterable of its own: to Lightning a plain list means one loader for each element."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def lightning() -> Contender:
    """``lightning.Trainer``."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

    class Module(LightningModule):
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

    def train(work: Work) -> nn.Module:
        case, net = work.case, work.build()
        trainer = Trainer(
            accelerator="cpu",
            devices=2 if case.ddp else 1,
            strategy="ddp" if case.ddp else "auto",
            precision="bf16-mixed" if case.bf16 else "32-true",
            max_steps=work.steps,
            accumulate_grad_batches=case.window,
            callbacks=[Nothing() for _ in range(case.callbacks)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(
            Logged(net, case.logs) if case.logs else Module(net), work.data if case.loader else Batches(work.data)
        )
        return net

    return Contender("Lightning", "peer", train, logs=True, callbacks=True)


def fabric() -> Contender:
    """``lightning.fabric.Fabric`` in a hand-written loop."""
    from lightning.fabric import Fabric

    def train(work: Work) -> nn.Module:
        case, net = work.case, work.build()
        one = Fabric(
            accelerator="cpu",
            devices=2 if case.ddp else 1,
            strategy="ddp" if case.ddp else "auto",
            precision="bf16-mixed" if case.bf16 else "32-true",
        )
        one.launch()
        model, optimizer = one.setup(net, make_optimizer(net))
        data = one.setup_dataloaders(work.data) if case.loader else work.data
        window = case.window
        for i, batch in enumerate(data, start=1):
            loss = loss_of(model, batch)
            one.backward(loss / window if window > 1 else loss)
            if i % window == 0:
                optimizer.step()
                optimizer.zero_grad()
        return net

    return Contender("Fabric", "peer", train)


def accelerate() -> Contender:
    """``accelerate.Accelerator`` in a hand-written loop."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def train(work: Work) -> nn.Module:
        # Its settings are process-wide: without a reset the second Accelerator would take those of the first.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        case, net = work.case, work.build()
        one = Accelerator(
            cpu=True, mixed_precision="bf16" if case.bf16 else "no", gradient_accumulation_steps=case.window
        )
        model, optimizer, data = one.prepare(net, make_optimizer(net), work.data)
        for batch in data:
            with one.accumulate(model) if case.window > 1 else nullcontext():
                loss = loss_of(model, batch)
                one.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return net

    return Contender("Accelerate", "peer", train)


def ignite() -> Contender:
    """``ignite.engine.Engine``; precision, DDP and accumulation are its user's own code."""
    from ignite.engine import Engine, Events
    from ignite.metrics import Average

    def nothing(engine: Engine) -> None:
        pass

    def train(work: Work) -> nn.Module:
        case, net = work.case, work.build()
        optimizer = make_optimizer(net)
        model = DistributedDataParallel(net) if case.ddp else net
        window = case.window

        def update(engine: Engine, batch: Batch) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16) if case.bf16 else nullcontext():
                loss = loss_of(model, batch)
            (loss / window if window > 1 else loss).backward()
            if engine.state.iteration % window == 0:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        trainer = Engine(update)
        for i in range(case.logs):
            Average().attach(trainer, f"loss {i}")
        for _ in range(case.callbacks):
            trainer.add_event_handler(Events.ITERATION_STARTED, nothing)
            trainer.add_event_handler(Events.ITERATION_COMPLETED, nothing)
        trainer.run(work.data, max_epochs=1)
        return net

    return Contender("Ignite", "peer", train, logs=True, callbacks=True)


def torchtnt() -> Contender:
    """``torchtnt``'s ``AutoUnit`` and ``train``."""
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.callback import Callback
    from torchtnt.framework.train import train as run

    class Unit(AutoUnit):
        def compute_loss(self, state: Any, data: Batch) -> tuple[Tensor, None]:
            return loss_of(self.module, data), None

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
            return make_optimizer(module), None

    class Nothing(Callback):
        def on_train_step_start(self, state: Any, unit: Any) -> None:
            pass

        def on_train_step_end(self, state: Any, unit: Any) -> None:
            pass

    def train(work: Work) -> nn.Module:
        case, net = work.case, work.build()
        unit = Unit(
            module=net,
            device=torch.device("cpu"),
            strategy="ddp" if case.ddp else None,
            precision="bf16" if case.bf16 else None,
            gradient_accumulation_steps=case.window,
        )
        run(unit, work.data, max_epochs=1, callbacks=[Nothing() for _ in range(case.callbacks)])
        return net

    return Contender("torchtnt", "peer", train, callbacks=True)


PEERS: dict[str, Callable[[], Contender]] = {
    "Lightning": lightning,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Ignite": ignite,
    "torchtnt": torchtnt,
}


def installed() -> tuple[list[Contender], dict[str, str]]:
    """The peers that can be imported, and for each of the others the reason why not."""
    found, absent = [], {}
    for name, load in PEERS.items():
        try:
            found.append(load())
        except ImportError as error:
            absent[name] = f"cannot be imported: {error}"
    return found, absent
