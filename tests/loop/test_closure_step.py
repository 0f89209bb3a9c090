"""Steps that modules and optimizers have a say in, over windows and ranks: against bare float64 loops over the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of
from support.toys import Weight, fit, ones
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from engine import Loss, TrainModule

SAMPLES, EPOCHS = 11, 2


class SAM(Optimizer):
    """Two halves; the first needs gradients, and the closure has a default (as the implementation that most copy)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {})
        self.base = SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data.clone()
            p.data.add_(0.1 * p.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        self.first_step()
        loss = closure()
        self.second_step()
        return loss


def inputs() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 3, generator=made, dtype=torch.float64), torch.randn(
        SAMPLES, 1, generator=made, dtype=torch.float64
    )


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def optimizer_of(kind: str, parameters: Any) -> Any:
    if kind == "sam":
        return SAM(parameters)
    return LBFGS(parameters, lr=0.4, max_iter=3, line_search_fn="strong_wolfe" if kind == "wolfe" else None)


class Module(TrainModule):
    def __init__(self, kind: str, weighted: bool) -> None:
        super().__init__()
        self.net, self.kind, self.weighted, self.evaluations = net(), kind, weighted, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.evaluations += 1
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1], reduction="sum" if self.weighted else "mean")
        self.log("loss", loss / len(batch[0]) if self.weighted else loss, on_epoch=True, on_step=False)
        return Loss(loss, len(batch[0])) if self.weighted else loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.kind, self.parameters())


def bare(kind: str, global_batch: int, clip: float | None) -> tuple[list[float], float]:
    """Weights, and the mean over the last epoch of each sample's loss when its step began."""
    model = net()
    optimizer = optimizer_of(kind, model.parameters())
    x, y = inputs()
    for _ in range(EPOCHS):
        total = 0.0
        for i in range(0, SAMPLES, global_batch):
            a, b = x[i : i + global_batch], y[i : i + global_batch]

            def closure(a: Tensor = a, b: Tensor = b) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(a), b)
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                return loss

            total += closure().item() * len(a)
            optimizer.step(closure)
    return [v for p in model.parameters() for v in p.detach().flatten().tolist()], total / SAMPLES


CASES = [
    (kind, weighted, clip) for kind in ("lbfgs", "wolfe", "sam") for weighted in (False, True) for clip in (None, 0.3)
]


def trained(root: Path | str, world_size: int) -> list[Any]:
    """Global batches of 6 samples, and a last one of 5."""
    found = []
    for kind, weighted, clip in CASES:
        module = Module(kind, weighted)
        loader = DataLoader(TensorDataset(*inputs()), batch_size=2 if world_size == 1 else 1)
        settings = {
            "accumulate_grad_batches": 3,
            "gradient_clip_val": clip,
            "max_epochs": EPOCHS,
            "devices": "auto" if world_size > 1 else 1,
        }
        result = fit(root, **settings).run(module, loader)
        weights = [v for p in module.parameters() for v in p.detach().flatten().tolist()]
        found.append([weights, result.metrics["loss"], result.step])
    return found


def check(found: list[Any]) -> None:
    for (kind, weighted, clip), (weights, loss, steps) in zip(CASES, found, strict=True):
        expected, mean = bare(kind, 6, clip)
        assert weights == pytest.approx(expected, rel=0, abs=1e-9), (kind, weighted, clip)
        assert loss == pytest.approx(mean, rel=1e-6), "logged once, by the first evaluation"
        assert steps == 4


def test_optimizers_that_need_a_closure_on_one_rank(tmp_path: Path) -> None:
    check(trained(tmp_path, 1))


def ranks_trained(root: str) -> Any:
    return trained(root, 2)


def test_optimizers_that_need_a_closure_on_two_ranks(tmp_path: Path) -> None:
    first, second = ranks_of(ranks_trained, 2, tmp_path, timeout=240)
    check(first)
    assert first == second


