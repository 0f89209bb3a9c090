"""DDP with a model that changes while it is trained, on two real processes: each run ends with the weights of a bare fp64 loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from processes import run_ranks
from ranked import on_ranks
from torch import Tensor, nn

from engine import DDP, Callback, Engine, Fit, TrainModule

STEPS, RANKS = 6, 2
Change = Callable[[nn.Module, torch.optim.Optimizer, int, int], None]


class Net(nn.Module):
    """A backbone and a head; more parts may come and go. ``inside`` is called in each forward pass, before or after it has computed."""

    def __init__(self, inside: Callable[[Net, int, bool], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone, self.middle, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.double()
        self.inside, self.passes = inside, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is not None:
            self.inside(self, self.passes, False)
        x = torch.tanh(self.backbone(x))
        if hasattr(self, "middle"):
            x = torch.tanh(self.middle(x))
        if hasattr(self, "late"):
            x = x + self.late(x)
        x = self.head(x)
        if self.inside is not None:
            self.inside(self, self.passes, True)
        self.passes += 1
        return x


def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
    """Four samples: two for each rank."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return draw(4, 3), draw(4, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def bare(change: Change | None = None, window: int = 1, begin: Change | None = None, **options: Any) -> Tensor:
    """One process, the whole global batch, plain PyTorch."""
    model = Net(**options)
    if begin is not None:
        begin(model, None, 0, 0)  # type: ignore[arg-type]
    optimizer = sgd(model)
    torch.manual_seed(0)  # rank 0's
    for step in range(STEPS):
        for micro in range(window):
            if change is not None:
                change(model, optimizer, step, micro)
            x, y = batch(step, micro)
            ((model(x) - y).square().mean() / window).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def ours(change: Change | None = None, window: int = 1, begin: Change | None = None, strategy: Any = "ddp", **options: Any) -> Tensor:
    engine = Engine(accelerator="cpu", strategy=strategy, accumulate_grad_batches=window)
    plain = Net(**options)
    if begin is not None:
        begin(plain, None, 0, 0)  # type: ignore[arg-type]
    inner = sgd(plain)
    model, optimizer = engine.prepare(plain, inner)
    own = slice(2 * engine.process_index, 2 * engine.process_index + 2)
    torch.manual_seed(engine.process_index)  # what is added has other first values on each rank
    for step in range(STEPS):
        for micro in range(window):
            with engine.accumulate(model):
                if change is not None:
                    change(plain, inner, step, micro)
                x, y = batch(step, micro)
                engine.backward((model(x[own]) - y[own]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    found = flat(plain)
    assert len(engine.gather(found).view(RANKS, -1).unique(dim=0)) == 1, "the ranks differ"
    return found


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item() if one.shape == other.shape else 1e9


# -- changes ------------------------------------------------------------------------------------------------------------------------


def freeze_all_but_head(model: Any, *_: Any) -> None:
    model.backbone.requires_grad_(False)
    model.middle.requires_grad_(False)


def unfreeze(model: Any, optimizer: Any, step: int, micro: int) -> None:
    if step >= 2:
        model.backbone.requires_grad_(True)
    if step >= 4:
        model.middle.requires_grad_(True)


def freeze(model: Any, optimizer: Any, step: int, micro: int) -> None:
    if step == 2:
        model.head.requires_grad_(False)
    if step == 4:
        model.backbone.weight.requires_grad_(False)


def in_turns(model: Any, optimizer: Any, step: int, micro: int) -> None:
    model.backbone.requires_grad_(step % 2 == 0)
    model.head.requires_grad_(step % 2 == 1)


def add(model: Any, optimizer: Any, step: int, micro: int) -> None:
    if step == 2 and micro == 0:
        model.late = nn.Linear(4, 4).double()
        optimizer.add_param_group({"params": model.late.parameters(), "lr": 0.1})


def replace(model: Any, optimizer: Any, step: int, micro: int) -> None:
    if step == 2 and micro == 0:
        model.head = nn.Linear(4, 1).double()
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.1})


def remove(model: Any, optimizer: Any, step: int, micro: int) -> None:
    if step == 2 and micro == 0:
        del model.middle


def tie(model: Any, optimizer: Any, step: int, micro: int) -> None:
    if step == 1 and micro == 0:
        model.aside = [model.middle.bias]  # in a list: not registered
        model.middle.bias = model.backbone.bias
    if step == 4 and micro == 0:
        model.middle.bias = model.aside[0]


