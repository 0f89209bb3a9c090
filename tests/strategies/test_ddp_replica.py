"""DDP with a model that changes while it is trained, on two real processes: each run ends with the weights of a bare fp64 loop."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from engine import DDP, Callback, Engine, Fit, Loss, TrainModule

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


def ours(
    change: Change | None = None, window: int = 1, begin: Change | None = None, strategy: Any = "ddp", **options: Any
) -> Tensor:
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
                found[f"{name} {window} unfrozen"] = apart(
                    ours(unfreeze, window, strategy=strategy, **more), bare(unfreeze, window, **more)
                )
            for when, before in (("before", True), ("after", False)):
                inside: Any = {"begin": freeze_all_but_head, "inside": unfreeze_inside(before)}
                found[f"{name} inside, {when} its use"] = apart(ours(strategy=strategy, **inside), bare(**inside))
    # One strategy for many models, of which one may get the address of one that is gone.
    strategy = DDP(static_graph=True)
    found["static 4, many models"] = max(apart(ours(window=4, strategy=strategy), bare(window=4)) for _ in range(20))
    # Compressed, so not equal, but of the right size: PowerSGD's matrices are those of buckets that are gone.
    found["powersgd"] = apart(ours(freeze, strategy=DDP(comm_hook="powersgd", powersgd_start=2)), bare(freeze)) / 100
    return found


def says(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def rank_refused() -> Any:
    engine = Engine(accelerator="cpu")
    rank = engine.process_index

    def assign(model: Any, optimizer: Any, step: int, micro: int) -> None:
        if step == 2:
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)

    def differently(model: Any, optimizer: Any, step: int, micro: int) -> None:
        if step == 2:
            (model.backbone if rank else model.middle).requires_grad_(True)

    frozen = engine.prepare(Net().requires_grad_(False))
    silent = says(lambda: frozen(torch.ones(2, 3).double()))
    frozen.requires_grad_(True)
    unfrozen = says(lambda: frozen(torch.ones(2, 3).double()))
    engine.release()
    return {
        "assign": says(lambda: ours(assign)),
        "differently": says(lambda: ours(differently, begin=freeze_all_but_head)),
        "added inside": says(lambda: ours(inside=add_inside(same=False))),
        "frozen": [silent, unfrozen, says(lambda: frozen(torch.ones(2, 3).double()))],
    }


class Forgetful(TrainModule):
    """A module whose loss does not depend on its second head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.second = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, batch: Tensor) -> Any:
        return self.head(self.body(batch)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rank_unused() -> Any:
    """What is said about parameters without gradient: at the first of two steps, at the only one, and in a loop of one's own."""

    def said(call: Callable[[], Any]) -> str:
        try:
            call()
        except RuntimeError as error:
            return str(error)
        return "no error"

    def fit(batches: int, **settings: Any) -> str:
        fit = Fit(accelerator="cpu", max_epochs=1, **settings)
        return said(lambda: fit.run(Forgetful(), [torch.ones(2, 3) for _ in range(batches)]))

    def own_loop() -> None:
        engine, module = Engine(accelerator="cpu"), Forgetful()
        model, optimizer = engine.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(2):
            engine.backward(model(torch.ones(2, 3)))
            optimizer.step()

    return [
        fit(4, strategy="ddp"),
        fit(4, strategy="ddp", accumulate_grad_batches=2),
        said(own_loop),
        fit(4, strategy="ddp_find_unused_parameters_true"),
    ]


def rank_assigned_and_given() -> Any:
    """Whoever replaces parameters and gives the optimizer the new ones is let alone."""

    def change(model: Any, optimizer: Any, step: int, micro: int) -> None:
        if step == 2:
            model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()}, assign=True)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return apart(ours(change), bare(change))


def adversarial(prepare: Callable[..., Any], own: slice) -> Tensor:
    """Two models, one frozen while the other is trained."""
    maker, judge = Net(), Net()
    maker.head = nn.Linear(4, 3).double()
    torch.nn.init.constant_(maker.head.weight, 0.3)
    torch.nn.init.zeros_(maker.head.bias)
    made, judged, first, second, backward = prepare(maker, judge, sgd(maker), sgd(judge))
    for step in range(STEPS):
        x = batch(step, 0)[0][own]
        backward((judged(x) - judged(made(x).detach())).square().mean())
        second.step()
        second.zero_grad()
        judge.requires_grad_(False)
        backward(judged(made(x)).square().mean())
        first.step()
        first.zero_grad()
        judge.requires_grad_(True)
    return torch.cat([flat(maker), flat(judge)])


