"""What other trainers get wrong in their loops: schedulers, limits, validation, interrupts, errors. Numbers are worked out by hand."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import clean_environment, ranks_of, run_script
from support.toys import Weight, fit, ones
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from callbacks import CSVLogger, ModelCheckpoint
from engine import Callback, TrainModule

# -- schedulers -----------------------------------------------------------------------------------------------------------------------


class Scheduled(Weight):
    """Its scheduler notes at which (epoch, step) it stepped."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.stepped = options, []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = LambdaLR(optimizer, lambda n: 1.0)
        step = scheduler.step
        scheduler.step = lambda: (self.stepped.append((self.current_epoch, self.global_step)), step())  # type: ignore[method-assign]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.options}}


def schedulers(root: Path | str, **settings: Any) -> list[Any]:
    found: list[Any] = []
    for options, more in (
        ({"interval": "step", "frequency": 3}, {}),
        ({"interval": "step"}, {"accumulate_grad_batches": 2}),
        ({"frequency": 2}, {}),
    ):
        module = Scheduled(**options)
        # Ten samples: micro-batches of 2 on one rank and of 1 on two, so that an epoch has 5 steps on both.
        size = 1 if settings else 2
        fit(root, max_epochs=3, **settings, **more).run(module, DataLoader(torch.ones(10, 1), batch_size=size))
        found.append(module.stepped)
    return found


STEPPED = [
    [(0, 3), (1, 6), (1, 9), (2, 12), (2, 15)],  # frequency 3 over 15 steps: 5
    [(epoch, 3 * epoch + i) for epoch in range(3) for i in (1, 2, 3)],  # windows of 2, 2 and 1
    [(1, 10)],  # every second epoch of three
]


def test_a_scheduler_steps_once_per_optimizer_step_on_one_rank(tmp_path: Path) -> None:
    assert schedulers(tmp_path) == STEPPED


def ranks_schedulers(root: str) -> Any:
    return schedulers(root, devices="auto")


def test_a_scheduler_steps_once_per_optimizer_step_on_two_ranks(tmp_path: Path) -> None:
    for found in ranks_of(ranks_schedulers, 2, tmp_path):
        assert [[tuple(at) for at in stepped] for stepped in found] == STEPPED


def test_epoch_schedulers_step_after_the_epochs_validation(tmp_path: Path) -> None:
    class Rates(Weight):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        def on_validation_end(self) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])

    rates: list[float] = []
    module = Rates()
    fit(tmp_path, max_epochs=3).run(module, ones(2), ones(1))
    assert rates == [1.0, 0.5, 0.25]
    assert module.w.item() == -2 * (1.0 + 0.5 + 0.25)


class Plateau(Weight):
    """Validation loss 3, 3, 1, ...: with patience 0 the rate is halved after the second epoch."""

    monitor = "val"

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", 3.0 if self.current_epoch < 2 else 1.0)
        self.log("accuracy", 0.5)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
            "monitor": self.monitor,
        }


def test_a_plateau_scheduler_follows_this_epochs_validation(tmp_path: Path) -> None:
    module = Plateau()
    fit(tmp_path, max_epochs=4).run(module, ones(1), ones(1))
    assert module.w.item() == -(1.0 + 1.0 + 0.5 + 0.5)


def test_a_plateau_scheduler_without_its_metric_names_those_there_are(tmp_path: Path) -> None:
    module = Plateau()
    module.monitor = "val_loss"
    with pytest.raises(ValueError, match=r"follows 'val_loss', which was not logged.*; logged: accuracy, val$"):
        fit(tmp_path).run(module, ones(1), ones(1))


class PlateauOfSteps(Weight):
    """Logs its samples' mean, which a plateau scheduler follows at each step; the scheduler keeps what it gets."""

    def __init__(self, monitor: str, on_epoch: bool) -> None:
        super().__init__()
        self.monitor, self.on_epoch, self.followed = monitor, on_epoch, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", batch.mean(), on_step=True, on_epoch=self.on_epoch)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = ReduceLROnPlateau(optimizer)
        scheduler.step = self.followed.append  # type: ignore[method-assign]
        options = {"scheduler": scheduler, "interval": "step", "frequency": 2, "monitor": self.monitor}
        return {"optimizer": optimizer, "lr_scheduler": options}


def followed_by_plateau(root: Path | str, monitor: str, on_epoch: bool, **settings: Any) -> list[float]:
    module = PlateauOfSteps(monitor, on_epoch)
    samples = torch.arange(16.0).reshape(16, 1)
    loader = DataLoader(samples, batch_size=1 if settings else 2)
    fit(root, accumulate_grad_batches=2, log_every_n_steps=50, **settings).run(module, loader)
    return module.followed