def in_window(model: Any, optimizer: Any, step: int, micro: int) -> None:
    """In the middle of windows of four: what was gathered so far counts."""
    if micro == 1 and step == 1:
        model.middle.requires_grad_(False)
    if micro == 3 and step == 2:
        model.head.requires_grad_(False)
    if micro == 2 and step == 4:
        model.middle.requires_grad_(True)


def written(model: Any, optimizer: Any, step: int, micro: int) -> None:
    """Past ``Module.__setattr__``, as some libraries do."""
    if step == 2 and micro == 0:
        model.head._parameters["weight"] = nn.Parameter(torch.full((1, 4), 0.5, dtype=torch.float64))
        optimizer.param_groups[0]["params"][4] = model.head.weight


def unfreeze_inside(before: bool) -> Callable[[Any, int, bool], None]:
    def inside(model: Any, count: int, after: bool) -> None:
        if count == 2 and after is not before:
            model.backbone.requires_grad_(True)

    return inside


def freeze_inside(model: Any, count: int, after: bool) -> None:
    if count == 2 and not after:
        model.middle.requires_grad_(False)


def add_inside(same: bool) -> Callable[[Any, int, bool], None]:
    def inside(model: Any, count: int, after: bool) -> None:
        if count == 2 and not after:
            model.late = nn.Linear(4, 4).double()
            if same:
                nn.init.constant_(model.late.weight, 0.25)
                nn.init.zeros_(model.late.bias)

    return inside


# -- what runs on each of two ranks ---------------------------------------------------------------------------------------------------


def rank_changes() -> Any:
    cases = {
        "unfreeze": (unfreeze, {"begin": freeze_all_but_head}),
        "freeze": (freeze, {}),
        "in turns": (in_turns, {}),
        "add": (add, {}),
        "replace": (replace, {}),
        "remove": (remove, {}),
        "tie": (tie, {}),
        "written": (written, {}),
        "inside, before its use": (None, {"begin": freeze_all_but_head, "inside": unfreeze_inside(before=True)}),
        "inside, after its use": (None, {"begin": freeze_all_but_head, "inside": unfreeze_inside(before=False)}),
        "frozen inside": (None, {"inside": freeze_inside}),
        "added inside": (None, {"inside": add_inside(same=True)}),
    }
    found = {name: apart(ours(change, **more), bare(change, **more)) for name, (change, more) in cases.items()}
    for name, (change, more) in cases.items():
        if change is not None:
            found[f"{name}, window 4"] = apart(ours(change, window=4, **more), bare(change, window=4, **more))
    return {**found, "in window": apart(ours(in_window, window=4), bare(in_window, window=4))}


SETTINGS = {
    "static": DDP(static_graph=True),
    "view": DDP(gradient_as_bucket_view=True),
    "static view": DDP(static_graph=True, gradient_as_bucket_view=True),
    "unused": DDP(find_unused_parameters=True),
    "small buckets": DDP(bucket_cap_mb=0.00005),
    "late powersgd": DDP(comm_hook="powersgd"),
    "no broadcast": DDP(broadcast_buffers=False),
}


def rank_settings() -> Any:
    found = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        for name, strategy in SETTINGS.items():
            for window in (1, 4):
                change = in_window if window == 4 else freeze
                found[f"{name} {window}"] = apart(ours(change, window, strategy=strategy), bare(change, window))
                more = {"begin": freeze_all_but_head}
                found[f"{name} {window} unfrozen"] = apart(ours(unfreeze, window, strategy=strategy, **more), bare(unfreeze, window, **more))
    # Compressed, so not equal, but of the right size: PowerSGD's matrices are those of buckets that are gone.
    found["powersgd"] = apart(ours(freeze, strategy=DDP(comm_hook="powersgd", powersgd_start=2)), bare(freeze)) / 100
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return on_ranks(__file__, RANKS)


def test_a_changed_model_trains_as_on_one_process(found: Any) -> None:
    for rank in found["changes"]:
        assert {name: value for name, value in rank.items() if value > 1e-12} == {}


def test_every_setting_outlives_a_change(found: Any) -> None:
    for rank in found["settings"]:
        assert {name: value for name, value in rank.items() if value > (1e-2 if name == "powersgd" else 1e-12)} == {}