def rank_adversarial() -> Any:
    engine = Engine(accelerator="cpu")
    reducers: list[Any] = []

    def prepared(*objects: Any) -> Any:
        made, judged, first, second = engine.prepare(*objects)
        reducers.extend([judged, judged.reducer])
        return made, judged, first, second, engine.backward

    low = 2 * engine.process_index
    distance = apart(
        adversarial(prepared, slice(low, low + 2)),
        adversarial(lambda *objects: (*objects, Tensor.backward), slice(None)),
    )
    return [distance, reducers[0].reducer is reducers[1]]


def rank_wrapped_again() -> Any:
    """The wrapper outlives the change, with the user's hooks on it; the reducer before does not, which would hold a copy of all gradients."""
    engine, seen = Engine(accelerator="cpu"), Counter[str]()
    model = engine.prepare(Net())

    def noted(state: Any, bucket: Any) -> Any:
        seen["reductions"] += 1
        return allreduce_hook(None, bucket)

    noted.__annotations__.clear()  # torch compares them with types, and they are strings
    model.register_comm_hook(None, noted)
    model.register_forward_hook(lambda *_: seen.update(["passes"]))
    reducer, copied = weakref.ref(model.reducer), copy.deepcopy(model)
    gc.disable()
    for trained in (True, False, True):
        model.module.middle.requires_grad_(trained)
        engine.backward(model(torch.ones(2, 3).double()).mean())
    gc.enable()
    passes = dict(seen)
    copied.module.requires_grad_(False)
    copied(torch.ones(2, 3).double())  # belongs to no job: nobody is asked
    return [passes, reducer() is None, type(copied).__name__]


def rank_frozen_first() -> Any:
    """A static graph whose first pass trains nothing: only the gradient of the input passes through it."""
    engine = Engine(accelerator="cpu", strategy=DDP(static_graph=True))
    model, inputs = engine.prepare(Net()), torch.ones(2, 3).double().requires_grad_()
    for trained in (False, True, False, True):
        model.module.requires_grad_(trained)
        engine.backward(model(inputs * (1 + engine.process_index)).mean())
    assert inputs.grad is not None
    mine = model.module.head.weight.grad
    return [bool(inputs.grad.any()), len(engine.gather(mine).view(RANKS, -1).unique(dim=0))]


class Tuned(TrainModule):
    def __init__(self, begin: str = "") -> None:
        super().__init__()
        self.net = Net()
        for part in begin.split():
            getattr(self.net, part).requires_grad_(False)
        self.at: str = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.at == "step" and self.global_step == 2:
            self.net.backbone.requires_grad_(True)
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        if self.at == "start":
            self.net.head.requires_grad_(True)
        return sgd(self.net)


class Unfreezes(Callback):
    def __init__(self, at: str) -> None:
        self.at = at

    def on_train_epoch_start(self, run: Any, module: Any) -> None:
        if self.at == "epoch" and run.epoch == 1:
            module.net.backbone.requires_grad_(True)

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.at == "batch" and run.step == 2:
            module.net.backbone.requires_grad_(True)

    def on_before_optimizer_step(self, run: Any, module: Any, optimizer: Any) -> None:
        if self.at == "late" and run.step == 1:
            module.net.backbone.requires_grad_(True)


