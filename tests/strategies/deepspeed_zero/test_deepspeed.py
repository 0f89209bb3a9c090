"""DeepSpeed on real processes: what each rank holds, loops of the user's own, configuration, verdicts, errors. (Parity: tests/parity.)"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file, run_script
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from engine import DeepSpeed, Engine, Fit, Loss, Precision, TrainModule, strategies

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return out


class Net(TrainModule):
    """Regression; parameters from seed 11 plus what ``shift`` says. One of them is the module's own, and none of the sizes is even."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]))
        self.lrs: list[float] = []
        with torch.no_grad():
            for p in self.parameters():
                p += shift

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x)) * self.scale
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self(batch) - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", (self(batch) - 1).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"},
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.lr_schedulers() is not None:
            self.lrs.append(round(self.lr_schedulers().get_last_lr()[0], 6))


def data(count: int = 8) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(5))


def loss_of(out: Tensor) -> Tensor:
    return (out - 1).square().mean()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole(engine: Engine, model: nn.Module) -> Tensor | None:
    """All parameters on rank 0, in the order of ``flat``."""
    inner = engine.unwrap_model(model)
    names = [name for name, _ in inner.named_parameters()]
    state = engine.strategy.model_state(inner)
    return torch.cat([state[name].flatten() for name in names]) if state else None


def apart(one: Tensor | None, other: Tensor) -> float:
    """0 on ranks that have nothing to compare."""
    return 0.0 if one is None else (one - other).abs().max().item()


