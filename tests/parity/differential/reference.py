"""What a case must give: a plain float64 loop over the whole global batch. Nothing here comes from the library."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from . import models, plan
from .cases import STRATEGIES, Case

Logged = tuple[float, float, list[float]]
"""Of one forward pass: the weighted sum of its losses, the weights' sum, every sample's loss."""


@dataclass
class Trained:
    """A training, as both sides report it."""

    steps: int = 0
    weights: dict[int, list[float]] = field(default_factory=dict)
    """All parameters after each step."""
    final: list[float] = field(default_factory=list)
    """Parameters and buffers at the end."""
    lrs: dict[int, list[float]] = field(default_factory=dict)
    """Of each parameter group, after each step."""
    norms: dict[int, float] = field(default_factory=dict)
    """Of each step's gradients before they were clipped."""
    logs: dict[int, dict[str, float]] = field(default_factory=dict)
    """Everything that was logged, by step."""
    seen: dict[str, list[int]] = field(default_factory=dict)
    """The samples of each step, by ``"epoch:step of the epoch"``, sorted."""
    predictions: list[float] = field(default_factory=list)
    """The outputs for :func:`.models.predicted_data`, in its order."""
    evaluated: list[list[float]] = field(default_factory=list)
    """Of the evaluation after the training, each loader's values by name."""
    initial: list[float] = field(default_factory=list)


def flat(tensors: dict[str, Tensor]) -> list[float]:
    """All values, by name."""
    found: list[float] = []
    for name in sorted(tensors):
        value = tensors[name].detach()
        value = torch.view_as_real(value) if value.is_complex() else value
        found += value.double().flatten().tolist()
    return found


def state(case: Case, tensors: dict[str, Tensor]) -> list[float]:
    """Parameters and buffers; without those of a BatchNorm whose ranks see different samples."""
    several = max(STRATEGIES[name].data for name in (case.strategy, case.second)) > 1 and not case.sync
    return flat(
        {name: value for name, value in tensors.items() if not (several and name.rpartition(".")[2] in BATCHNORM)}
    )


BATCHNORM = ("running_mean", "running_var", "num_batches_tracked")


def weights(net: nn.Module) -> list[float]:
    return flat(dict(net.named_parameters()))


def _double(net: nn.Module) -> nn.Module:
    for module in net.modules():
        for holder in (module._parameters, module._buffers):
            for value in holder.values():
                if value is not None and (value.is_floating_point() or value.is_complex()):
                    value.data = value.data.to(torch.complex128 if value.is_complex() else torch.float64)
                    value.grad = None
    return net


def _batch(samples: models.Samples, numbers: list[int]) -> dict[str, Any]:
    return {
        name: value.double() if value.is_floating_point() else value for name, value in samples.batch(numbers).items()
    }


class Average:
    """The average of the weights, and of the buffers that are numbers."""

    def __init__(self, case: Case, net: nn.Module) -> None:
        self.case, self.net, self.count = case, net, 0
        self.values: dict[str, Tensor] = {}

    def after_step(self, step: int) -> None:
        """After the step of that number, from 0."""
        if self.case.average == "ema" or (self.case.average == "late" and step >= 1 and step % 2 == 0):
            self.update()

    def after_epoch(self) -> None:
        if self.case.average == "swa":
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        for name, value in self.net.state_dict().items():
            old = self.values.get(name, value)
            share = 1 / (self.count + 1) if self.case.average == "swa" else 1 - models.DECAY
            floating = value.is_floating_point() or value.is_complex()
            self.values[name] = old * (1 - share) + value * share if floating else value.clone()
        self.count += 1

    @contextmanager
    def used(self) -> Iterator[None]:
        """The model has the averages inside, once there are some."""
        trained = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.net.load_state_dict(self.values or trained)
        try:
            yield
        finally:
            self.net.load_state_dict(trained)


