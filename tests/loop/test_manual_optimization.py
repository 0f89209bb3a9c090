"""Manual optimization against bare PyTorch loops: a GAN, user accumulation, fp16; on one rank and two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of
from support.toys import Weight, fit, ones
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader

from engine import TrainModule, lr_schedule

STEPS = 6


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    return generator, critic


def data() -> Tensor:
    """Rows of 3 numbers of noise and 2 real ones; shape [48, 5]."""
    return torch.randn(8 * STEPS, 5, generator=torch.Generator().manual_seed(1))


def optimizers(generator: nn.Module, critic: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(generator.parameters(), lr=0.05),
        torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9),
    ]


def losses(generator: nn.Module, critic: nn.Module, batch: Tensor) -> tuple[Any, Any]:
    """Of the critic and of the generator, to be computed when they are needed."""
    noise, real = batch[:, :3], batch[:, 3:]

    def of_critic() -> Tensor:
        good, bad = critic(real), critic(generator(noise).detach())
        return bce(good.float(), torch.ones(len(real), 1)) + bce(bad.float(), torch.zeros(len(real), 1))

    def of_generator() -> Tensor:
        return bce(critic(generator(noise)).float(), torch.ones(len(noise), 1))

    return of_critic, of_generator


class Gan(TrainModule):
    automatic_optimization = False

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.generator, self.critic = nets()
        self.every = every

    def configure_optimizers(self) -> Any:
        return optimizers(self.generator, self.critic)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        of_critic, of_generator = losses(self.generator, self.critic, batch)
        for optimizer, loss in zip(reversed(self.optimizers()), (of_critic, of_generator), strict=True):
            self.toggle(optimizer)
            self.manual_backward(loss() / self.every)
            if (batch_idx + 1) % self.every == 0:
                optimizer.step()
                optimizer.zero_grad()
        self.requires_grad_(True)

    def toggle(self, optimizer: Any) -> None:
        """Only this optimizer's parameters get gradients."""
        self.requires_grad_(False)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(True)


def bare(every: int = 1, half: bool = False, batch_size: int = 8) -> list[Tensor]:
    """The same in plain PyTorch; the weights afterwards."""
    generator, critic = nets()
    of_generator, of_critic = optimizers(generator, critic)
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    for index, batch in enumerate(data().split(batch_size)):
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            parts = losses(generator, critic, batch)
        for optimizer, part, own, other in (
            (of_critic, parts[0], critic, generator),
            (of_generator, parts[1], generator, critic),
        ):
            own.requires_grad_(True)
            other.requires_grad_(False)
            with torch.autocast("cpu", dtype=torch.float16, enabled=half):
                loss = part() / every
            scaler.scale(loss).backward()
            if (index + 1) % every == 0:
                scaler.step(optimizer)
                optimizer.zero_grad()
        if (index + 1) % every == 0:
            scaler.update()
    return [p.detach() for p in (*generator.parameters(), *critic.parameters())]


def train(
    root: Path | str, every: int = 1, precision: str = "32-true", batch_size: int = 8, **settings: Any
) -> tuple[list[Tensor], int]:
    module = Gan(every)
    result = fit(root, precision=precision, **settings).run(module, DataLoader(data(), batch_size=batch_size))
    return [p.detach() for p in module.parameters()], result.step


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_gan_is_the_bare_loop_to_the_bit(tmp_path: Path, every: int, precision: str) -> None:
    weights, steps = train(tmp_path, every, precision)
    for ours, theirs in zip(weights, bare(every, half=precision == "16-mixed"), strict=True):
        assert torch.equal(ours, theirs)
    assert steps == 2 * STEPS // every  # each optimizer's step counts


def ranks_gan(root: str) -> list[list[float]]:
    found = []
    for every, precision in ((1, "32-true"), (2, "32-true"), (1, "16-mixed")):
        weights, _ = train(root, every, precision, batch_size=4, devices="auto")
        found.append(torch.cat([w.flatten() for w in weights]).tolist())
    return found


def test_a_gan_on_two_ranks_is_that_of_one(tmp_path: Path) -> None:
    first, second = ranks_of(ranks_gan, 2, tmp_path)
    assert first == second
    for ours, (every, half, tolerance) in zip(
        first, ((1, False, 1e-6), (2, False, 1e-6), (1, True, 5e-3)), strict=True
    ):
        theirs = torch.cat([w.flatten() for w in bare(every, half)])
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=tolerance, atol=tolerance)


class One(Weight):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        optimizer.step()

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).mean()


def test_an_overflow_skips_the_step_and_halves_the_scale(tmp_path: Path) -> None:
    class Overflows(One):
        def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.w * batch).mean() * (float("inf") if batch_idx == 1 else 1.0)

        def on_train_batch_end(self, *args: Any) -> None:
            scales.append(self._context.engine.scaler.get_scale())  # type: ignore[union-attr]

    scales: list[float] = []
    module = Overflows()
    result = fit(tmp_path, precision="16-mixed").run(module, ones(3))
    assert (module.w.item(), result.step) == (-2.0, 2)
    assert scales == [65536.0, 32768.0, 32768.0]