def bare(steps: int = 3, before: int = 0) -> Tensor:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(before + steps):
        loss_of(model(data())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def made(stage: int, **more: Any) -> DeepSpeed:
    return DeepSpeed(stage=stage, param_persistence_threshold=0 if stage == 3 else None, **more)


def of(stage: int, **more: Any) -> Engine:
    return Engine(accelerator="cpu", strategy=made(stage), **more)


def steps(engine: Engine, model: Any, optimizer: Any, count: int = 3) -> None:
    mine = data()[engine.process_index :: engine.num_processes]
    for _ in range(count):
        engine.backward(loss_of(model(mine)))
        engine.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def fit(module: TrainModule, batches: Any, validation: Any = None, **settings: Any) -> Any:
    with tempfile.TemporaryDirectory() as root:
        return Fit(
            **{"accelerator": "cpu", "strategy": "deepspeed", "max_epochs": 1, "seed": 1, "root_dir": root, "num_sanity_val_steps": 0, **settings}
        ).run(module, batches, validation)  # fmt: skip


def each(function: Callable[[int], Any], stages: tuple[int, ...] = STAGES) -> list[Any]:
    return [function(stage) for stage in stages]


def said(function: Callable[[], Any]) -> str:
    """The words of the error that ``function`` must raise."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# -- what runs on each of two ranks -----------------------------------------------------------------------------------------------


def rank_bytes() -> Any:
    """Bytes of parameters, master copies and optimizer state on this rank, and those of the whole."""

    def of_stage(stage: int) -> Any:
        engine, model = of(stage), Net()
        prepared: Any
        prepared, optimizer = engine.prepare(model, torch.optim.Adam(model.parameters()))
        steps(engine, prepared, optimizer, 1)
        held = sum(p.ds_tensor.numel() if stage == 3 else p.numel() for p in model.parameters())
        master = sum(p.numel() for p in optimizer.state)
        state = sum(s.numel() for entry in optimizer.state.values() for s in entry.values() if s.ndim)
        gathered = [p.numel() for p in model.parameters()] if stage == 3 else [0]
        return [held, master, state, sum(p.numel() for p in Net().parameters()), max(gathered)]

    return each(of_stage)


def rank_orders() -> Any:
    def run(stage: int, order: str) -> float:
        engine = of(stage)
        model: Any = Net(shift=0.1 * engine.process_index)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        if order == "together":
            model, optimizer = engine.prepare(model, optimizer)
        elif order == "optimizer first":
            optimizer = engine.prepare(optimizer)
            model = engine.prepare(model)
        else:
            model = engine.prepare(model)
            optimizer = engine.prepare(optimizer)
        assert engine.prepare(model) is model
        steps(engine, model, optimizer)
        norm = engine.grad_norm
        return apart(whole(engine, model), bare()) + (0.0 if norm is not None and norm > 0.1 else 1.0)

    return {
        order: each(lambda stage, order=order: run(stage, order))
        for order in ("together", "optimizer first", "model first")
    }


def rank_warm_optimizer() -> Any:
    """The optimizer has made two steps before: its state is spread too."""

    def run(stage: int) -> float:
        model: Any = Net()
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(2):
            loss_of(model(data())).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        engine = of(stage)
        optimizer, model = engine.prepare(optimizer, model)
        steps(engine, model, optimizer)
        return apart(whole(engine, model), bare(3, before=2))

    return each(run)


def rank_passes() -> Any:
    """Two forward passes for one backward pass, two for two, and two whole passes for one step."""

    def run(stage: int, kind: str) -> float:
        engine, model = of(stage), Net()
        prepared: Any
        prepared, optimizer = engine.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        one, other = data()[engine.process_index :: 2].chunk(2)
        for _ in range(3):
            first = loss_of(prepared(one)) / 2
            if kind == "whole":
                engine.backward(first)
            second = loss_of(prepared(other)) / 2
            if kind == "sum":
                engine.backward(first + second)
            else:
                if kind == "two":
                    engine.backward(first)
                engine.backward(second)
            engine.clip_grad_norm_(prepared.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return apart(whole(engine, prepared), bare())

    return {kind: each(lambda stage, kind=kind: run(stage, kind)) for kind in ("sum", "two", "whole")}


def rank_gan() -> Any:
    """Two models: what the critic gets from the maker's loss is thrown away by ``zero_grad``, or the critic is frozen meanwhile (``freezes``)."""

    def loop(
        maker: Any, critic: Any, of_maker: Any, of_critic: Any, backward: Any, real: Tensor, freezes: bool
    ) -> None:
        for _ in range(3):
            fake = maker(real)
            backward(critic(fake.detach()).square().mean() + (critic(real[:, :3]) - 1).square().mean())
            of_critic.step()
            of_critic.zero_grad()
            critic.requires_grad_(not freezes)
            backward((critic(fake) - 1).square().mean())
            critic.requires_grad_(True)
            of_maker.step()
            of_maker.zero_grad()
            of_critic.zero_grad()

    def models() -> Any:
        maker = Net()
        critic = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        return (
            maker,
            critic,
            torch.optim.Adam(maker.parameters(), lr=0.01),
            torch.optim.Adam(critic.parameters(), lr=0.01),
        )

    alone = models()
    loop(*alone, lambda loss: loss.backward(), data(), False)

    def run(stage: int, freezes: bool) -> list[float]:
        engine = of(stage)
        prepared = engine.prepare(*models())
        loop(*prepared, engine.backward, data()[engine.process_index :: 2], freezes)
        return [apart(whole(engine, prepared[i]), flat(alone[i])) for i in range(2)]

    return [*each(lambda stage: run(stage, False)), *each(lambda stage: run(stage, True))]


def rank_penalty() -> Any:
    """A gradient penalty, the gradients of each loss by itself, and two backward passes through one forward pass."""

    def losses(model: Any, inputs: Tensor, kind: str) -> list[Tensor]:
        inputs = inputs.clone().requires_grad_()
        out = model(inputs)
        if kind == "penalty":
            (gradient,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
            return [loss_of(out) + (gradient.norm(dim=1) - 1).square().mean()]
        if kind == "each":
            torch.autograd.grad(loss_of(out), list(model.parameters()), retain_graph=True)
            return [loss_of(out)]
        return [loss_of(out), out.abs().mean()]

    def loop(model: Any, optimizer: Any, backward: Any, inputs: Tensor, kind: str) -> None:
        for _ in range(2):
            *first, last = losses(model, inputs, kind)
            for loss in first:
                backward(loss, retain_graph=True)
            backward(last)
            optimizer.step()
            optimizer.zero_grad()

    def run(stage: int, kind: str) -> Any:
        engine, alone, model = of(stage), Net(), Net()
        loop(
            alone, torch.optim.SGD(alone.parameters(), lr=0.01), lambda loss, **how: loss.backward(**how), data(), kind
        )
        model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        try:
            loop(model, optimizer, engine.backward, data()[engine.process_index :: 2], kind)
        except RuntimeError as error:
            return str(error)
        return apart(whole(engine, model), flat(alone))

    return {kind: [run(stage, kind) for stage in (1, 2, 3)] for kind in ("penalty", "each", "twice")}


def rank_windows() -> Any:
    """A loop with windows of 3 micro-batches over 5 of each rank: the last one is short."""

    def run(stage: int, weighted: bool) -> float:
        engine, model = of(stage, accumulate_grad_batches=3), Net()
        prepared: Any
        prepared, optimizer, loader = engine.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            DataLoader(data(10), batch_size=1),  # type: ignore[arg-type]
        )
        for batch in loader:
            with engine.accumulate(prepared):
                every = (prepared(batch) - 1).square()
                kept = float(1 + (batch[0, 0] > 0))  # of three outputs
                engine.backward(Loss(every[:, : int(kept)].sum(), kept) if weighted else every.mean())
                engine.clip_grad_norm_(prepared.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        alone = Net()
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        for part in data(10).split(6):
            every = (alone(part) - 1).square()
            if weighted:
                mask = torch.arange(3) < 1 + (part[:, :1] > 0)
                ((every * mask).sum() / mask.sum()).backward()
            else:
                every.mean().backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            plain.step()
            plain.zero_grad()
        return apart(whole(engine, prepared), flat(alone))

    return {str(weighted): each(lambda stage, weighted=weighted: run(stage, weighted)) for weighted in (False, True)}


def rank_evaluation_only() -> Any:
    def run(stage: int) -> list[Any]:
        engine = of(stage)
        model = engine.prepare(Net(shift=0.1 * engine.process_index))
        with torch.no_grad():
            return [apart(model(data()), Net()(data())), model.module.head.weight.numel()]

    return each(run)


def rank_runs() -> Any:
    """Two runs of one module, and validations between and after them, on unequal numbers of batches; beside those of ddp."""

    def run(strategy: Any) -> list[float]:
        module, found = Net(), []
        for _ in range(2):
            fit(module, [data(2) for _ in range(4)], [data(3) for _ in range(3)], strategy=strategy())
            found.append(
                Fit(accelerator="cpu", strategy=strategy()).validate(module, [data(3), data(5), data(1)])[0]["val"]
            )
        return found

    return [run(lambda: "ddp"), *each(lambda stage: run(lambda: made(stage)))]


class Built(Net):
    """Built in ``configure_model``, where the module on rank 0 draws other numbers, and gives them other values afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []

    def configure_model(self) -> None:
        torch.manual_seed(11 + self.global_rank)
        self.extra, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.orthogonal_(self.extra.weight)
        self.after.bias = self.extra.bias
        with torch.no_grad():
            self.after.weight.copy_(self.extra.weight).mul_(0.5)
        self.shapes.append(list(self.extra.weight.shape))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return loss_of(self(self.after(self.extra(batch))))

    def configure_optimizers(self) -> Any:
        self.shapes.append(list(self.extra.weight.shape))
        return super().configure_optimizers()


def rank_built() -> Any:
    """At stage 3 a rank never keeps a whole weight; all start with rank 0's, as under DDP. Torch is as before afterwards."""

    def run(stage: int, precision: str) -> list[Any]:
        module, strategy, expected = Built(), made(stage), Built()
        fit(expected, [data(2) for _ in range(4)], strategy="ddp")
        fit(module, [data(2) for _ in range(4)], strategy=strategy, precision=precision)
        state = strategy.model_state(module)
        found = torch.cat([state[name].flatten() for name, _ in expected.named_parameters()]) if state else None
        return [module.shapes, apart(found, flat(expected)), functional.linear is torch._C._nn.linear]

    return [run(2, "32-true"), run(3, "32-true"), run(3, "bf16-mixed")]


def rank_offload() -> Any:
    def run(stage: int) -> float:
        engine = Engine(accelerator="cpu", strategy=made(stage, offload_optimizer=True, offload_parameters=stage == 3))
        model: Any = Net()
        model, optimizer = engine.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        steps(engine, model, optimizer)
        return apart(whole(engine, model), bare())

    return each(run, (1, 2, 3))


def rank_half() -> Any:
    """bf16: dtypes of parameters and of the masters, and the distance from fp32 after two steps."""

    def run(stage: int) -> list[Any]:
        module, expected, strategy = Net(), Net(), made(stage)
        result = fit(module, [data(4) for _ in range(4)], strategy=strategy, precision="bf16-mixed")
        fit(expected, [data(4) for _ in range(4)], strategy="ddp")
        return [
            result.step,
            str(next(module.parameters()).dtype),
            apart(flat(module) if stage < 3 else None, flat(expected)),
        ]

    return each(run)


def rank_half_exact() -> Any:
    """The masters are fp32, and gradients of a window are summed in fp32: 100 tiny steps move them though bf16 cannot say so."""

    def run(stage: int) -> float:
        engine = Engine(accelerator="cpu", strategy=made(stage), precision="bf16-true")
        model: Any = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        for _ in range(100):
            engine.backward(model(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
            optimizer.step()
            optimizer.zero_grad()
        return apart(whole(engine, model), torch.tensor([0.99]))

    return each(run, (1, 2, 3))


class Overflow(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        bad = batch_idx == 1 and self.global_rank == 1
        return loss_of(self(batch)) * (float("inf") if bad else 1.0)


def rank_overflow() -> Any:
    """The gradient of rank 1 alone overflows in the second of three steps."""

    def run(stage: int, verdict: str | None) -> list[Any]:
        module, strategy = Overflow(), made(stage)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = fit(module, [data(2) for _ in range(6)], strategy=strategy, on_nonfinite=verdict)
        state = strategy.model_state(module)
        return [
            result.step,
            module.lrs,
            all(bool(s.isfinite().all()) for s in state.values()),
            any("not finite" in str(c.message) for c in caught),
        ]

    skipped = each(lambda stage: run(stage, "skip"))
    silent = [run(stage, None) for stage in (1, 3)]
    raised = each(lambda stage: said(lambda: run(stage, "raise")))
    return [skipped, silent, raised]


CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "contiguous_gradients": True},
}
ADAM = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": 0.1, "torch_adam": True}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 2, "warmup_type": "linear"},
}


class Bare(Net):
    """Without an optimizer of its own."""

    configure_optimizers = TrainModule.configure_optimizers

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()


def rank_config() -> Any:
    """Values from the arguments, the arguments' from a file, and an optimizer with its scheduler from a dict."""
    found: list[Any] = []

    class Seen(Net):
        def on_train_start(self) -> None:
            engine = self._context.engine.models[0].engine  # type: ignore[union-attr]
            config = engine._config
            found.append(
                [
                    engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(),
                    config.gradient_clipping, config.bfloat16_config.enabled, config.float16_config.enabled, config.zero_config.reduce_bucket_size,
                ]
            )  # fmt: skip

    loader = DataLoader(data(12), batch_size=2)  # type: ignore[arg-type]
    asked = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
    first, second = Seen(), Seen()
    fit(first, loader, strategy=DeepSpeed(config=CONFIG), **asked)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds.json"
        path.write_text(json.dumps({**CONFIG, "gradient_accumulation_steps": 3, "gradient_clipping": 0.05}))
        fit(second, loader, strategy=DeepSpeed(config=path))
    expected = Net()
    fit(expected, loader, strategy="ddp", **asked)
    mine = Bare()
    fit(
        mine, [data(4) for _ in range(6)], strategy=DeepSpeed(config={**CONFIG, "optimizer": ADAM, "scheduler": WARMUP})
    )
    adam = Net()
    optimizer = torch.optim.AdamW(adam.parameters(), lr=0.0, weight_decay=0.1)
    for lr in (0.0, 0.0, 0.01):  # DeepSpeed's WarmupLR is at its start before and after the first step
        optimizer.param_groups[0]["lr"] = lr
        loss_of(adam(data(4))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        found,
        apart(flat(first), flat(expected)),
        apart(flat(second), flat(expected)),
        apart(flat(mine), flat(adam)),
        mine.lrs,
    ]


def rank_contradictions() -> Any:
    loader = DataLoader(data(12), batch_size=2)  # type: ignore[arg-type]

    def run(config: dict[str, Any], module: Any = None, **settings: Any) -> str:
        strategy = DeepSpeed(config={"zero_optimization": {"stage": 2}, **config})
        return said(lambda: fit(Net() if module is None else module, loader, strategy=strategy, **settings))

    return {
        "clip": run({"gradient_clipping": 1.0}, gradient_clip_val=0.5),
        "window": run({"gradient_accumulation_steps": 4}, accumulate_grad_batches=2),
        "precision": run({"bf16": {"enabled": True}}),
        "micro": run({"train_micro_batch_size_per_gpu": 8}),
        "batch": run({"train_batch_size": 10}),
        "global": run({"train_batch_size": 32}, global_batch_size=8),
        "value": run({}, gradient_clip_val=0.5, gradient_clip_algorithm="value"),
        "each norm": run({}, gradient_clip_val=0.5, gradient_clip_algorithm="norm_per_parameter"),
        "optimizer": run({"optimizer": ADAM}),
        "scheduler": run({"scheduler": WARMUP}),
        "no lr": run({"optimizer": ADAM}, type("NoLr", (Bare,), {"save_hyperparameters": lambda self: None})()),
        "auto": run({"aio": {"block_size": "auto"}}),
        "scheduler name": run({"optimizer": ADAM, "scheduler": {"type": "WarmupLr", "params": {}}}, Bare()),
        "zero": run({"zero_optimization": {"stage": 2, "overlap_com": True}}),
    }


def rank_refused() -> Any:
    batches = [data(2) for _ in range(2)]

    class With(Net):
        def __init__(self, optimizers: Any) -> None:
            super().__init__()
            self.made = optimizers

        def configure_optimizers(self) -> Any:
            return self.made(self)

    class Silent(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)

    class Manual(Net):
        automatic_optimization = False

    class Out(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            out = self(batch)
            return Loss(out.sum() * 0, 0) if self.global_rank else Loss((out - 1).square().sum(), out.numel())

    def across() -> Any:
        engine = of(2)
        one, other = Net(), Net()
        engine.prepare(one, other, torch.optim.Adam([*one.parameters(), *other.parameters()]))

    def part() -> Any:
        engine, model = of(2), Net()
        engine.prepare(model, torch.optim.Adam(model.parameters()))
        engine.clip_grad_norm_([model.head.weight], 1.0)

    def value() -> Any:
        engine, model = of(2), Net()
        engine.prepare(model, torch.optim.Adam(model.parameters()))
        engine.clip_grad_value_(model.parameters(), 1.0)

    def closure() -> Any:
        engine, model = of(2), Net()
        engine.prepare(model, torch.optim.Adam(model.parameters()))[1].step(lambda: 0.0)

    def sharded(**settings: Any) -> Any:
        module = Net()
        fit(module, batches, strategy=made(3))
        fit(module, batches, **{"strategy": made(2), **settings})

    class Averaged(torch.optim.SGD):
        def train(self) -> None: ...
        def eval(self) -> None: ...

    def modes() -> Any:
        model = Net()
        of(2).prepare(model, Averaged(model.parameters(), lr=0.1))

    def wrapped() -> Any:
        engine, model = of(1), Net()
        engine.prepare(model, torch.optim.Adam(model.parameters()))  # imports deepspeed
        import deepspeed

        sgd = {"type": "SGD", "params": {"lr": 0.1}}  # torch's: DeepSpeed's Adam would be compiled first, for minutes
        settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": sgd}
        engine.prepare(nn.Sequential(deepspeed.initialize(model=nn.Linear(2, 2), config=settings)[0]))

    def frozen(m):
        others = nn.Linear(2, 2).requires_grad_(False)
        return torch.optim.Adam([{"params": m.parameters()}, {"params": others.parameters()}])

    return {
        "lbfgs": said(lambda: fit(With(lambda m: torch.optim.LBFGS(m.parameters())), batches, strategy=made(3))),
        "adagrad": said(lambda: fit(With(lambda m: torch.optim.Adagrad(m.parameters())), batches)),
        "muon": said(
            lambda: fit(
                With(lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2])),
                batches,
                strategy=DeepSpeed(stage=1, config={"zero_allow_untested_optimizer": True}),
            )
        ),
        "sparse": said(
            lambda: fit(With(lambda m: torch.optim.SparseAdam(list(m.parameters()))), batches, strategy=made(3))
        ),
        "two": said(
            lambda: fit(
                With(lambda m: [torch.optim.SGD(m.layers.parameters()), torch.optim.SGD(m.head.parameters())]), batches
            )
        ),
        "frozen": said(lambda: fit(With(frozen), batches)),
        "none": said(lambda: fit(Silent(), batches)),
        "manual": said(lambda: fit(Manual(), batches)),
        "across": said(across),
        "wrapped": said(wrapped),
        "part": said(part),
        "value": said(value),
        "closure": said(closure),
        "modes": said(modes),
        "modes, fit": said(lambda: fit(With(lambda m: Averaged(m.parameters(), lr=0.1)), batches)),
        "sharded": said(sharded),
        "sharded, ddp": said(lambda: sharded(strategy="ddp")),
        "sharded, bf16": said(lambda: sharded(strategy=made(3), precision="bf16-mixed")),
        "out": fit(Out(), batches).step,
    }


def alone_one() -> Any:
    """On one process too: offload is for it."""
    found = []
    for stage in STAGES:
        engine, model = of(stage), Net()
        prepared: Any
        prepared, optimizer = engine.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        steps(engine, prepared, optimizer)
        found.append(apart(whole(engine, prepared), bare()))
    return found


def alone_quiet() -> Any:
    """Nothing but what is needed is left in the environment."""
    import os

    return sorted(name for name in os.environ if name.startswith(("DS_", "CROSS_", "OMPI")))


class Gated(nn.Module):
    """Runs its layers in another order than it has created them, as Mixtral's experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.last(torch.tanh(self.first(x)) * self.gate(x))
        return out


class Experts(nn.Module):
    """Three blocks, of which a call runs some, behind a layer that is created after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.experts = nn.ModuleList((Gated(), Block(), Gated()))
        self.before = nn.Linear(8, 8)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.before(x)
        for number in chosen:
            x = self.experts[number](x)
        return x.square().mean()


ROUTES = {
    "from the first step": [[[0], [1]], [[1], [2]], [[2], [0]]],
    "later": [[[0, 1], [0, 1]], [[0], [0, 1, 2]], [[2], [0, 1]]],
    "alike, then not": [[[0], [0]], [[2], [2]], [[0], [2]]],
    "nobody": [[[0, 1, 2], [0, 1, 2]], [[], []], [[1], []]],
}
"""For each step and rank: the experts that it runs."""


def routed(stage: int, routes: list[list[list[int]]]) -> Any:
    """How far the parameters are from those of one process."""
    engine = of(stage)
    plain = Experts()
    model, optimizer = engine.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    whole = Experts()
    other = torch.optim.SGD(whole.parameters(), lr=0.1)
    for chosen in routes:
        for rank in range(2):
            (whole(data()[4 * rank :][:4], chosen[rank]) / 2).backward()
        rank = engine.process_index
        engine.backward(model(data()[4 * rank :][:4], chosen[rank]))
        for o in (optimizer, other):
            o.step()
            o.zero_grad()
    state = engine.get_state_dict(model)  # only on rank 0
    return max(((whole.state_dict()[name] - value).abs().max().item() for name, value in state.items()), default=0.0)


def rank_routed() -> Any:
    return {f"{stage}, {name}": routed(stage, routes) for stage in (1, 2, 3) for name, routes in ROUTES.items()}


def rank_routed_evaluation() -> Any:
    """How far losses are from those of one process, where each rank evaluates with experts of its own."""
    rank, far = int(os.environ["RANK"]), 0.0
    model, whole = of(3).prepare(Experts()), Experts()
    with torch.no_grad():
        for chosen in ([[0], [1]], [[0, 2], [1]], [[], [2]]):
            far = max(far, (model(data(), chosen[rank]) - whole(data(), chosen[rank])).abs().item())
    return far


def rank_other_orders() -> Any:
    """Each rank runs the same experts in the first pass, and all once more in an order of its own."""
    rank = int(os.environ["RANK"])
    engine = of(3)
    plain = Experts()
    model, _ = engine.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    engine.backward(model(data(), [0, 1]))
    return said(lambda: model(data(), [0, 1, rank]))


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, timeout=900)