def followed_on_ranks(root: str) -> list[float]:
    return followed_by_plateau(root, "loss_step", True, devices="auto", strategy="ddp")


@pytest.mark.parametrize(("monitor", "on_epoch"), [("loss", False), ("loss", True), ("loss_step", True)])
def test_a_plateau_scheduler_of_steps_follows_the_step_that_is_over(
    monitor: str, on_epoch: bool, tmp_path: Path
) -> None:
    assert followed_by_plateau(tmp_path, monitor, on_epoch) == [5.5, 13.5]


def test_a_plateau_scheduler_of_steps_follows_all_ranks(tmp_path: Path) -> None:
    assert ranks_of(followed_on_ranks, 2, tmp_path) == [[5.5, 13.5]] * 2


# -- limits ---------------------------------------------------------------------------------------------------------------------------


class Paced(Weight):
    """Rank r needs r + 1 times ``seconds`` for a step: the ranks' clocks and wishes differ."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        time.sleep(self.seconds * (self.global_rank + 1))
        return super().training_step(batch, batch_idx)


class StopAt(Callback):
    """Rank ``rank`` asks to stop at ``step``."""

    def __init__(self, step: int, rank: int) -> None:
        self.at, self.rank = step, rank

    def on_train_start(self, run: Any, module: Any) -> None:
        run.control.stopwatch._started -= 0.1 * run.rank  # the ranks' clocks differ

    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        if run.rank == self.rank and run.step == self.at:
            run.stop("enough")


LIMITS: dict[str, dict[str, Any]] = {
    "steps": {"max_steps": 7},
    "steps before epochs": {"max_steps": 7, "max_epochs": 3},
    "epochs before steps": {"max_steps": 100, "max_epochs": 2},
    "a stop": {"max_epochs": 100, "stop": 7},
    "a stop with max_steps": {"max_steps": 1000, "stop": 7},
    "steps before a stop": {"max_steps": 4, "stop": 900},
    "time": {"max_time": "1 s", "seconds": 0.01},
    "time with all": {"max_time": "1 s", "max_steps": 1000, "max_epochs": 1000, "stop": 900, "seconds": 0.01},
    "a stop before time": {"max_time": "1 h", "max_steps": 1000, "stop": 7, "seconds": 0.01},
    "no epoch": {"max_epochs": 0, "max_steps": 5},
    "no step": {"max_steps": 0, "max_epochs": 5},
}


def limits(root: Path | str, **settings: Any) -> dict[str, Any]:
    found = {}
    for name, given in LIMITS.items():
        given = dict(given)
        stop, seconds = given.pop("stop", -1), given.pop("seconds", 0.001)
        module = Paced(seconds)
        data = DataLoader(torch.ones(10 if settings else 5, 1), batch_size=1)  # 5 steps an epoch
        result = fit(root, callbacks=StopAt(stop, 1 if settings else 0), **given, **settings).run(module, data)
        found[name] = [result.step, module.w.item(), result.epoch, result.status, result.stop_reason]
    return found


def ranks_limits(root: str) -> Any:
    return limits(root, devices="auto")


def check_limits(found: dict[str, Any], stop: list[str]) -> None:
    assert found["steps"] == found["steps before epochs"] == [7, -7.0, 1, "completed", "max_steps=7 reached"]
    assert found["epochs before steps"] == [10, -10.0, 2, "completed", "max_epochs=2 reached"]
    assert found["steps before a stop"] == [4, -4.0, 0, "completed", "max_steps=4 reached"]
    assert found["no epoch"] == [0, 0.0, 0, "completed", "max_epochs=0 reached"]
    assert found["no step"] == [0, 0.0, 0, "completed", "max_steps=0 reached"]
    for name in ("a stop", "a stop with max_steps", "a stop before time"):
        step, weight, _, status, reason = found[name]
        assert (status, weight) == ("stopped", -step)
        assert reason in stop
        assert 7 <= step < 500
    for name in ("time", "time with all"):
        step, weight, _, status, reason = found[name]
        assert (status, weight, reason) == ("stopped", -step, "max_time=1 seconds reached")
        assert 1 <= step <= 150


def test_limits_on_one_rank(tmp_path: Path) -> None:
    found = limits(tmp_path)
    check_limits(found, ["enough"])
    assert {found[name][0] for name in LIMITS if name.startswith("a stop")} == {7}


def test_limits_on_two_ranks_end_both_at_the_same_step(tmp_path: Path) -> None:
    first, second = ranks_of(ranks_limits, 2, tmp_path)
    assert {name: values[:4] for name, values in first.items()} == {name: values[:4] for name, values in second.items()}
    check_limits(first, ["another rank asked to stop"])
    check_limits(second, ["enough"])


# -- validation -----------------------------------------------------------------------------------------------------------------------


def test_validation_inside_a_window_leaves_its_gradients(tmp_path: Path) -> None:
    class Inside(Weight):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                before.append(self.w.grad.clone())  # type: ignore[union-attr]
                from_fit = fit(tmp_path / "inner").validate(self, ones(2))
                assert from_fit == [{"val": 0.0}]
                after.append(self.w.grad.clone())  # type: ignore[union-attr]

    before: list[Tensor] = []
    after: list[Tensor] = []
    module = Inside()
    fit(tmp_path, accumulate_grad_batches=2).run(module, [torch.full((2, 1), 1.0), torch.full((2, 1), 3.0)])
    assert before == after == [torch.tensor([0.5])]
    assert module.w.item() == -2.0


class Random(TrainModule):
    """Dropout, batch norm, and parts whose train/eval flags the user has set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.frozen = nn.Dropout(0.5)
        self.net[1].eval()
        self.frozen.eval()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert not self.net[1].training
        assert not self.frozen.training
        assert self.net[2].training
        loss = self.frozen(self.net(batch)).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert not any(m.training for m in self.modules())
        self.log("val", self.net(batch).mean() + torch.rand(()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("sanity", "every"),
    [(2, None), (-1, "1 epochs"), (0, 1), (2, 3)],
    ids=["sanity", "sanity-and-epochs", "every-step", "sanity-and-steps"],
)
def test_validation_and_its_sanity_check_change_no_loss_and_no_flag(tmp_path: Path, sanity: int, every: Any) -> None:
    data = DataLoader(torch.randn(20, 2, generator=torch.Generator().manual_seed(1)), batch_size=4, shuffle=True)
    plain, validated = Random(), Random()
    fit(tmp_path, seed=1, max_epochs=2, val_every=None).run(plain, data, data)
    fit(tmp_path, seed=1, max_epochs=2, val_every=every or "1 epochs", num_sanity_val_steps=sanity).run(
        validated, data, data
    )
    assert validated.losses == plain.losses
    assert {name for name, m in validated.named_modules() if not m.training} == {"net.1", "frozen"}


# -- interrupts -----------------------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import sys, time
sys.path.insert(0, sys.argv[2])
from callbacks import CSVLogger, ModelCheckpoint
from engine import Callback
from support.toys import Weight, fit, ones

class Slow(Weight):
    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        print("step", flush=True)
        self.log("n", float(batch_idx))
        return super().training_step(batch, batch_idx)

class Watch(Callback):
    def on_train_end(self, run, module): print("train end", run.stop_reason)
    def on_exception(self, run, module, error): print("exception", type(error).__name__)
    def teardown(self, run, module, stage): print("teardown")

try:
    module = Slow()
    fit(sys.argv[1], max_epochs=10**6, log_every_n_steps=1, callbacks=[Watch(), CSVLogger(), ModelCheckpoint(every=10**9)]).run(module, ones(5))
except BaseException as error:
    print("caught", type(error).__name__, int(-module.w.item()))
    raise
"""


def test_ctrl_c_ends_after_the_step_saves_closes_and_is_raised(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script), str(tmp_path / "root"), str(Path(__file__).parents[1])]
    process = subprocess.Popen(
        command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline() == "step\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    lines = [line for line in out.splitlines() if line != "step"]
    assert lines[:3] == ["train end interrupted (Ctrl-C)", "exception KeyboardInterrupt", "teardown"]
    _, name, steps = lines[3].split()
    assert name == "KeyboardInterrupt"
    assert process.returncode == 130
    saved = tmp_path / "root" / "checkpoints" / f"step={int(steps):08d}"
    at_once, last = [line for line in err.splitlines() if line.startswith("Ctrl-C")]
    assert at_once == "Ctrl-C: the run ends after this step; press it again to end at once"
    assert last == (
        f'Ctrl-C: the training ended after step {steps}, saved in {saved}; resume="last" (fit run: --resume last) continues from it'
    )
    assert err.rstrip().endswith(last)
    assert "Traceback" not in err
    assert (saved / "manifest.json").exists()
    (table,) = (tmp_path / "root").rglob("*.csv")
    assert len(table.read_text().splitlines()) == 1 + int(steps)


INTERRUPTED_WITH_WORKERS = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            os.killpg(0, signal.SIGINT)  # as a terminal does
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

os.setpgid(0, 0)
fit = Fit(accelerator="cpu", max_epochs=1, callbacks=[], root_dir=sys.argv[1])
try:
    fit.run(Net(), DataLoader(TensorDataset(torch.ones(64, 2)), 2, num_workers=2))
except KeyboardInterrupt:
    report("interrupted")
"""


def test_ctrl_c_is_told_once_and_not_by_each_data_worker(tmp_path: Path) -> None:
    ran = run_script(INTERRUPTED_WITH_WORKERS, tmp_path, forked=True)
    assert ran.value == "interrupted"
    assert ran.stderr.count("the run ends after this step") == 1, ran.stderr


def test_a_keyboard_interrupt_in_a_hook_is_raised_after_saving_and_closing(tmp_path: Path) -> None:
    interrupt, watch = KeyboardInterrupt(), Watch()

    class Interrupts(Callback):
        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            if run.step == 3:
                raise interrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fit(tmp_path, callbacks=[watch, Interrupts(), ModelCheckpoint(every=10**9), CSVLogger()]).run(Weight(), ones(5))
    assert caught.value is interrupt
    assert watch.seen == [interrupt, "teardown"]
    assert (tmp_path / "checkpoints" / "step=00000003" / "manifest.json").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# -- errors in hooks ------------------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """The errors it gets, and that it is closed."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_exception(self, run: Any, module: Any, exception: BaseException) -> None:
        self.seen.append(exception)

    def teardown(self, run: Any, module: Any, stage: str) -> None:
        self.seen.append("teardown")


class Saves(Callback):
    """Saves at the end of each epoch, and removes the checkpoint before."""

    before: Any = None

    def on_train_epoch_end(self, run: Any, module: Any) -> None:
        earlier, self.before = self.before, run.save_checkpoint()
        if earlier is not None:
            run.remove_checkpoint(earlier)


class Logs(Weight):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("loss", 1.0)
        if any("text" in each.takes for each in self.run.callbacks):
            self.log_text("note", "a step")
        return super().training_step(batch, batch_idx)


def raises(error: BaseException) -> Any:
    def hook(*args: Any, **kwargs: Any) -> Any:
        raise error

    return hook


OF_CALLBACK = [
    name
    for name in vars(Callback)
    if name.startswith("on_") or name in ("setup", "teardown", "state_dict", "load_state_dict")
]
OF_STEP = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "prepare_data",
    "transfer_batch_to_device",
    "setup",
    "teardown",
)
OF_MODULE = [
    name
    for name in dir(TrainModule)
    if (name.startswith(("on_", "configure_")) and name not in ("configure_callbacks", "on_gpu")) or name in OF_STEP
] + [
    *("training_step", "validation_step", "test_step", "predict_step"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *(("callback", name) for name in OF_CALLBACK if name != "on_exception"),
        *(("module", name) for name in OF_MODULE),
    ],
)
def test_an_error_in_any_hook_reaches_all_and_is_raised_unchanged(tmp_path: Path, owner: str, name: str) -> None:
    error = OSError(f"in {name}")
    first, last = Watch(), Watch()
    module, callback = Logs(), Callback()
    callback.takes = frozenset({"text"} if name == "on_media" else ())
    if "load_" in name or name.endswith("loaded"):
        fit(tmp_path, callbacks=[Callback(), Saves()]).run(
            Logs(), DataLoader(torch.ones(4, 1))
        )  # something to resume from
    setattr(module if owner == "module" else callback, name, raises(error))
    trainer = fit(
        tmp_path,
        num_sanity_val_steps=1,
        max_epochs=2,
        log_every_n_steps=1,
        callbacks=[first, callback, CSVLogger(), Saves(), last],
    )
    method = next((stage for stage in ("test", "predict") if stage in name), "run")
    data = DataLoader(torch.ones(4, 1), num_workers=1, multiprocessing_context="fork")
    given = None if name in ("train_dataloader", "test_dataloader", "predict_dataloader") else data
    more = (
        {
            "val_loaders": None if name == "val_dataloader" else data,
            "resume": "last" if "load_" in name or name.endswith("loaded") else None,
        }
        if method == "run"
        else {}
    )
    with pytest.raises(OSError) as caught:
        getattr(trainer, method)(module, given, **more)
    assert caught.value is error
    assert caught.value.__cause__ is None
    for watch in (first, last):
        assert sorted(watch.seen, key=str) == [error, "teardown"]
    assert module._context is None
    assert multiprocessing.active_children() == []  # while the traceback, which holds the loop's frames, is still there
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert open_csv(tmp_path) == []


