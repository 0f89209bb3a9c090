"""A case trained by the library, as one rank of it. What a user would write: a module and ``Fit``, or a loop with ``Engine``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset

from callbacks import EMA, SWA, EarlyStopping, ModelCheckpoint
from engine import (
    DDP,
    FSDP,
    Callback,
    CombinedLoader,
    DataModule,
    DeepSpeed,
    Engine,
    Fit,
    Loss,
    MeshParallel,
    Resume,
    TrainModule,
)

from . import models
from .cases import REPLICATED, Case, pipelined
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


DDP_SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "static": {"static_graph": True},
    "buckets": {"bucket_cap_mb": 0.0001},
    "view": {"gradient_as_bucket_view": True},
    "bf16": {"comm_hook": "bf16"},
}
"""By :attr:`.cases.Case.ddp`."""


def strategy(case: Case, name: str) -> Any:
    """The setting of ``Fit`` and ``Engine``."""
    if name == "single":
        return "single"
    if name.startswith("ddp"):
        return DDP(find_unused_parameters=case.unused or bool(case.conditional), **DDP_SETTINGS[case.ddp])
    if name == "fsdp2":
        return FSDP(min_size=1)
    if name == "fsdp2x2":
        return FSDP(dp_replicate=2, dp_shard=2, min_size=1)
    if name.startswith("tp2"):
        return MeshParallel(tp=2, dp_shard=-1, min_size=1)
    if name.startswith("pp2"):
        return MeshParallel(pp=2, dp_replicate=-1, dp_shard=1, schedule=case.pipeline or "1f1b")
    return DeepSpeed(stage=int(name[-1]), param_persistence_threshold=0 if name[-1] == "3" else None)


# -- data -------------------------------------------------------------------------------------------------------------------------------


def loader(case: Case) -> Any:
    """The training data as its user has it."""
    samples, kind = models.training_data(case), case.data
    settings: dict[str, Any] = {"num_workers": case.workers}
    batches = [samples.batch(numbers) for numbers in models.ready_batches(case)]
    if case.nested:
        batches = list(map(models.nested, batches))
        settings["collate_fn"] = models.collate_nested
    if case.filtered:
        settings["collate_fn"] = models.collate_filtered
    if kind == "list":
        return batches
    if kind == "ready":
        return DataLoader(_Ready(batches), batch_size=None, num_workers=case.workers)
    if kind == "batch_sampler":
        return DataLoader(samples, batch_sampler=models.Fixed(models.ready_batches(case)), **settings)
    if kind == "stream":
        return DataLoader(models.Reading(batches), batch_size=None, num_workers=case.workers)
    if kind == "combined":
        members = [DataLoader(Subset(samples, numbers), case.batch, **settings) for numbers in models.halves(case)]
        return CombinedLoader(members, "sequential")
    if kind == "front":
        batches = BatchSampler(SequentialSampler(range(case.samples // 2 + 1)), case.batch, case.drop_last)
        return DataLoader(samples, batch_sampler=batches, **settings)
    order = _order(case, samples)
    return DataLoader(samples, batch_size=case.batch, drop_last=case.drop_last, **order, **settings)


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
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def val_loaders(case: Case) -> list[Any]:
    return [pairs(case, models.validation_data(case, index)) for index in range(case.val_loaders)]


def pairs(case: Case, samples: models.Samples) -> DataLoader[Any]:
    """A loader for evaluation, two samples a batch."""
    collate = models.collate_nested if case.nested else None
    return DataLoader(samples, batch_size=2, num_workers=case.workers, collate_fn=collate)


class Data(DataModule):
    """A case's loaders, which the run asks for."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.stages: list[str] = []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)

    def train_dataloader(self) -> Any:
        assert self.stages == ["fit"]
        return loader(self.case)

    def val_dataloader(self) -> Any:
        return val_loaders(self.case) if self.case.val or self.stages[-1] == "validate" else []

    def test_dataloader(self) -> Any:
        assert self.stages[-1] == "test"
        return val_loaders(self.case)

    def predict_dataloader(self) -> Any:
        return pairs(self.case, models.predicted_data(self.case))