def test_each_rank_holds_its_part(found: Any) -> None:
    for rank in found["bytes"]:
        size = rank[0][3]
        padding = len(list(Net().parameters()))  # at most one element each
        for stage, (held, master, state, _, gathered) in enumerate(rank):
            assert held == size if stage < 3 else size / 2 <= held <= size / 2 + padding
            assert master == size if not stage else size / 2 <= master <= size / 2 + padding
            assert state == 2 * master
            assert gathered == 0


@pytest.mark.parametrize("order", ["together", "optimizer first", "model first"])
def test_any_order_of_preparing(found: Any, order: str) -> None:
    assert all(distance < 1e-6 for rank in found["orders"] for distance in rank[order])


def test_an_optimizer_with_state(found: Any) -> None:
    assert all(distance < 1e-6 for rank in found["warm_optimizer"] for distance in rank)


@pytest.mark.parametrize("kind", ["sum", "two", "whole"])
def test_forward_and_backward_passes_in_any_number(found: Any, kind: str) -> None:
    assert all(distance < 1e-6 for rank in found["passes"] for distance in rank[kind])


def test_two_models(found: Any) -> None:
    assert all(distance < 1e-6 for rank in found["gan"] for stage in rank for distance in stage)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("penalty", "create_graph=True (a gradient penalty) under ZeRO stage 3"),
        ("each", "torch.autograd.grad with respect to parameters under ZeRO stage 3"),
        ("twice", "a second backward pass through one forward pass (retain_graph=True) under ZeRO stage 3"),
    ],
)
def test_passes_that_autograd_allows(found: Any, kind: str, words: str) -> None:
    for rank in found["penalty"]:
        one, two, three = rank[kind]
        assert max(one, two) < 1e-6
        assert three.startswith(words)