def test_a_closure_gives_its_value_and_counts(tmp_path: Path) -> None:
    class Closure(One):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            def closure() -> Tensor:
                self.optimizers().zero_grad()
                loss = (self.w * batch).mean() + 5.0
                self.manual_backward(loss)
                return loss

            values.append(self.optimizers().step(closure).item())

    values: list[float] = []
    module = Closure()
    result = fit(tmp_path).run(module, ones(3))
    assert (values, module.w.item(), result.step) == ([5.0, 4.0, 3.0], -3.0, 3)


def test_its_hooks_and_its_own_schedulers(tmp_path: Path) -> None:
    class Hooks(One):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step()

        def on_before_backward(self, loss: Any) -> None:
            seen.append("before backward")

        def on_after_backward(self) -> None:
            seen.append("after backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(f"before step {self.w.grad.item()}")  # type: ignore[union-attr]

        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.append("before zero_grad")

    seen: list[str] = []
    module = Hooks()
    fit(tmp_path, precision="16-mixed").run(module, ones(2))
    assert seen == ["before zero_grad", "before backward", "after backward", "before step 1.0"] * 2
    assert (
        module.w.item() == -1.5
    )  # learning rates 1 and 0.5; the scheduler steps when the module says so, not at the epoch's end too


def test_max_steps_and_validation_count_its_steps(tmp_path: Path) -> None:
    class Notes(One):
        def on_validation_start(self) -> None:
            seen.append(self.global_step)

    seen: list[int] = []
    module = Notes()
    result = fit(tmp_path, max_steps=5, val_every=2).run(module, ones(3), ones(1))
    assert (module.w.item(), result.step, result.epoch, seen) == (-5.0, 5, 1, [2, 4])


def test_settings_without_effect_are_refused(tmp_path: Path) -> None:
    for name, value in (("accumulate_grad_batches", 2), ("gradient_clip_val", 1.0), ("global_batch_size", 4)):
        with pytest.raises(ValueError, match=f"{name}={value}.* has no effect with automatic_optimization=False"):
            fit(tmp_path, **{name: value}).run(One(), ones(1))


class Scheduled(Gan):
    """A GAN whose schedules step once per batch."""

    def configure_optimizers(self) -> Any:
        self.stepped = super().configure_optimizers()
        self.total = self.run.total_steps
        return self.stepped, [lr_schedule(o, "linear", warmup=0.2, total_steps=self.total) for o in self.stepped]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        for scheduler in self.lr_schedulers():
            scheduler.step()


@pytest.mark.parametrize(
    ("settings", "per_batch", "batches"),
    [
        ({"max_epochs": 2}, None, 2 * STEPS),
        ({"max_steps": 9}, 2, 5),  # the fifth batch is a whole one: 10 steps
        ({"max_steps": 9, "max_epochs": 1}, 2, 5),
        ({"max_steps": 30, "max_epochs": 2}, 2, 2 * STEPS),
        ({"max_duration": "9 steps"}, 2.0, 5),
        ({"max_duration": "32 samples"}, None, 4),
        ({"max_duration": "0.5 epochs"}, None, STEPS // 2),
        ({"max_epochs": 1, "limit_train_batches": 4}, None, 4),
    ],
)
def test_total_steps_are_the_batches_of_steps_of_ones_own(
    tmp_path: Path, settings: dict[str, Any], per_batch: float | None, batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    module = Scheduled()
    module.steps_per_batch = per_batch
    result = fit(tmp_path, **settings).run(module, DataLoader(data(), batch_size=8))
    assert (module.total, result.step) == (batches, 2 * batches)
    assert [o.param_groups[0]["lr"] for o in module.stepped] == [0.0, 0.0]  # the end of the schedule is that of the run
    assert "steps_per_batch" not in caplog.text


def test_steps_of_several_optimizers_per_batch_must_be_known(tmp_path: Path) -> None:
    module = Scheduled()
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(ValueError, match=r"2 optimizers .* max_steps=9, .*set Scheduled.steps_per_batch, to 2 if"):
        fit(tmp_path, max_steps=9, max_epochs=9).run(module, DataLoader(data(), batch_size=8))
    assert all(map(torch.equal, module.parameters(), before))
    module = Scheduled()
    module.steps_per_batch = 0
    with pytest.raises(ValueError, match="steps_per_batch=0: must be a number above 0"):
        fit(tmp_path, max_steps=9).run(module, DataLoader(data(), batch_size=8))
    assert (
        fit(tmp_path, max_steps=3).run(Gan(), DataLoader(data(), batch_size=8)).step == 4
    )  # nothing asks for the length


@pytest.mark.parametrize(("declared", "steps", "told", "batches"), [(None, 2, 6, 3), (1.5, 1, 4, 6), (0.5, 1, 12, 6)])
def test_a_wrong_number_of_steps_per_batch_is_told(
    tmp_path: Path, declared: float | None, steps: int, told: int, batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Repeated(One):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for _ in range(steps):
                super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            self.total = self.run.total_steps
            return super().configure_optimizers()

    module = Repeated()
    module.steps_per_batch = declared
    fit(tmp_path, max_steps=6).run(module, ones(20))
    assert module.total == told
    assert f"after {batches} batches, and run.total_steps had said {told}" in caplog.text
    assert f"set Repeated.steps_per_batch, which is {steps} here" in caplog.text