def random_orders(case: Case) -> dict[int, list[int]]:
    """The order of each epoch where it is a function of (seed, epoch): as one process has it that reads sample by sample."""
    if case.data not in ("shuffled", "drawn", "distributed"):
        return {}
    one = dataclasses.replace(case, batch=1, drop_last=False, workers=0, nested=False, filtered=False)
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
        if not case.configured:
            self.net = models.Net(case)
        self.squares, self.val_squares = Squares(), torch.nn.ModuleList(Squares() for _ in range(case.val_loaders))
        self.automatic_optimization = not case.manual
        self.seen: dict[str, list[int]] = {}
        self.begun: set[int] = set()
        """Batches of this epoch that ``training_step`` has had."""

    def on_train_epoch_start(self) -> None:
        self.begun.clear()

    def configure_model(self) -> None:
        if self.case.configured and not hasattr(self, "net"):
            self.net = models.Net(self.case)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def parallelize(self, mesh: Any) -> dict[str, Any]:
        return {"net.up": "colwise", "net.down": "rowwise"}

    def pipeline_stages(self) -> list[Any]:
        net = self.net
        return [net.up, net.bend, net.down, net.bend_again, net.head]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        case, batch = self.case, models.flat(batch)
        again = bool(case.closure) and batch_idx in self.begun  # a closure's second evaluation
        if not pipelined(case.strategy, case.second) and not again:
            key = f"{self.current_epoch}:{batch_idx // self.window_at(self.current_epoch)}"
            self.seen.setdefault(key, []).extend(batch["i"].tolist())
        self.begun.add(batch_idx)
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
        optimizer, batches = self.optimizers(), 2 if case.manual == "second" else 1
        if case.again == "retain":
            self.manual_backward(loss / 2 / batches, retain_graph=True)
            self.manual_backward(loss / 2 / batches)
        elif case.again == "views":
            views = [models.each(case, self(batch["x"]), batch["y"]).mean() for _ in range(2)]
            for view in views:
                self.manual_backward(view / 2 / batches)
        else:
            self.manual_backward(loss / batches)
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
        batch = models.flat(batch)
        every = models.each(self.case, self(batch["x"]), batch["y"])
        self.log("val", every.mean())
        self.log("val_most", every.max(), reduce="max")
        self.val_squares[dataloader_idx].update(every)
        self.log("val_squares", self.val_squares[dataloader_idx])

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(models.flat(batch)["x"])

    def configure_optimizers(self) -> Any:
        found = models.optimizers(self.case, self.net)
        self.rates = [group["lr"] for o in found for group in o.param_groups]
        schedules = [self.schedule(s) for s in models.schedulers(self.case, found)]
        return found, schedules

    def schedule(self, scheduler: Any) -> dict[str, Any]:
        kind = self.case.schedule
        if kind in ("plateau", "val"):
            return {"scheduler": scheduler, "monitor": "loss" if kind == "plateau" else "val"}
        return {
            "scheduler": scheduler,
            "interval": "epoch" if kind in ("epoch", "epochs") else "step",
            "frequency": 2 if kind in ("steps", "epochs") else 1,
        }


class Hooked(Module):
    """With a hook that makes the library finish gradients before its step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class Warming(Hooked):
    """With a step that sets the learning rate first."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * models.warmup(self.global_step)
        optimizer.step(closure=optimizer_closure)


class Killed(Exception):
    """The end of a run that was killed."""


class Watch(Callback):
    """Writes down what :class:`Trained` has, saves, and asks for the end."""

    def __init__(self, case: Case, name: str, root: Path, first: bool) -> None:
        self.case, self.name, self.root, self.found = case, name, root, Trained()
        self.save_at, self.killed = case.resume if first else 0, case.killed and first
        self.last = 0

    def on_train_start(self, run: Any, module: Any) -> None:
        self.last = run.step
        if not self.last:
            torch.manual_seed(models.DROPPED)

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
            self.save(run)
            run.wait_for_checkpoint()
            raise Killed
        if self.case.stop == "step" and step == models.STOPPED:
            run.stop()

    def on_train_epoch_end(self, run: Any, module: Any) -> None:
        if self.case.stop == "epoch" and run.epoch == 0 and run.rank == run.world_size - 1:
            run.stop()

    def on_log(self, run: Any, module: Any, values: dict[str, float], step: int) -> None:
        if run.stage == "fit":
            self.found.logs.setdefault(step, {}).update(values)

    def on_train_end(self, run: Any, module: Any) -> None:
        if self.save_at and not self.killed:
            self.save(run)

    def save(self, run: Any) -> None:
        if self.case.saves in ("one_file", "elsewhere"):
            run.save_checkpoint_at(saved(self.case, self.root), one_file=self.case.saves == "one_file")
        elif self.case.saves != "callback":
            run.save_checkpoint("here", asynchronous=self.case.saves == "asynchronous")

    def on_fit_end(self, run: Any, module: Any) -> None:
        if self.name in REPLICATED:
            self.found.final = state(module.case, module.net.state_dict())
        else:
            whole = run.engine.strategy.model_state(module)
            own = {name.removeprefix("net."): value for name, value in whole.items() if name.startswith("net.")}
            self.found.final = state(module.case, own) if run.is_main_process else []