def open_csv(root: Path) -> list[str]:
    """Files of loggers that this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has closed it meanwhile
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if link.startswith(str(root)) and link.endswith(".csv")]


def test_an_error_in_on_exception_hides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    error = OSError("first")

    class Bad(Callback):
        on_train_start = raises(error)
        on_exception = raises(ValueError("second"))

    watch = Watch()
    with pytest.raises(OSError) as caught, caplog.at_level(logging.ERROR, logger="engine"):
        fit(tmp_path, callbacks=[Bad(), watch]).run(Weight(), ones(1))
    assert caught.value is error
    assert watch.seen == [error, "teardown"]
    assert "on_exception failed while OSError was handled" in caplog.text


# -- self.log -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m, i: m.log("many", torch.ones(2)),
            ValueError,
            r"log\('many'\) got a tensor of shape \(2,\): log one number",
        ),
        (lambda m, i: m.log("nested", {"a": 1.0}), TypeError, r"log\('nested'\) got a dict: use log_dict"),
        (lambda m, i: m.log_dict({"ok": 1.0, "nested": {"a": 1.0}}), TypeError, r"the value of 'nested' is a dict"),
        (
            lambda m, i: m.log("name", 1.0, prog_bar=bool(i)),
            ValueError,
            r"log\('name'\) is called with other.*prog_bar=True \(before: False\)",
        ),
        (
            lambda m, i: m.log("name", 1.0, reduce="max" if i else "min"),
            ValueError,
            r"log\('name'\).*reduce_fx='max' \(before: 'min'\)",
        ),
        (
            lambda m, i: m.log("name", 1.0, on_epoch=bool(i)),
            ValueError,
            r"log\('name'\).*on_epoch=True \(before: False\)",
        ),
    ],
)
def test_wrong_logging_names_the_key(tmp_path: Path, call: Any, error: type[Exception], message: str) -> None:
    class Wrong(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            call(self, batch_idx)
            return super().training_step(batch, batch_idx)

    with pytest.raises(error, match=message):
        fit(tmp_path).run(Wrong(), ones(2))


# -- errors before the first step -----------------------------------------------------------------------------------------------------


class NoGraph(Weight):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self.w.detach() * batch).mean()


class Frozen(Weight):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1), requires_grad=False)], lr=1.0)


class Dropped(Weight):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.param_groups[0]["params"].clear()
        return optimizer


@pytest.mark.parametrize(
    ("make", "data", "settings", "error", "message"),
    [
        (NoGraph, ones(2), {}, ValueError, "the loss has no graph.*under no_grad, detached, made with .item"),
        (Weight, 3, {}, TypeError, r"must be iterable \(a DataLoader, a list of batches, a generator\), got int: 3"),
        (Weight, nn.Linear(1, 1), {}, TypeError, "must be iterable .*got Linear"),
        (Weight, [], {}, ValueError, r"training loader \(list\) is empty"),
        (Frozen, ones(2), {}, ValueError, "SGD has no parameters to train: it was given none, or only frozen ones"),
        (Dropped, ones(2), {}, ValueError, "SGD has no parameters to train"),
        (
            Weight,
            ones(2),
            {"precision": "fp7"},
            ValueError,
            r"precision='fp7' is unknown; did you mean 'fp8'\?; possible: 32-true, bf16-mixed",
        ),
        (
            Weight,
            ones(2),
            {"strategy": "fsdpp"},
            ValueError,
            r"strategy='fsdpp' is unknown; did you mean '\w*d\w*p'\?; possible: auto, single, ddp",
        ),
    ],
    ids=["loss", "int", "module", "empty", "frozen", "no-parameters", "precision", "strategy"],
)
def test_errors_before_the_first_step_name_what_is_possible(
    tmp_path: Path, make: Any, data: Any, settings: Any, error: type[Exception], message: str
) -> None:
    steps: list[str] = []

    class Stepped(Callback):
        def on_before_zero_grad(self, *args: Any) -> None:
            steps.append("stepped")

    module = make()
    with pytest.raises(error, match=message):
        fit(tmp_path, callbacks=Stepped(), **settings).run(module, data)
    assert steps == []
    assert module.w.item() == 0.0