def rank_fit() -> Any:
    """Two steps an epoch, three epochs; unfrozen from step 2 on."""
    rows = [batch(step, 0) for step in (0, 1)]
    data = torch.utils.data.TensorDataset(torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows]))
    found = {}
    for at in ("epoch", "batch", "late", "step", "start"):
        begin = "backbone" if at != "start" else "backbone middle head"
        module, expected = Tuned(begin), Tuned(begin)
        module.at = at
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        Fit(accelerator="cpu", strategy="ddp", max_epochs=3, callbacks=Unfreezes(at), seed=1).run(module, loader)
        optimizer = sgd(expected)
        if at == "start":
            expected.net.head.requires_grad_(True)
        for step in range(6):
            if step == 2 and at != "start":
                expected.net.backbone.requires_grad_(True)
            x, y = rows[step % 2]
            (expected.net(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[at] = apart(flat(module), flat(expected))
    return found


class Branched(TrainModule):
    """The branch is frozen in the second micro-batch of a window of two. Until then it is reached on rank 0 only: rank 1 does not call it, or
    (``leaves_out``) has no loss."""

    def __init__(self, leaves_out: bool) -> None:
        super().__init__()
        self.net, self.leaves_out = Net(), leaves_out
        self.net.late = nn.Linear(4, 4).double()
        nn.init.constant_(self.net.late.weight, 0.25)
        nn.init.constant_(self.net.late.bias, 0.5)

    def branch(self, batch_idx: int) -> None:
        self.net.late.requires_grad_(batch_idx % 2 == 0)

    def losses(self, step: int, rank: int, reached: bool) -> Tensor:
        x, y = (part[rank::2] for part in batch(step, 0))
        hidden = torch.tanh(self.net.backbone(x))
        if reached:
            hidden = hidden + self.net.late(hidden)
        return (self.net.head(torch.tanh(self.net.middle(hidden))) - y).square()

    def training_step(self, unused: Any, batch_idx: int) -> Any:
        self.branch(batch_idx)
        alone = batch_idx % 2 == 0 and self.global_rank == 1
        if alone and self.leaves_out:
            return None
        return Loss(self.losses(batch_idx, self.global_rank, not alone).sum(), 2)

    def configure_optimizers(self) -> Any:
        return sgd(self)


def rank_frozen_in_a_window() -> Any:
    """Four windows of two micro-batches; each rank has two of a batch's four samples."""
    found = {}
    for leaves_out in (False, True):
        for search in (False, True):
            module, expected = Branched(leaves_out), Branched(leaves_out)
            settings: Any = {"accelerator": "cpu", "max_epochs": 1, "accumulate_grad_batches": 2, "seed": 1}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*returned None")
                Fit(strategy=DDP(find_unused_parameters=search), **settings).run(
                    module, torch.utils.data.DataLoader(torch.zeros(32), batch_size=2)
                )
            optimizer = sgd(expected)
            for step in range(8):
                expected.branch(step)
                losses = [expected.losses(step, 0, True)]
                if step % 2 or not leaves_out:
                    losses.append(expected.losses(step, 1, bool(step % 2)))
                (torch.cat(losses).sum() / (6 if leaves_out else 8)).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            found[f"{leaves_out} {search}"] = apart(flat(module), flat(expected))
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, RANKS)


def test_a_changed_model_trains_as_on_one_process(found: Any) -> None:
    for rank in found["changes"]:
        assert {name: value for name, value in rank.items() if value > 1e-12} == {}


def test_every_setting_outlives_a_change(found: Any) -> None:
    for rank in found["settings"]:
        assert {name: value for name, value in rank.items() if value > (1e-2 if name == "powersgd" else 1e-12)} == {}


def test_a_change_that_cannot_be_followed_is_an_error_on_all_ranks(found: Any) -> None:
    for rank in found["refused"]:
        assert "optimizer" in rank["assign"]
        assert "backbone.weight" in rank["assign"]
        assert "rank 0 now trains these parameters" in rank["differently"]
        assert "only here: middle.weight [4, 4] torch.float64" in rank["differently"]
        assert "late.weight" in rank["added inside"]
        assert "on_train_batch_start" in rank["added inside"]
        silent, unfrozen, released = rank["frozen"]
        assert (silent, released) == ("no error", "no error")
        assert "had no trained parameter when it was prepared" in unfrozen


def test_parameters_replaced_in_the_optimizer_too(found: Any) -> None:
    assert max(found["assigned_and_given"]) < 1e-12


def test_models_that_are_frozen_in_turns_keep_their_reducer(found: Any) -> None:
    for distance, kept in found["adversarial"]:
        assert distance < 1e-12
        assert kept


def test_a_parameter_that_one_rank_reached_is_frozen_inside_a_window(found: Any) -> None:
    for distances in found["frozen_in_a_window"]:
        assert {name: distance for name, distance in distances.items() if distance > 1e-12} == {}


def test_the_wrapper_outlives_a_change_and_its_reducer_does_not(found: Any) -> None:
    assert found["wrapped_again"] == [[{"reductions": 3, "passes": 3}, True, "Replica"]] * RANKS


def test_a_static_graph_that_begins_with_nothing_to_train(found: Any) -> None:
    assert found["frozen_first"] == [[True, 1]] * RANKS


def test_fit_follows_what_callbacks_and_training_steps_unfreeze(found: Any) -> None:
    for rank in found["fit"]:
        assert {name: value for name, value in rank.items() if value > 1e-12} == {}


def test_parameters_without_gradient_are_named_with_the_setting_that_allows_them(found: Any) -> None:
    for *refused, allowed in found["unused"]:
        for message in refused:
            assert "did not depend on" in message
            assert ": second.weight, second.bias. " in message
            assert 'strategy={"name": "ddp", "find_unused_parameters": True}' in message
        assert allowed == "no error"


ALONE = """
import os, torch
from torch import nn
from engine import Engine

engine = Engine(accelerator="cpu")
plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
plain[0].requires_grad_(False)
model = engine.prepare(plain)
engine.backward(model(torch.ones(2, 2)).mean())
engine.group.barrier()
if engine.process_index:
    os._exit(0)
plain[0].requires_grad_(True)
try:
    model(torch.ones(2, 2))
except RuntimeError as error:
    report(str(error))
os._exit(0)
"""


def test_a_change_of_one_rank_alone_is_named_when_the_wait_for_the_others_ends() -> None:
    alone, _ = run_ranks(ALONE, 2)
    assert (
        "waiting for the other ranks, which must make the same change of the model. It now trains these parameters on this rank"
        in alone.value
    )
    assert "0.weight, 0.bias" in alone.value
