"""All forms of ``configure_optimizers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from callbacks import ModelCheckpoint
from engine.step.optimizers import configured
from engine.step.schedules import Schedule

ONE = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
TWO = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
STEP = StepLR(ONE, 1)
OTHER = StepLR(TWO, 1)
PLATEAU = ReduceLROnPlateau(ONE)


class Custom:
    """No subclass of torch's: anything with ``step`` is a scheduler."""

    def step(self) -> None: ...


CUSTOM = Custom()
FULL = {"scheduler": STEP, "interval": "step", "frequency": 3, "monitor": "a", "strict": False, "name": "n"}


@pytest.mark.parametrize(
    ("given", "optimizers", "schedulers"),
    [
        (None, [], []),
        (ONE, [ONE], []),
        ([ONE], [ONE], []),
        ((ONE, TWO), [ONE, TWO], []),
        ([ONE, TWO], [ONE, TWO], []),
        (([ONE], [STEP]), [ONE], [STEP]),
        (([ONE, TWO], [STEP, OTHER]), [ONE, TWO], [STEP, OTHER]),
        (([ONE, TWO], []), [ONE, TWO], []),
        ([[ONE, TWO], [{"scheduler": STEP, "interval": "step"}]], [ONE, TWO], [STEP]),
        (([ONE], STEP), [ONE], [STEP]),
        (([ONE], {"scheduler": STEP, "interval": "step"}), [ONE], [STEP]),
        ({"optimizer": ONE}, [ONE], []),
        ({"optimizer": ONE, "lr_scheduler": None}, [ONE], []),
        ({"optimizer": ONE, "lr_scheduler": STEP}, [ONE], [STEP]),
        ({"optimizer": ONE, "lr_scheduler": CUSTOM}, [ONE], [CUSTOM]),
        ({"optimizer": ONE, "lr_scheduler": FULL}, [ONE], [STEP]),
        ({"optimizer": ONE, "lr_scheduler": PLATEAU, "monitor": "loss"}, [ONE], [PLATEAU]),
        ([{"optimizer": ONE, "lr_scheduler": STEP}, {"optimizer": TWO}], [ONE, TWO], [STEP]),
        (
            ({"optimizer": ONE, "lr_scheduler": STEP}, {"optimizer": TWO, "lr_scheduler": OTHER}),
            [ONE, TWO],
            [STEP, OTHER],
        ),
    ],
)
def test_forms(given: Any, optimizers: list[Any], schedulers: list[Any]) -> None:
    found, schedules = configured(given)
    assert list(map(id, found)) == list(map(id, optimizers))
    assert [id(s.scheduler) for s in schedules] == list(map(id, schedulers))


def test_what_a_schedule_says() -> None:
    (full,) = configured({"optimizer": ONE, "lr_scheduler": FULL})[1]
    assert (full.interval, full.frequency, full.monitor, full.strict, full.name, full.reduce_on_plateau) == (
        "step",
        3,
        "a",
        False,
        "n",
        False,
    )
    (plain,) = configured({"optimizer": ONE, "lr_scheduler": STEP})[1]
    assert (plain.interval, plain.frequency, plain.monitor, plain.strict, plain.name) == ("epoch", 1, None, True, None)
    (plateau,) = configured({"optimizer": ONE, "lr_scheduler": PLATEAU, "monitor": "loss"})[1]
    assert (plateau.monitor, plateau.reduce_on_plateau) == ("loss", True)


class Wrapper(torch.optim.Optimizer):
    """Has no parameter groups of its own."""

    def __init__(self) -> None: ...


