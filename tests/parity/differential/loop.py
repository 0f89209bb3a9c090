"""A case trained with ``Engine``, in a loop of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import Engine, Loss

from . import models
from .cases import REPLICATED, Case
from .library import loader, pairs, strategy, transforms
from .reference import Trained, state, weights


class Own:
    """The loop of one rank."""

    def __init__(self, case: Case, name: str) -> None:
        self.case, self.name, self.found = case, name, Trained()
        self.engine = Engine(
            strategy=strategy(case, name), accelerator="cpu", precision=case.precision, accumulate_grad_batches=case.window(name),
            on_nonfinite="skip" if case.poison >= 0 else None, seed=1, **transforms(case),
        )  # fmt: skip
        net = models.Net(case)
        found = models.optimizers(case, net)
        plain = models.schedulers(case, found)
        prepare = self.engine.prepare
        self.model: nn.Module = prepare(net)
        self.optimizers, self.schedulers = list(map(prepare, found)), list(map(prepare, plain))
        self.loader = self.engine.prepare_data_loader(loader(case))
        self.val_loader = prepare(pairs(case, models.validation_data(case, 0)))
        self.steps = self.epoch = self.index = 0
        """Of the training, and the steps of this epoch."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.epoch, self.index = state["steps"], state["epoch"], state["index"]

    def run(self, root: Path, part: int, parts: int) -> Trained:
        case, engine, found = self.case, self.engine, self.found
        stop = case.resume if parts == 2 and part == 0 else 0
        engine.register_for_checkpointing(self)
        if parts == 2 and part == 1:
            engine.load_state(root / "here")
        else:
            torch.manual_seed(models.DROPPED)
        while self.epoch < case.epochs:
            engine.accumulate_grad_batches = case.window(self.name, self.epoch)
            for batch in map(models.flat, self.loader):
                found.seen.setdefault(f"{self.epoch}:{self.index}", []).extend(batch["i"].tolist())
                if self.step(batch) and self.steps == stop:
                    engine.save_state(root / "here")
                    found.steps = self.steps
                    return found
            if case.schedule == "epoch" or (case.schedule == "epochs" and self.epoch % 2):
                for scheduler in self.schedulers:
                    scheduler.scheduler.step()
            if case.val:
                self.validate()
            self.epoch, self.index = self.epoch + 1, 0
        found.steps = self.steps
        whole = engine.get_state_dict(self.model)
        found.final = state(case, whole) if engine.is_main_process or self.name in REPLICATED else []
        engine.release()
        return found

    def step(self, batch: Any) -> bool:
        """One micro-batch; whether a step was made."""
        case, engine = self.case, self.engine
        with engine.accumulate(self.model):
            out = self.model(batch["x"])
            every = models.each(case, out, batch["y"])
            loss: Any = every.mean()
            if case.loss in ("weighted", "counted"):
                count = batch["c"].sum()
                loss = Loss((every * batch["c"]).sum(), count if case.loss == "weighted" else float(count))
            bad = models.poisoned(case, out, batch["i"])
            if bad is not None:
                loss = Loss(loss.sum + bad, loss.count) if isinstance(loss, Loss) else loss + bad
            self.backward(loss, batch)
            norm = None
            if case.clip == "norm":
                norm = engine.clip_grad_norm_(self.model.parameters(), models.clip(case))
            elif case.clip == "value":
                engine.clip_grad_value_(self.model.parameters(), models.clip(case))
            for optimizer in self.optimizers:
                optimizer.step()
            if not engine.sync_gradients:
                return False
            self.index += 1
            skipped = engine.optimizer_step_was_skipped
            for scheduler in self.schedulers:
                if case.schedule in ("step", "cycle") or (case.schedule == "steps" and (self.steps + 1) % 2 == 0):
                    scheduler.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        if skipped:
            return False
        self.steps += 1
        if norm is not None:
            self.found.norms[self.steps] = float(norm)
        self.found.lrs[self.steps] = [group["lr"] for o in self.optimizers for group in o.param_groups]
        if self.name in REPLICATED:
            self.found.weights[self.steps] = weights(engine.unwrap_model(self.model))
        return True

    def backward(self, loss: Any, batch: Any) -> None:
        """The backward pass, or the two of a case that has second ones, each of half of the loss."""
        case, engine = self.case, self.engine
        if case.again == "retain":
            engine.backward(loss / 2, retain_graph=True)
            engine.backward(loss / 2)
        elif case.again == "views":
            other = models.each(case, self.model(batch["x"]), batch["y"]).mean()
            engine.backward(loss / 2)
            engine.backward(other / 2)
        else:
            engine.backward(loss)

    def validate(self) -> None:
        self.model.eval()
        every: list[float] = []
        with torch.no_grad():
            for batch in map(models.flat, self.val_loader):
                each = models.each(self.case, self.model(batch["x"]), batch["y"])
                every += self.engine.gather_for_metrics(each).double().tolist()
        self.model.train()
        values = {"val": sum(every) / len(every), "val_most": max(every)}
        self.found.logs.setdefault(self.steps, {}).update(values)