def test_the_first_evaluation_is_not_repeated(tmp_path: Path) -> None:
    module = Module("lbfgs", False)
    module.configure_optimizers = lambda: LBFGS(module.parameters(), max_iter=1)  # type: ignore[method-assign]
    fit(tmp_path).run(module, DataLoader(TensorDataset(*inputs()), batch_size=4))
    assert module.evaluations == 3  # torch's LBFGS evaluates once where it stops after one iteration


# -- what cannot be is said before the first step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "16-mixed"}, "precision='16-mixed'"),
        ({"on_nonfinite": "skip"}, "on_nonfinite='skip'"),
    ],
)
def test_what_does_not_go_with_a_closure(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    module = Module("lbfgs", False)
    with pytest.raises(ValueError, match=f"LBFGS evaluates the loss inside its step.*{message}"):
        fit(tmp_path, **settings).run(module, DataLoader(TensorDataset(*inputs()), batch_size=4))
    assert module.evaluations == 0


def test_several_optimizers_with_a_closure(tmp_path: Path) -> None:
    module = Module("lbfgs", False)
    first, last = module.net[0], module.net[2]
    module.configure_optimizers = lambda: [LBFGS(first.parameters()), SGD(last.parameters(), lr=1.0)]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="2 optimizers"):
        fit(tmp_path).run(module, DataLoader(TensorDataset(*inputs()), batch_size=4))


def test_a_step_that_does_neither(tmp_path: Path) -> None:
    class Forgets(Weight):
        def optimizer_step(self, *args: Any) -> None: ...

    with pytest.raises(
        RuntimeError, match=r"Forgets.optimizer_step called neither optimizer_closure\(\) nor optimizer.step\(\)"
    ):
        fit(tmp_path).run(Forgets(), ones(2))


def test_a_second_evaluation_of_a_long_window(tmp_path: Path) -> None:
    class Twice(Weight):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:  # type: ignore[override]
            optimizer_closure()
            optimizer.step(closure=optimizer_closure)

    with pytest.raises(RuntimeError, match="called twice in one step with accumulate_grad_batches > 1"):
        fit(tmp_path, accumulate_grad_batches=2).run(Twice(), ones(2))
    module = Twice()
    fit(tmp_path).run(module, ones(2))
    assert module.w.item() == -2.0


def test_gradients_that_are_kept_and_would_be_divided_twice(tmp_path: Path) -> None:
    class Keeps(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return Loss((self.w * batch).sum(), len(batch))

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None: ...

    with pytest.raises(RuntimeError, match="optimizer_zero_grad did not clear an earlier step's gradients"):
        fit(tmp_path, accumulate_grad_batches=2).run(Keeps(), ones(4))


# -- details --------------------------------------------------------------------------------------------------------------------------------


def test_two_optimizers_one_of_them_every_other_batch(tmp_path: Path) -> None:
    class Two(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
            self.counted: list[int] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return ((self.a + self.b) * batch).mean()

        def configure_optimizers(self) -> Any:
            return [SGD([self.a], lr=1.0), SGD([self.b], lr=1.0)]

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:  # type: ignore[override]
            if optimizer is self.optimizers()[0] or batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            self.counted.append(self.global_step)

    module = Two()
    fit(tmp_path, gradient_clip_val=1.0).run(module, ones(4))
    share = 0.5**0.5  # the norm over both optimizers is sqrt(2)
    assert module.a.item() == pytest.approx(-4 * share)
    assert module.b.item() == pytest.approx(-4 * share / 2)
    assert module.counted == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_loss_scale_is_taken_out_before_the_hooks_see_gradients(tmp_path: Path) -> None:
    seen: list[float] = []

    class Half(Weight):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward()

        def configure_gradient_clipping(self, *args: Any) -> None:
            seen.append(self.w.grad.item())

    module = Half()
    fit(tmp_path, precision="16-mixed", accumulate_grad_batches=2).run(module, ones(3))
    assert seen == [1.0, 1.0]
    assert module.w.item() == -2.0