class InBackward(torch.optim.SGD):
    def fused_backward(self, loss: Any, lr: float) -> None: ...


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (Wrapper(), TypeError, "returned Wrapper, which has no param_groups: return the optimizer that it wraps"),
        (
            InBackward([nn.Parameter(torch.zeros(1))], lr=1.0),
            ValueError,
            r"InBackward steps inside of a backward pass of its own \(fused_backward\).*use another one",
        ),
        ("adam", TypeError, "returned str, not a torch.optim.Optimizer; possible: an optimizer, a list"),
        ([ONE, 3], TypeError, "returned int, not a torch.optim.Optimizer"),
        ([ONE, ONE], ValueError, "the same optimizer twice"),
        ({"optimiser": ONE}, ValueError, "unknown key 'optimiser'; did you mean 'optimizer'"),
        ({"lr_scheduler": STEP}, ValueError, 'needs the key "optimizer"'),
        ({"optimizer": ONE, "lr_scheduler": 3}, TypeError, "returned int, not a learning rate scheduler|has no step"),
        (([ONE], [3]), TypeError, "returned int, not a learning rate scheduler"),
        ({"optimizer": ONE, "lr_scheduler": {"interval": "step"}}, ValueError, 'needs the key "scheduler"'),
        ({"optimizer": ONE, "lr_scheduler": {"scheduler": 3}}, TypeError, r"lr_scheduler has no step\(\): got int"),
        (
            {"optimizer": ONE, "lr_scheduler": {"scheduler": STEP, "freqency": 3}},
            ValueError,
            "'freqency' in lr_scheduler; did you mean 'frequency'",
        ),
        (
            {"optimizer": ONE, "lr_scheduler": {"scheduler": STEP, "interval": "steps"}},
            ValueError,
            "interval='steps' is unknown; did you mean",
        ),
        (
            {"optimizer": ONE, "lr_scheduler": {"scheduler": STEP, "frequency": 0}},
            ValueError,
            "frequency=0 must be an int of at least 1",
        ),
        ({"optimizer": ONE, "lr_scheduler": PLATEAU}, ValueError, "ReduceLROnPlateau needs a metric"),
        (
            torch.optim.SGD([nn.Parameter(torch.zeros(1), requires_grad=False)], lr=1.0),
            ValueError,
            "SGD has no parameters to train",
        ),
    ],
)
def test_errors(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        configured(given)


def test_a_plateau_scheduler_follows_its_metric() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Schedule(ReduceLROnPlateau(optimizer, factor=0.5, patience=0), monitor="loss")
    for loss, lr in ((3.0, 1.0), (2.0, 1.0), (2.0, 0.5), (1.0, 0.5)):
        schedule.advance({"loss": loss}, 1)
        assert optimizer.param_groups[0]["lr"] == lr
    with pytest.raises(
        ValueError, match=r"follows 'loss', which was not logged; did you mean 'los'\?; logged: acc, los"
    ):
        schedule.advance({"los": 1.0, "acc": 0.0}, 1)
    schedule.strict = False
    schedule.advance({}, 1)
    assert optimizer.param_groups[0]["lr"] == 0.5


class Told:
    """A scheduler with timm's interface: it keeps no count, and warms up over 4 epochs or steps."""

    def __init__(self, optimizer: Any, t_in_epochs: bool = True) -> None:
        self.optimizer, self.t_in_epochs = optimizer, t_in_epochs
        self._set(0)

    def _set(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * (number + 1)

    def step(self, epoch: int, metric: float | None = None) -> None:
        if self.t_in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if not self.t_in_epochs:
            self._set(num_updates)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class NeedsLoss(Told):
    def step(self, loss: float) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("interval", "expected"), [("epoch", [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]), ("step", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])]
)
def test_schedulers_that_are_told_the_epoch_or_the_step(tmp_path: Path, interval: str, expected: list[float]) -> None:
    rates: list[float] = []

    class Module(Weight):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": Told(optimizer, interval == "epoch"), "interval": interval},
            }

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    fit(tmp_path, max_epochs=3, accumulate_grad_batches=2).run(Module(), ones(4))
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda o: Told(o, t_in_epochs=False),
            r"Told counts in steps \(t_in_epochs=False\), and its interval is 'epoch'.*\"interval\": \"step\"",
        ),
        (NeedsLoss, r"NeedsLoss.step\(\) needs loss, which a run does not know"),
    ],
)
def test_schedulers_that_a_run_cannot_step(tmp_path: Path, make: Any, words: str) -> None:
    class Module(Weight):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [make(optimizer)]

    module = Module()
    with pytest.raises(ValueError, match=words):
        fit(tmp_path).run(module, ones(4))
    assert not module.losses


@pytest.mark.parametrize("automatic", [True, False])
def test_parameters_that_were_replaced_are_an_error_and_not_left_untrained(tmp_path: Path, automatic: bool) -> None:
    class Module(Weight):
        automatic_optimization = automatic

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if automatic else None

        def on_train_epoch_end(self) -> None:
            self.load_state_dict({name: value.clone() for name, value in self.state_dict().items()}, assign=True)

    with pytest.raises(ValueError, match=r"replaced after their optimizer was created: w\. .* train nothing"):
        fit(tmp_path, max_epochs=2).run(Module(), ones(4))


def test_parameters_that_were_replaced_in_module_and_optimizer_train(tmp_path: Path) -> None:
    class Module(Weight):
        def on_train_epoch_end(self) -> None:
            self.w = nn.Parameter(torch.full_like(self.w, 7.0))
            self.optimizers().param_groups[0]["params"] = [self.w]

    module = Module()
    fit(tmp_path, max_epochs=2).run(module, ones(4))
    assert module.w.item() == 7.0  # of the second epoch's end


def test_an_optimizer_that_divides_its_state_by_itself_is_an_error(tmp_path: Path) -> None:
    class Dividing(torch.optim.SGD):
        def consolidate_state_dict(self, to: int = 0) -> None: ...

    class Divided(Weight):
        def configure_optimizers(self) -> Any:
            return Dividing(self.parameters(), lr=1.0)

    module = Divided()
    with pytest.raises(ValueError, match=r"Dividing divides its state among the ranks by itself.*strategy='fsdp'"):
        fit(tmp_path).run(module, ones(1))
    assert not module.losses


class SecondOrder(torch.optim.SGD):
    """Differentiates the gradients in its step, as AdaHessian does."""

    @torch.enable_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            torch.autograd.grad(p.grad.sum(), p)
        return super().step()


class Curved(Weight):
    def configure_optimizers(self) -> Any:
        return SecondOrder(self.parameters(), lr=1.0)


def test_an_optimizer_that_differentiates_gradients_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the step of SecondOrder differentiates gradients.*create_graph=True"):
        fit(tmp_path).run(Curved(), ones(1))


class Lookahead(torch.optim.SGD):
    """Has a state of another form, as wrappers of optimizers have."""

    def state_dict(self) -> dict[str, Any]:
        return {"base_optimizer": super().state_dict(), "lookahead_state": {}}


class Ahead(Weight):
    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters(), lr=1.0)


def test_a_state_of_another_form_is_an_error_after_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"Lookahead: its state_dict\(\) has 'base_optimizer', 'lookahead_state', and not 'state' and.*after the first step",
    ):
        fit(tmp_path, callbacks=[ModelCheckpoint()]).run(Ahead(), ones(2))
