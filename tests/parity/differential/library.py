"""A case trained by the library, as one rank of it. What a user would write: a module and ``Fit``, or a loop with ``Engine``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from engine import DDP, FSDP, Callback, DeepSpeed, Engine, Fit, Loss, MeshParallel, TrainModule

from . import models
from .cases import REPLICATED, Case
from .reference import Trained, state, weights


class Squares(torchmetrics.Metric):
    """The mean of the samples' losses, in float64."""

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, every: Tensor) -> None:
        self.total += every.detach().double().sum()
        self.count += len(every)

    def compute(self) -> Tensor:
        return self.total / self.count


def strategy(case: Case, name: str) -> Any:
    """The setting of ``Fit`` and ``Engine``."""
    if name == "single":
        return "single"
    if name.startswith("ddp"):
        return DDP(find_unused_parameters=case.unused)
    if name == "fsdp2":
        return FSDP(min_size=1)
    if name == "fsdp2x2":
        return FSDP(dp_replicate=2, dp_shard=2, min_size=1)
    if name == "tp2":
        return MeshParallel(tp=2)
    if name == "pp2":
        return MeshParallel(pp=2)
    return DeepSpeed(stage=int(name[-1]), param_persistence_threshold=0 if name[-1] == "3" else None)


# -- data -------------------------------------------------------------------------------------------------------------------------------