@pytest.mark.parametrize("weighted", ["False", "True"])
def test_windows_of_a_loop(found: Any, weighted: str) -> None:
    assert all(distance < 1e-6 for rank in found["windows"] for distance in rank[weighted])


def test_a_model_alone(found: Any) -> None:
    for rank in found["evaluation_only"]:
        assert all(distance < 1e-6 for distance, _ in rank)
        assert [size for _, size in rank] == [24, 24, 24, 0]


def test_runs_and_validations_of_one_module(found: Any) -> None:
    for ddp, *stages in found["runs"]:
        for stage in stages:
            assert stage == pytest.approx(ddp, rel=1e-6)


def test_building_under_zero_init(found: Any) -> None:
    for whole_, sharded, half in found["built"]:
        assert whole_[0] == [[8, 8], [8, 8]]
        assert sharded[0] == half[0] == [[8, 8], [0]]
        assert max(whole_[1], sharded[1]) < 1e-6
        assert half[1] < 0.05  # bf16 has 8 bits
        assert whole_[2] is sharded[2] is half[2] is True


def test_offload(found: Any) -> None:
    assert all(distance < 1e-6 for rank in found["offload"] for distance in rank)


def test_bf16(found: Any) -> None:
    for rank in found["half"]:
        for stage, (count, dtype, distance) in enumerate(rank):
            assert count == 2
            assert dtype == ("torch.bfloat16" if stage else "torch.float32")
            assert distance < 0.05
    # 100 * 1e-4, and the rounding of 1.0 in fp32 a hundred times; bf16 has steps of 0.004 below 1.
    assert all(distance < 1e-5 for rank in found["half_exact"] for distance in rank)


