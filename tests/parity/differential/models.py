"""The models, losses and data of cases, in plain PyTorch. Both sides train these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from .cases import Case

FEATURES = 4
LEAST = {"some": 0.0, "one": 1.0, "nobody": 1e9}
"""A micro-batch whose first feature is larger runs the block; features are drawn from a normal distribution."""


class Net(nn.Module):
    """[batch, 4] -> [batch, 4]; parameters from the case's seed, in float32."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1000 + case.seed)
        self.body, self.dropout = case.body, case.dropout
        if case.body == "tied":
            self.up: nn.Module = nn.Embedding(4, FEATURES)
            self.down: nn.Module = nn.Linear(FEATURES, FEATURES)
            self.head = nn.Linear(FEATURES, 4, bias=False)
            self.head.weight = self.up.weight  # type: ignore[assignment]
        else:
            self.up, self.down = nn.Linear(FEATURES, 6), nn.Linear(6, FEATURES)
            self.head = nn.Linear(FEATURES, FEATURES)
        self.bend, self.bend_again = nn.Tanh(), nn.Tanh()
        if case.body == "gru":
            self.up = nn.GRU(2, 6, batch_first=True)
        if case.body == "batchnorm":
            self.norm = nn.BatchNorm1d(3)
        if case.body == "complex":
            self.turn = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.complex64) / 2)
        if case.shared:
            self.twice = nn.Linear(FEATURES, FEATURES)
        if case.unused:
            self.spare = nn.Linear(2, 2)
        self.conditional = case.conditional
        if (
            case.conditional
        ):  # blocks stand in the order in which they run: FSDP must know the place of one that no rank runs at first
            head = self.head
            del self.head
            self.extra, self.head = nn.Linear(FEATURES, FEATURES), head
        if case.configured == "own":
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.4)
        self.shared = case.shared
        if case.frozen:
            self.up.requires_grad_(False)

    def blocks(self) -> list[nn.Module]:
        """The modules that are computed again in the backward pass."""
        return [self.down, *([self.twice] if self.shared else [])]

    def forward(self, x: Tensor) -> Tensor:
        if self.body == "tied":
            h = self.up((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
        elif self.body == "gru":
            h = self.up(x.view(len(x), 2, 2))[0][:, -1]
        elif self.body == "complex":
            turned = x.to(self.turn.dtype) @ self.turn
            h = torch.tanh(self.up(turned.real + torch.tanh(turned.imag)))
        else:
            h = self.bend(self.up(x))
        if self.body == "batchnorm":
            h = self.norm(h.view(len(h), 3, 2)).flatten(1)  # two values a channel even of one sample
        if self.dropout and self.training:
            h = h * (2.0 * (torch.rand(h.shape) < 0.5).to(h.dtype))  # the same numbers, whatever the precision
        h = self.bend_again(self.down(h))
        if self.shared:
            h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        if self.conditional and float(x[0, 0].detach()) > LEAST[self.conditional]:
            h = h + torch.tanh(self.extra(h))
        out: Tensor = self.head(h)
        return out


def each(case: Case, out: Tensor, y: Tensor) -> Tensor:
    """The loss of every sample. Shape [batch]."""
    return (out - y).square().mean(1) * factor(case)


def poisoned(case: Case, out: Tensor, numbers: Tensor) -> Tensor | None:
    """A zero whose gradient is not finite, when one of the samples is the poisoned one."""
    if case.poison < 0 or not bool((numbers == case.poison).any()):
        return None
    return (out.sum() * 0).sqrt()


def factor(case: Case) -> float:
    """What the loss is multiplied by: under fp16 gradients must not overflow at the first loss scale, 65536."""
    return 1 / 256 if case.precision == "16-mixed" else 1.0


def clip(case: Case) -> float:
    """The limit of clipping."""
    return {"norm": 0.3, "value": 0.05}[case.clip] * factor(case)


class Noisy(torch.optim.SGD):
    """SGD that adds random numbers, drawn in its step: what the weights are is not known beforehand, but all replicas must have the same."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p), alpha=0.01)
        return loss


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: steps by the gradient at the weights a bit up the first gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def first_step(self) -> None:
        self.up = [(p, p.grad.clone()) for p in self.param_groups[0]["params"] if p.grad is not None]
        for p, grad in self.up:
            p.add_(grad, alpha=0.1)

    @torch.no_grad()
    def second_step(self) -> None:
        for p, grad in self.up:
            p.sub_(grad, alpha=0.1)
        self.base.step()

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


DROPPED = 77
"""The seed at the start of the training, for what is dropped."""
STOPPED = 2
"""The step after which the end is asked for."""
DECAY = 0.5
"""Of the exponential moving average."""
SWA_RATE = 0.04
"""The learning rate that ``SWA`` goes to."""


def early_mode(case: Case) -> str:
    """Of ``EarlyStopping``: one for losses that should grow ends soon."""
    return "min" if case.seed % 3 == 0 else "max"


def warmup(step: int) -> float:
    """The share of the learning rate in that step, from 0, of a module that sets it."""
    return min(1.0, (step + 1) / 4)


def optimizers(case: Case, net: nn.Module) -> list[torch.optim.Optimizer]:
    """Those of the case, over what is trained."""
    trained = [p for p in net.parameters() if p.requires_grad]
    if case.closure == "lbfgs":
        return [torch.optim.LBFGS(trained, lr=0.1, max_iter=2)]
    if case.closure == "sam":
        return [SAM(trained, lr=0.1)]
    if case.noisy:
        return [Noisy(trained, lr=0.1)]
    kernel: dict[str, Any] = {case.kernel: True} if case.kernel else {}
    if case.optimizer == "momentum":
        return [
            torch.optim.SGD(trained, lr=0.05 / factor(case), momentum=0.9, weight_decay=0.1 * factor(case), **kernel)
        ]
    # A large eps: without it Adam makes steps of full size out of rounding errors.
    if case.optimizer == "adam":
        return [torch.optim.Adam(trained, lr=0.02, eps=1e-2, **kernel)]
    if case.optimizer == "adamw":
        half = len(trained) // 2
        groups = [{"params": trained[:half]}, {"params": trained[half:], "lr": 0.01}]
        return [torch.optim.AdamW(groups, lr=0.02, eps=1e-2, weight_decay=0.1, **kernel)]
    if case.optimizer == "two" and len(trained) > 2:
        return [
            torch.optim.SGD(trained[:2], lr=0.1, **kernel),
            torch.optim.Adam(trained[2:], lr=0.02, eps=1e-2, **kernel),
        ]
    return [torch.optim.SGD(trained, lr=0.1 / factor(case), **kernel)]


def schedulers(case: Case, found: list[torch.optim.Optimizer]) -> list[Any]:
    """One for each optimizer."""
    if case.schedule == "cycle":
        return [
            torch.optim.lr_scheduler.OneCycleLR(o, [3 * g["lr"] for g in o.param_groups], 60, cycle_momentum=False)
            for o in found
        ]
    if case.schedule in ("plateau", "val"):
        return [torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0) for o in found]
    return [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in found] if case.schedule else []


# -- data -------------------------------------------------------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """Sample ``i``: features ``x``, target ``y``, a count ``c`` of 0 to 3, its number ``i``."""

    def __init__(self, case: Case, count: int, offset: int = 0) -> None:
        generator = torch.Generator().manual_seed(7 + case.seed)
        size = count + offset
        self.x = torch.randn(size, FEATURES, generator=generator)[offset:]
        self.y = torch.randn(size, FEATURES, generator=generator)[offset:]
        counts = torch.randint(0, 4, (size,), generator=generator)[offset:]
        self.c = torch.where(counts < 2, 0, counts).float()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "c": self.c[index], "i": index}

    def batch(self, numbers: list[int]) -> dict[str, Any]:
        """These samples as one batch."""
        at = torch.tensor(numbers, dtype=torch.int64)
        return {"x": self.x[at], "y": self.y[at], "c": self.c[at], "i": at}


def training_data(case: Case) -> Samples:
    return Samples(case, case.samples)


def validation_data(case: Case, index: int) -> Samples:
    """Of the validation loader with that index: the second has fewer samples."""
    return Samples(case, case.val_samples if not index else max(1, case.val_samples - 3), offset=100 + 50 * index)


def predicted_data(case: Case) -> Samples:
    return Samples(case, case.predicted, offset=200)


def ready_batches(case: Case) -> list[list[int]]:
    """The numbers of the samples in each batch, where batches stay whole: of different sizes."""
    if case.data == "combined":
        return [
            list(numbers[at : at + case.batch]) for numbers in halves(case) for at in range(0, len(numbers), case.batch)
        ]
    sizes, left, batches = [case.batch, 1, case.batch + 1], list(range(case.samples)), []
    while left:
        size = sizes[len(batches) % 3]
        batches.append(left[:size])
        left = left[size:]
    return batches


class Fixed(Sampler[Any]):
    """A sampler of the user's own: these items, in this order."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Reading(IterableDataset[Any]):
    """Ready batches, one after the other; workers take turns."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return iter(self.batches if worker is None else self.batches[worker.id :: worker.num_workers])


def halves(case: Case) -> list[range]:
    """The numbers of the samples in each member of a ``CombinedLoader``."""
    half = case.samples // 3
    return [numbers for numbers in (range(half), range(half, case.samples)) if numbers]


def nested(batch: dict[str, Any]) -> tuple[Any, ...]:
    """The batch in another form."""
    return batch["x"], {"target": [batch["y"], batch["c"]], "name": "some text"}, None, (batch["i"],)


def kept(numbers: list[int]) -> list[int]:
    """The samples that a filter in the collate function leaves of a micro-batch: its first one, and those whose number does not divide by 4."""
    return [number for index, number in enumerate(numbers) if not index or number % 4]


def collate_filtered(samples: list[dict[str, Any]]) -> Any:
    """A ``collate_fn`` that leaves out some samples."""
    return default_collate([sample for index, sample in enumerate(samples) if not index or sample["i"] % 4])


def collate_nested(samples: list[dict[str, Any]]) -> tuple[Any, ...]:
    """A ``collate_fn``."""
    return nested(default_collate(samples))


def flat(batch: Any) -> dict[str, Any]:
    """The batch as :class:`Samples` has it, whatever its form."""
    if isinstance(batch, dict):
        return batch
    x, others, nothing, (i,) = batch
    assert nothing is None
    assert others["name"] == "some text"
    return {"x": x, "y": others["target"][0], "c": others["target"][1], "i": i}


def given_order(case: Case) -> list[int]:
    """The order of a sampler that is fixed: a part of the samples, or some of them twice."""
    numbers = list(range(case.samples))
    return numbers[::-2] if case.data == "subset" else numbers[1:] + numbers[: 1 + case.samples // 2]