def loader(case: Case) -> Any:
    """The training data as its user has it."""
    samples, kind, workers = models.training_data(case), case.data, case.workers
    if kind == "list":
        return [samples.batch(numbers) for numbers in models.ready_batches(case)]
    if kind == "ready":
        return DataLoader(_Ready(samples, models.ready_batches(case)), batch_size=None, num_workers=workers)
    if kind == "batch_sampler":
        return DataLoader(samples, batch_sampler=models.Fixed(models.ready_batches(case)), num_workers=workers)
    if kind == "stream":
        return DataLoader(
            models.Reading([samples.batch(numbers) for numbers in models.ready_batches(case)]),
            batch_size=None,
            num_workers=workers,
        )
    if kind == "front":
        batches = BatchSampler(SequentialSampler(range(case.samples // 2 + 1)), case.batch, case.drop_last)
        return DataLoader(samples, batch_sampler=batches, num_workers=workers)
    return DataLoader(
        samples, batch_size=case.batch, drop_last=case.drop_last, num_workers=workers, **_order(case, samples)
    )


def _order(case: Case, samples: models.Samples) -> dict[str, Any]:
    if case.data == "shuffled":
        return {"shuffle": True}
    if case.data in ("subset", "repeats"):
        return {"sampler": models.Fixed(models.given_order(case))}
    if case.data == "drawn":
        return {"sampler": RandomSampler(samples, replacement=True, num_samples=case.samples + 1)}
    if case.data == "distributed":
        return {"sampler": DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True, seed=5)}
    return {}


class _Ready(torch.utils.data.Dataset[Any]):
    def __init__(self, samples: models.Samples, batches: list[list[int]]) -> None:
        self.samples, self.batches = samples, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.samples.batch(self.batches[index])


def val_loaders(case: Case) -> list[Any]:
    return [pairs(case, models.validation_data(case, index)) for index in range(case.val_loaders)]


def pairs(case: Case, samples: models.Samples) -> DataLoader[Any]:
    """A loader for evaluation, two samples a batch."""
    return DataLoader(samples, batch_size=2, num_workers=case.workers)


def random_orders(case: Case) -> dict[int, list[int]]:
    """The order of each epoch where it is a function of (seed, epoch): as one process has it that reads sample by sample."""
    if case.data not in ("shuffled", "drawn", "distributed"):
        return {}
    one = dataclasses.replace(case, batch=1, drop_last=False, workers=0)
    batches = Engine(strategy="single", accelerator="cpu", seed=1).prepare(loader(one))
    found = {}
    for epoch in range(case.epochs):
        batches.set_epoch(epoch)
        found[epoch] = [int(batch["i"]) for batch in batches]
    return found


# -- Fit --------------------------------------------------------------------------------------------------------------------------------


class Module(TrainModule):
    """The model of a case with its losses, logs and optimizers."""

    def __init__(self, case: Case, window: Any) -> None:
        super().__init__()
        self.case, self.window_at = case, window
        self.net = models.Net(case)
        self.squares, self.val_squares = Squares(), torch.nn.ModuleList(Squares() for _ in range(case.val_loaders))
        self.automatic_optimization = not case.manual
        self.seen: dict[str, list[int]] = {}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def parallelize(self, mesh: Any) -> dict[str, Any]:
        return {"net.up": "colwise", "net.down": "rowwise"}

    def pipeline_stages(self) -> list[Any]:
        net = self.net
        return [net.up, net.bend, net.down, net.bend_again, net.head]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        case = self.case
        if case.strategy != "pp2" and case.second != "pp2":
            key = f"{self.current_epoch}:{batch_idx // self.window_at(self.current_epoch)}"
            self.seen.setdefault(key, []).extend(batch["i"].tolist())
        out = self(batch["x"])
        every = models.each(case, out, batch["y"])
        loss = self.loss(every, batch)
        self.record(every, batch)
        if case.manual:
            return self.step_by_hand(loss, batch, batch_idx)
        if case.none and int(batch["i"][0]) % case.none == 0:
            return None
        bad = models.poisoned(case, out, batch["i"])
        if bad is not None:
            loss = Loss(loss.sum + bad, loss.count) if isinstance(loss, Loss) else loss + bad
        return {"loss": loss, "size": len(every)} if case.loss == "dict" else loss

    def loss(self, every: Tensor, batch: Any) -> Any:
        if self.case.loss == "weighted":
            return Loss((every * batch["c"]).sum(), batch["c"].sum())
        if self.case.loss == "counted":
            return Loss((every * batch["c"]).sum(), float(batch["c"].sum()))
        return every.mean()

    def record(self, every: Tensor, batch: Any) -> None:
        if self.case.loss in ("weighted", "counted"):
            count = batch["c"].sum()
            self.log(
                "loss", (every * batch["c"]).sum() / count.clamp(min=1), on_step=True, on_epoch=True, batch_size=count
            )
        else:
            self.log("loss", every.mean(), on_step=True, on_epoch=True)
        apart = {"on_step": False, "on_epoch": True}
        self.log("most", every.max(), reduce="max", **apart)
        self.log("least", every.min(), reduce="min", **apart)
        self.log("total", every.sum(), reduce="sum", **apart)
        self.squares.update(every)
        self.log("squares", self.squares, **apart)

    def step_by_hand(self, loss: Tensor, batch: Any, batch_idx: int) -> Tensor:
        case = self.case
        if case.manual == "both":
            first, second = self.optimizers()
            for own, other in ((first, second), (second, first)):
                self.manual_backward(models.each(case, self(batch["x"]), batch["y"]).mean() if own is second else loss)
                self.finish(own)
                other.zero_grad()
            return loss.detach()
        optimizer = self.optimizers()
        self.manual_backward(loss / (2 if case.manual == "second" else 1))
        if case.manual == "drop" and batch_idx % 3 == 1:
            self.clip_gradients(optimizer, 0.01)
            optimizer.zero_grad()
        elif case.manual != "second" or batch_idx % 2:
            self.finish(optimizer)
        return loss.detach()

    def finish(self, optimizer: Any) -> None:
        if self.case.clip:
            self.clip_gradients(optimizer, models.clip(self.case), self.case.clip)
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        every = models.each(self.case, self(batch["x"]), batch["y"])
        self.log("val", every.mean())
        self.log("val_most", every.max(), reduce="max")
        self.val_squares[dataloader_idx].update(every)
        self.log("val_squares", self.val_squares[dataloader_idx])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["x"])

    def configure_optimizers(self) -> Any:
        found = models.optimizers(self.case, self.net)
        schedules = [self.schedule(s) for s in models.schedulers(self.case, found)]
        return found, schedules

    def schedule(self, scheduler: Any) -> dict[str, Any]:
        kind = self.case.schedule
        if kind == "plateau":
            return {"scheduler": scheduler, "monitor": "loss"}
        return {
            "scheduler": scheduler,
            "interval": "epoch" if kind == "epoch" else "step",
            "frequency": 2 if kind == "steps" else 1,
        }


class Hooked(Module):
    """With a hook that makes the library finish gradients before its step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class Killed(Exception):
    """The end of a run that was killed."""


class Watch(Callback):
    """Writes down what :class:`Trained` has, and saves."""

    def __init__(self, found: Trained, name: str, save_at: int, killed: bool) -> None:
        self.found, self.name, self.save_at, self.killed = found, name, save_at, killed
        self.last = 0

    def on_train_start(self, run: Any, module: Any) -> None:
        self.last = run.step

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = run.step
        if step == self.last:
            return
        self.last = step
        self.found.lrs[step] = [group["lr"] for o in run.optimizers for group in o.param_groups]
        if self.name in REPLICATED:
            self.found.weights[step] = weights(module.net)
        if run.engine.grad_norm is not None:
            self.found.norms[step] = float(run.engine.grad_norm)
        if self.killed and step == self.save_at:
            run.save_checkpoint("here")
            run.wait_for_checkpoint()
            raise Killed

    def on_log(self, run: Any, module: Any, values: dict[str, float], step: int) -> None:
        self.found.logs.setdefault(step, {}).update(values)

    def on_train_end(self, run: Any, module: Any) -> None:
        if self.save_at and not self.killed:
            run.save_checkpoint("here")
        if self.name in REPLICATED:
            self.found.final = state(module.case, module.net.state_dict())
        else:
            whole = run.engine.strategy.model_state(module)
            own = {name.removeprefix("net."): value for name, value in whole.items() if name.startswith("net.")}
            self.found.final = state(module.case, own) if run.is_main_process else []


def fit(case: Case, name: str, root: Path, part: int, parts: int) -> Trained:
    """The case, or one of the two runs of a case that is resumed, by ``Fit``."""
    found = Trained()

    def window(epoch: int) -> int:
        return 1 if case.manual else case.window(name, epoch)

    first = parts == 2 and part == 0
    module = (Hooked if case.hook else Module)(case, window)
    settings: dict[str, Any] = {} if case.manual else {"accumulate_grad_batches": {0: window(0), 1: window(1)}}
    if case.clip and not case.manual:
        settings |= {"gradient_clip_val": models.clip(case), "gradient_clip_algorithm": case.clip}
    limit = case.resume if first and not case.killed else case.max_steps
    watch = Watch(found, name, case.resume if first else 0, case.killed and first)
    trainer = Fit(
        accelerator="cpu", strategy=strategy(case, name), precision=case.precision, max_epochs=case.epochs, max_steps=limit or None,
        limit_train_batches=case.limit or None, val_every={"": None, "epoch": "1 epochs", "steps": 2, "half": 0.5}[case.val],
        num_sanity_val_steps=2 if case.sanity else 0, log_every_n_steps=case.log_every, seed=1, root_dir=root, callbacks=watch,
        on_nonfinite="skip" if case.poison >= 0 else None, activation_checkpointing=case.recompute or None, **settings,
    )  # fmt: skip
    resume = str(root / "checkpoints" / "here") if parts == 2 and not first else None
    try:
        result = trainer.run(module, loader(case), val_loaders(case) if case.val else None, resume=resume)
        found.steps = result.step
        if case.predicted and not first:
            outputs = trainer.predict(module, pairs(case, models.predicted_data(case)))
            found.predictions = torch.cat(outputs).double().flatten().tolist()
    except Killed:
        found.steps = watch.last
    found.seen = module.seen
    return found