def test_a_step_that_is_not_finite_on_one_rank(found: Any) -> None:
    for skipped, silent, raised in found["overflow"]:
        for count, lrs, finite, _ in skipped:
            assert (count, lrs, finite) == (2, [0.05, 0.05, 0.025], True)
        assert [run[:3] for run in silent] == [[2, [0.05, 0.05, 0.025], True]] * 2
        assert silent[0][3]  # a warning, once
        assert all(
            words.startswith("FloatingPointError: a gradient is not finite (on_nonfinite='raise')") for words in raised
        )


def test_configuration(found: Any) -> None:
    numel = sum(p.numel() for p in Net().parameters())
    for seen, first, second, optimizer, lrs in found["config"]:
        assert seen[:2] == [[12, 2, 3, 0.05, False, False, numel]] * 2
        assert max(first, second, optimizer) < 1e-6
        assert lrs == pytest.approx([0.0, 0.01, 0.02])


CONTRADICTIONS = {
    "clip": "ValueError: gradient_clipping=1.0 in DeepSpeed(config={...}) contradicts gradient_clip_val=0.5 (code)",
    "window": "ValueError: gradient_accumulation_steps=4 in DeepSpeed(config={...}) contradicts accumulate_grad_batches=2 (code)",
    "precision": "ValueError: bf16.enabled=True in DeepSpeed(config={...}) contradicts precision='32-true'",
    "micro": "ValueError: train_micro_batch_size_per_gpu=8 in DeepSpeed(config={...}) contradicts the training loader's batch_size=2",
    "batch": "ValueError: train_batch_size=10 in DeepSpeed(config={...}) contradicts train_micro_batch_size_per_gpu=2 * "
    "gradient_accumulation_steps=1 * 2 rank(s) = 4",
    "global": "ValueError: train_batch_size=32 in DeepSpeed(config={...}) contradicts global_batch_size=8 (code)",
    "value": "ValueError: gradient_clip_algorithm='value' (code) under DeepSpeed, which clips by norm only",
    "each norm": "ValueError: gradient_clip_algorithm='norm_per_parameter' (code) under DeepSpeed, which clips by norm only",
    "optimizer": "ValueError: SGD was given, and \"optimizer\" in DeepSpeed(config={...}) is 'AdamW': keep one of them",
    "scheduler": 'ValueError: "scheduler" in DeepSpeed(config={...}) needs "optimizer" there',
    "no lr": 'ValueError: DeepSpeed(config={...}): optimizer.params.lr="auto", and the module has no hparams.lr',
    "auto": 'ValueError: DeepSpeed(config={...}): aio.block_size="auto" cannot be filled',
    "scheduler name": "ValueError: DeepSpeed(config={...}): scheduler type 'WarmupLr' is unknown; did you mean 'WarmupLR'?",
    "zero": "ValueError: DeepSpeed(config={...}): zero_optimization.overlap_com is not a DeepSpeed setting; did you mean 'overlap_comm'?",
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_name_both(found: Any, name: str) -> None:
    for rank in found["contradictions"]:
        assert rank[name][: len(CONTRADICTIONS[name])] == CONTRADICTIONS[name]


REFUSED = {
    "lbfgs": "ValueError: LBFGS under ZeRO stage 3: DeepSpeed steps flat shards",
    "adagrad": "ValueError: Adagrad under ZeRO stage 2",
    "muon": "ValueError: Muon under ZeRO stage 1: it needs whole tensors, and DeepSpeed steps flat shards of the parameters. Use strategy='fsdp'",
    "sparse": "ValueError: SparseAdam under ZeRO stage 3",
    "two": "ValueError: SGD is a second optimizer of With: DeepSpeed trains a model with one",
    "frozen": "ValueError: Adam has parameters of several models, or of none that was prepared",
    "none": "ValueError: training_step returned None on rank",
    "manual": "ValueError: automatic_optimization=False under DeepSpeed",
    "across": "ValueError: Adam has parameters of several models",
    "wrapped": "ValueError: the model (Sequential) cannot be prepared: its part '0' is wrapped in DeepSpeedEngine already; give the plain module "
    "(0.module); strategy='deepspeed' creates the engine",
    "part": "ValueError: clip_grad_norm_ under DeepSpeed takes all parameters of one prepared model",
    "value": "ValueError: clip_grad_value_ under DeepSpeed, which clips by norm only",
    "closure": "RuntimeError: optimizer.step(closure) under DeepSpeed",
    "modes": "ValueError: Averaged has train() and eval(), which swap the weights, and DeepSpeed keeps the weights itself",
    "modes, fit": "ValueError: Averaged has train() and eval(), which swap the weights",
    "sharded": "ValueError: Net has parameters that ZeRO stage 3 has sharded, but stage 2 is requested now",
    "sharded, ddp": "ValueError: strategy='ddp' with Net, whose parameters are sharded already",
    "sharded, bf16": "ValueError: the model was sharded with (stage, world size, precision) = (3, 2, '32-true')",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(found: Any, name: str) -> None:
    for rank in found["refused"]:
        assert rank[name][: len(REFUSED[name])] == REFUSED[name]
        assert rank["out"] == 1


# -- on one process ---------------------------------------------------------------------------------------------------------------


def test_alone_and_quiet() -> None:
    ran = ranks_of_file(__file__, 1, "alone_", timeout=900)
    assert all(distance < 1e-6 for distance in ran["one"][0])
    assert ran["quiet"] == [[]]


SCRIPT = """
import sys, tempfile
import torch
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)
    def training_step(self, batch, batch_idx):
        return self.linear(batch).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val", self.linear(batch).square().mean())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

if __name__ == "__main__":
    batches = [torch.ones(2, 5)] * 4
    with tempfile.TemporaryDirectory() as root:
        fit = Fit(strategy=sys.argv[1], precision="bf16-mixed", accelerator="cpu", devices=2, root_dir=root, log_every_n_steps=0)
        result = fit.run(Net(), batches, batches)
    if fit.is_main_process:
        report([result.status, result.step])
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_processes_that_fit_starts(stage: int) -> None:
    """Without a launcher's variables; and nothing is said that nobody asked for."""
    ran = run_script(SCRIPT, f"deepspeed_stage_{stage}", timeout=300)
    assert ran.value == ["completed", 2]
    assert ran.stdout == ""
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stage": 4}, r"stage=4 in DeepSpeed\(\.\.\.\) is not a ZeRO stage; possible: 0, 1, 2, 3"),
        ({"stage": "2"}, r"stage='2'"),
        ({"stage": 0, "offload_optimizer": True}, r"offload_optimizer='cpu' with stage 0 .*use stage=2"),
        ({"stage": 2, "offload_parameters": True}, r"offload_parameters='cpu' with stage 2 .*use stage=3"),
        (
            {"config": {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}},
            r"offload_parameters='cpu' with stage 2",
        ),
        ({"offload_optimizer": "gpu"}, r"offload_optimizer='gpu'\) is unknown"),
        ({"offload_optimizer": "nvme"}, r"needs nvme_path="),
        ({"stage": 1, "overlap_comm": True}, r"overlap_comm=True with stage 1"),
        (
            {"stage": 3, "config": {"zero_optimization": {"stage": 2}}},
            r"stage=2 in DeepSpeed\(config=.* contradicts DeepSpeed\(stage=3\)",
        ),
        (
            {"config": {"zero_optimisation": {}}},
            r"'zero_optimisation' is not a DeepSpeed setting; did you mean 'zero_optimization'\?",
        ),
        ({"config": {"bf16": True}}, r"bf16=True must be an object"),
        ({"config": {"bfloat16": True}}, r"bf16=True must be an object"),
        ({"config": {"bf16": {}, "bfloat16": {}}}, r"both 'bf16' and 'bfloat16', which are one setting"),
        (
            {"config": {"torch_autocast": {"enabled": True}}},
            r"'torch_autocast' cannot be used with Fit or Engine: give precision= instead",
        ),
        ({"config": {"gradient_allreduce_op": "sum"}}, r"gradient_allreduce_op='sum' is not possible"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeepSpeed(**settings)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        DeepSpeed(config=tmp_path / "none.json")
    for text, words in (("{", "is not valid JSON"), ("[1]", "has a list at its top"), ("{a: 1}", "is not valid JSON")):
        (tmp_path / "ds.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            DeepSpeed(config=tmp_path / "ds.json")
    with pytest.raises(TypeError, match="is of type int: give a path to a JSON file, or a dict"):
        DeepSpeed(config=3)  # type: ignore[arg-type]


def test_names_of_stages() -> None:
    stages = {
        name: strategies.get(name)
        for name in ("deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
    }
    assert [s.zero_stage for s in stages.values()] == [2, 1, 2, 3]  # type: ignore[attr-defined]
    offload = strategies.get("deepspeed_stage_3_offload")
    assert isinstance(offload, DeepSpeed)
    assert offload.offload_optimizer
    assert offload.offload_parameters
    assert not strategies.get("deepspeed_stage_2_offload").offload_parameters  # type: ignore[attr-defined]


def test_a_config_is_not_changed() -> None:
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}
    DeepSpeed(config=config, offload_optimizer=True)
    assert config == {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}


@pytest.mark.parametrize(
    ("precision", "stage", "words"),
    [
        ("16-mixed", 2, "under DeepSpeed on the CPU: its fp16 needs CUDA"),
        ("64-true", 2, "whose master copies are fp32"),
    ],
)
def test_precisions(precision: str, stage: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(accelerator="cpu", strategy=DeepSpeed(stage=stage), precision=Precision.parse(precision))


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # what Python itself takes for "not there"
    with pytest.raises(ImportError, match=r'pip install "fit-trainer\[deepspeed\]"'):
        Engine(accelerator="cpu", strategy="deepspeed")


# -- DeepSpeed's own optimizers are compiled when they are first used -------------------------------------------------------------------


def compiled_adam() -> Any:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}}
    module, expected = Bare(), Net()
    fit(module, [data(4) for _ in range(6)], strategy=DeepSpeed(config=config, offload_optimizer=True))
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.02, weight_decay=0.1)
    for _ in range(3):
        loss_of(expected(data(4))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return apart(flat(module), flat(expected))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("ninja")), reason="needs g++ and ninja")
def test_cpu_adam(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\nexec g++ "$@" -O0 -g0\n'
    )  # it is asked whether it is right: that compiles in half the time
    compiler.chmod(0o755)
    # In the user's cache, the lock of a compilation that was killed would make this one wait forever.
    extensions = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": str(compiler)}
    ran = ranks_of_file(__file__, 2, "compiled_", timeout=600, **extensions)
    assert all(distance < 1e-5 for distance in ran["adam"])


def test_ranks_that_reach_different_parameters(found: Any) -> None:
    for rank in found["routed"]:
        assert max(rank.values()) < 1e-6
    assert max(found["routed_evaluation"]) < 1e-6


def test_ranks_that_run_modules_in_different_orders(found: Any) -> None:
    for text in found["other_orders"]:
        assert "rank 0 begins the forward pass of experts.0.first" in text
        assert "rank 1 begins the forward pass of experts.1.norm" in text
        assert "set_z3_leaf_modules" in text