def saved(case: Case, root: Path) -> str:
    """Where the first run leaves its checkpoint."""
    if case.saves == "callback":
        return "last"
    return str(root / {"one_file": "here.zip", "elsewhere": "elsewhere/here"}.get(case.saves, "checkpoints/here"))


def resume(case: Case, root: Path) -> str | Resume:
    """What the second run continues from."""
    path = saved(case, root)
    if case.saves == "lenient":
        return Resume(path, strict=False)
    return Resume(path, hyperparameters="configured") if case.saves == "configured" else path


def steps_of(case: Case, name: str) -> dict[str, Any]:
    """Settings of what a step is."""
    if case.manual:
        return {}
    settings: dict[str, Any] = {"accumulate_grad_batches": {epoch: case.window(name, epoch) for epoch in (0, 1)}}
    if case.by_size:
        settings = {"global_batch_size": case.units * case.batch}
    if case.clip:
        settings |= {"gradient_clip_val": models.clip(case), "gradient_clip_algorithm": case.clip}
    return settings


def transforms(case: Case) -> dict[str, Any]:
    """Settings that change how a model computes, the same for both doors."""
    return {
        "activation_checkpointing": case.recompute or None,
        "compile": {"backend": "aot_eager"} if case.compiled else False,
        "sync_batchnorm": case.sync,
    }


def callbacks(case: Case) -> list[Callback]:
    """What comes before :class:`Watch`."""
    found: list[Callback] = []
    if case.average == "swa":
        found.append(SWA(models.SWA_RATE, swa_epoch_start=1, annealing_epochs=2, annealing_strategy="linear"))
    elif case.average:
        late = {"update_every_n_steps": 2, "update_starting_at_step": 1} if case.average == "late" else {}
        found.append(EMA(models.DECAY, **late))
    if case.stop == "early":
        found.append(EarlyStopping("val" if case.val else "loss_epoch", mode=models.early_mode(case), patience=1))
    if case.saves == "callback":
        found.append(ModelCheckpoint(every=1, save_top_k=-1))
    return found


def fit(case: Case, name: str, root: Path, part: int, parts: int) -> Trained:
    """The case, or one of the two runs of a case that is resumed, by ``Fit``."""
    first = parts == 2 and part == 0
    kind = Warming if case.closure == "warmup" else Hooked if case.hook else Module
    module = kind(case, lambda epoch: 1 if case.manual else case.window(name, epoch))
    limit = case.resume if first and not case.killed else case.max_steps
    watch = Watch(case, name, root, first)
    trainer = Fit(
        accelerator="cpu", strategy=strategy(case, name), precision=case.precision, max_epochs=case.epochs, max_steps=limit or None,
        min_steps=case.min_steps or None, limit_train_batches=case.limit or None,
        val_every={"": None, "epoch": "1 epochs", "steps": 2, "half": 0.5}[case.val],
        num_sanity_val_steps=2 if case.sanity else 0, log_every_n_steps=case.log_every, seed=1, root_dir=root,
        callbacks=[*callbacks(case), watch], on_nonfinite="skip" if case.poison >= 0 else None, **transforms(case), **steps_of(case, name),
    )  # fmt: skip
    data = Data(case) if case.datamodule else None
    validation = val_loaders(case) if case.val else None
    loaders = {"datamodule": data} if data else {"train_loader": loader(case), "val_loaders": validation}
    found = watch.found
    try:
        try:
            found.steps = trainer.run(module, **loaders, resume=resume(case, root) if part else None).step
        except ValueError as error:  # where each batch is left out, nothing is trained, which is an error
            if not case.none or "returned None for every batch" not in str(error):
                raise
        if not first:
            evaluate(case, trainer, module, data, found)
    except Killed:
        found.steps = watch.last
    found.seen = module.seen
    return found


def evaluate(case: Case, trainer: Fit, module: Module, data: Data | None, found: Trained) -> None:
    """What is called after the training."""
    if case.evaluated:
        call = trainer.validate if case.evaluated == "validate" else trainer.test
        for values in call(module, datamodule=data) if data else call(module, val_loaders(case)):
            found.evaluated.append([values[name] for name in sorted(values)])
    if case.predicted:
        loaders = pairs(case, models.predicted_data(case))
        outputs = trainer.predict(module, datamodule=data) if data else trainer.predict(module, loaders)
        found.predictions = torch.cat(outputs).double().flatten().tolist()