class End:
    """Who wants the training to end, and whether it does."""

    def __init__(self, case: Case) -> None:
        self.case, self.wish = case, False
        self.best, self.checks = math.nan, 0

    def after_step(self, step: int) -> None:
        self.wish |= self.case.stop == "step" and step == models.STOPPED

    def after_epoch(self) -> None:
        self.wish |= self.case.stop == "epoch"

    def check(self, value: float) -> None:
        """Early stopping with a patience of 1."""
        grows = models.early_mode(self.case) == "max"
        better = not self.checks or (value > self.best if grows else value < self.best)
        self.best, self.checks = value if better else self.best, self.checks + 1
        if self.case.stop == "early":  # a wish that waits for the minimum is over when the value has recovered
            self.wish = not better

    def wished(self, steps: int) -> bool:
        """A wish is met now."""
        return self.wish and steps >= self.case.min_steps

    def reached(self, steps: int) -> bool:
        return self.wished(steps) or 0 < self.case.max_steps <= steps


class Loop:
    """The training under way."""

    def __init__(self, case: Case, random: dict[int, list[int]]) -> None:
        self.case, self.random = case, random
        self.net = _double(models.Net(case))
        self.train = models.training_data(case)
        self.found = Trained(initial=weights(self.net))
        self.ranks = STRATEGIES[case.strategy].data
        self.optimizers = models.optimizers(replace(case, kernel=""), self.net)
        self.schedulers = models.schedulers(case, self.optimizers)
        self.rates = [group["lr"] for o in self.optimizers for group in o.param_groups]
        self.average, self.end = Average(case, self.net), End(case)
        self.validated = -1
        self.scalars = False
        """Whether there was a scalar loss."""

    def run(self) -> Trained:
        case = self.case
        torch.manual_seed(models.DROPPED)
        for epoch in range(case.epochs):
            if case.data not in ("list", "combined"):
                _begin_loader()
            self.values: list[Logged] = []
            # Other ranks divide a short global batch into other micro-batches, and the run that continues has its own.
            before, after = (list(plan.steps(case, name, epoch, self.random)) for name in (case.strategy, case.second))
            left = False
            if case.average == "swa":
                self.set_rates([models.SWA_RATE * epoch / 2 + rate * (1 - epoch / 2) for rate in self.rates])
            for index in range(len(before)):
                step = (after if 0 < case.resume <= self.found.steps else before)[index]
                self.found.seen[f"{epoch}:{index}"] = sorted(i for each in step for part in each for i in part)
                (self.manual_step if case.manual else self.step)(step, index)
                self.after_step(index, len(before))
                left = self.end.reached(self.found.steps)
                if left:
                    break
            whole = not left or (
                index == len(before) - 1 and case.data != "stream"
            )  # nobody knows that a stream is at its end
            if case.val and (self.end.wished(self.found.steps) if not whole else case.val == "epoch"):
                self.validate()
            self.end_epoch(whole)
            if left or self.end.reached(self.found.steps):
                break
        with self.average.used():
            self.found.final = state(case, self.net.state_dict())
            self.evaluate_at_the_end()
        return self.found

    def evaluate_at_the_end(self) -> None:
        case = self.case
        if case.evaluated:
            self.found.evaluated = [
                [values[name] for name in sorted(values)] for values in map(self.evaluate, range(case.val_loaders))
            ]
        if case.predicted:
            samples = models.predicted_data(case)
            with torch.no_grad():
                outputs = self.net.eval()(_batch(samples, list(range(case.predicted)))["x"])
            self.found.predictions = outputs.flatten().tolist()

    def set_rates(self, rates: list[float]) -> None:
        groups = [group for o in self.optimizers for group in o.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    # -- a step -----------------------------------------------------------------------------------------------------------------

    def begin_member(self, numbers: list[int]) -> None:
        """Where loaders are read one after the other, one may begin with these samples."""
        if self.case.data == "combined" and numbers[0] in [half[0] for half in models.halves(self.case)]:
            _begin_loader()

    def parts(self, step: plan.Step) -> list[list[int]]:
        """What one forward pass gets: the micro-batches where it matters who is in one, else all at once."""
        if self.case.sync:
            return [[i for part in each for i in part] for each in step]
        if self.case.none or self.case.body == "batchnorm" or self.case.dropout or self.case.conditional:
            return [part for each in step for part in each if part]
        return [[i for each in step for part in each for i in part]]

    def step(self, step: plan.Step, index: int) -> None:
        if self.case.closure == "warmup":
            self.set_rates([rate * models.warmup(self.found.steps) for rate in self.rates])
        if self.case.closure in ("lbfgs", "sam"):
            self.step_with_closure(step)
        else:
            self.plain_step(step, index)

    def step_with_closure(self, step: plan.Step) -> None:
        """An optimizer that computes gradients itself, each time of the whole global batch, and clipped."""
        (optimizer,) = self.optimizers
        logged: list[list[Logged]] = []

        def closure() -> float:
            optimizer.zero_grad()
            total, weight, values = torch.zeros((), dtype=torch.float64), 0.0, []
            for numbers in self.parts(step):
                batch = _batch(self.train, numbers)
                each = models.each(self.case, self.net(batch["x"]), batch["y"])
                counts = batch["c"] if self.case.loss in ("weighted", "counted") else torch.ones_like(each)
                total, weight = total + (each * counts).sum(), weight + counts.sum().item()
                values.append(((each * counts).sum().item(), counts.sum().item(), each.tolist()))
            loss = total / (weight or 1.0)
            loss.backward()
            self.clip([p for p in self.net.parameters() if p.grad is not None])
            logged.append(values)
            return loss.item()

        if self.case.closure == "sam":
            closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        self.log(logged[0])
        self.found.steps += 1
        self.stepped = True

    def clip(self, params: list[nn.Parameter]) -> float | None:
        """Clip gradients; their norm before that."""
        if self.case.clip == "value":
            _clip_values(params, models.clip(self.case))
        return nn.utils.clip_grad_norm_(params, models.clip(self.case)).item() if self.case.clip == "norm" else None

    def plain_step(self, step: plan.Step, index: int) -> None:
        case, total, weight, fed, zero = self.case, torch.zeros((), dtype=torch.float64), 0.0, False, False
        logged: list[Logged] = []
        self.stepped = False
        for numbers in self.parts(step):
            self.begin_member(numbers)
            batch = _batch(self.train, numbers)
            out = self.net(batch["x"])
            each = models.each(case, out, batch["y"])
            counts = batch["c"] if case.loss in ("weighted", "counted") else torch.ones_like(each)
            none = bool(case.none) and numbers[0] % case.none == 0
            logged.append(((each * counts).sum().item(), counts.sum().item(), each.tolist()))
            if none:
                # Alone its samples do not count; among several ranks a mean's count with a zero gradient.
                weight += counts.sum().item() if self.ranks > 1 and case.loss in ("mean", "dict") else 0.0
                zero = self.ranks > 1  # a gradient, of every trained parameter
                continue
            fed, self.scalars = True, case.loss in ("mean", "dict")
            total = total + (each * counts).sum()
            weight += counts.sum().item()
            bad = models.poisoned(case, out, batch["i"])
            if bad is not None:
                total = total + bad
        self.log(logged)
        if not fed and not (
            self.ranks > 1 and self.scalars
        ):  # among several ranks none is left out that a scalar loss came before
            return
        if total.requires_grad:
            (total / (weight or 1.0)).backward()
        for p in self.net.parameters() if zero else ():
            p.grad = torch.zeros_like(p) if p.requires_grad and p.grad is None else p.grad
        self.apply(self.optimizers)

    def apply(self, chosen: list[torch.optim.Optimizer]) -> None:
        """Clip and step, unless a gradient is not finite."""
        case = self.case
        grads = [p for o in chosen for group in o.param_groups for p in group["params"] if p.grad is not None]
        sound = all(
            bool(torch.view_as_real(p.grad).isfinite().all() if p.is_complex() else p.grad.isfinite().all())
            for p in grads
        )  # type: ignore[arg-type]
        if sound:
            norm = self.clip(grads)
            if norm is not None:
                self.found.norms[self.found.steps + 1] = norm
            for optimizer in chosen:
                optimizer.step()
            self.found.steps += 1
            if case.schedule in ("step", "cycle") or (case.schedule == "steps" and self.found.steps % 2 == 0):
                for scheduler in self.schedulers:
                    scheduler.step()
            self.stepped = True
        else:
            self.stepped = False
        for optimizer in chosen:
            optimizer.zero_grad()

    def log(self, logged: list[Logged]) -> None:
        self.values += logged
        self.newest = logged

    def manual_step(self, step: plan.Step, index: int) -> None:
        """One batch, as the module of :mod:`library` treats it."""
        case, (round_,) = self.case, step
        numbers = [i for part in round_ for i in part]
        self.begin_member(numbers)
        batch = _batch(self.train, numbers)
        self.stepped = False

        apart = (case.body == "batchnorm" and not case.sync) or case.dropout or case.conditional

        def losses() -> Tensor:
            parts = [_batch(self.train, part) for part in round_ if part] if apart else [batch]
            return torch.cat([models.each(case, self.net(part["x"]), part["y"]) for part in parts])

        every = losses()
        self.log([(every.sum().item(), float(len(numbers)), every.tolist())])
        if case.manual == "both":
            first, second = self.optimizers
            every.mean().backward()
            self.apply([first])
            second.zero_grad()
            losses().mean().backward()
            self.apply([second])
            first.zero_grad()
            return
        (every.mean() / (2 if case.manual == "second" else 1)).backward()
        if case.manual == "drop" and index % 3 == 1:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        elif case.manual != "second" or index % 2:
            self.apply(self.optimizers)

    # -- what is due --------------------------------------------------------------------------------------------------------------

    def after_step(self, index: int, count: int) -> None:
        case, found = self.case, self.found
        if self.stepped:
            self.average.after_step(found.steps - 1)
        if index == count - 1:
            self.average.after_epoch()
        if self.stepped:
            self.end.after_step(found.steps)
            found.weights[found.steps] = weights(self.net)
            found.lrs[found.steps] = [group["lr"] for o in self.optimizers for group in o.param_groups]
            if found.steps % case.log_every == 0:
                self.publish({"loss_step": _mean(self.newest)})
            if case.val == "steps" and found.steps % 2 == 0 and not self.end.wished(found.steps):
                self.validate()
        if case.val == "half":
            at = found.steps - self.epoch_start
            if at and 2 * at // count > 2 * (at - 1) // count:
                self.validate()

    def validate(self) -> None:
        if self.validated == self.found.steps:
            return
        self.validated = self.found.steps
        with self.average.used():
            for index in range(self.case.val_loaders):
                values = self.evaluate(index)
                ending = f"/dataloader_idx_{index}" if self.case.val_loaders > 1 else ""
                self.publish({f"{name}{ending}": value for name, value in values.items()})
        self.val = values["val"]
        self.end.check(self.val)

    val = 0.0
    """The newest validation's mean."""

    def evaluate(self, index: int) -> dict[str, float]:
        """The values for the validation loader of that index."""
        samples = models.validation_data(self.case, index)
        self.net.eval()
        with torch.no_grad():
            batch = _batch(samples, list(range(len(samples))))
            every = models.each(self.case, self.net(batch["x"]), batch["y"])
        self.net.train()
        mean = every.mean().item()
        return {"val": mean, "val_most": every.max().item(), "val_squares": mean}

    def end_epoch(self, whole: bool) -> None:
        every = [x for *_, each in self.values for x in each]
        whole_epoch = {"most": max(every), "least": min(every), "total": sum(every), "squares": sum(every) / len(every)}
        self.publish({"loss_epoch": _mean(self.values), **whole_epoch})
        if whole and not self.case.manual:
            self.step_schedulers(self.epochs)
        self.epochs += whole
        if whole and not self.case.val:
            self.end.check(_mean(self.values))
        if whole:
            self.end.after_epoch()
        self.epoch_start = self.found.steps

    epochs = 0
    """Those that are whole."""

    def step_schedulers(self, epoch: int) -> None:
        """Those that step by epochs, after that one."""
        monitored = {
            "epoch": [],
            "plateau": [_mean(self.values)],
            "val": [self.val],
            **({"epochs": []} if epoch % 2 else {}),
        }
        for scheduler in self.schedulers if self.case.schedule in monitored else ():
            scheduler.step(*monitored[self.case.schedule])

    epoch_start = 0

    def publish(self, values: dict[str, float]) -> None:
        self.found.logs.setdefault(self.found.steps, {}).update(values)


def _begin_loader() -> None:
    """Take the random number that torch's ``iter(DataLoader)`` takes."""
    torch.empty((), dtype=torch.int64).random_()


def _mean(values: list[Logged]) -> float:
    total, weight = sum(v[0] for v in values), sum(v[1] for v in values)
    return total / weight if weight else float("nan")


def _clip_values(parameters: list[Tensor], limit: float) -> None:
    for p in parameters:
        assert p.grad is not None
        p.grad.clamp_(-limit, limit)


def expected(case: Case, random: dict[int, list[int]]) -> Trained:
    """What the case must give."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # a scheduler's, when the first step is skipped
        return Loop(case, random).run()
