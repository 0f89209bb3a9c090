"""Bars on a real terminal, which tmux draws, compared with the drawing that is expected."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support.ranks import clean_environment
from support.terminal import Pane

import callbacks.progress.base as progress
import callbacks.progress.estimates as estimates
from callbacks import RichProgressBar, TQDMProgressBar
from engine import Callback, TrainModule

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


@pytest.fixture
def clock(monkeypatch):
    """The bars' clock, which stands still until ``clock.now`` is changed."""
    clock = SimpleNamespace(now=0.0)
    for place in (progress, estimates):
        monkeypatch.setattr(place, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "screen")
    return clock


class FourMetrics(TrainModule):
    """Logs four values for the bar; ``at[step]()`` is called in the training step with this number."""

    def __init__(self, at=()):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.at = dict(at)

    def training_step(self, batch, batch_idx):
        self.at.get(self.global_step, lambda: None)()
        for name in ("train/loss", "train/accuracy", "train/perplexity", "train/entropy"):
            self.log(name, 0.25, prog_bar=True)
        return (self.weight * batch).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val/loss", 0.5, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Seconds(Callback):
    """A training batch takes 0.5 s on the clock, a validation batch 0.25 s; ``then[step]`` is called when the bar of this step is drawn."""

    runs_last = True

    def __init__(self, clock, then=()):
        self.clock, self.then = clock, dict(then)

    def on_train_batch_start(self, run, module, batch, batch_idx):
        self.clock.now += 0.5

    def on_validation_batch_start(self, run, module, batch, batch_idx, dataloader_idx=0):
        self.clock.now += 0.25

    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        self.then.get(run.step, lambda: None)()


METRICS = "train/loss=0.25  train/accuracy=0.25  train/perplexity=0.25  train/entropy=0.25"  # 79 columns
# 2 epochs of 20 steps of 0.5 s with 4 validation batches of 0.25 s after each. Until one has been measured, a validation batch is taken to be
# as long as one in training: 30 * 0.5 + 2 * 4 * 0.5 = 19 s are left at step 10. At step 30 it is 10 * 0.5 + 4 * 0.25 = 6 s.
# The last column stays empty. At 80 columns the bar has 79 - 52 = 27 of them.
AT_10 = {
    80: ["epoch 0/1  " + "━" * 13 + "─" * 14 + "  10/20  step 10/40  2.0 step/s  ETA 0:19", METRICS],
    50: [
        "epoch 0/1  10/20  2.0 step/s  ETA 0:19",
        "train/loss=0.25  train/accuracy=0.25",
        "train/perplexity=0.25  train/entropy=0.25",
    ],
    200: ["epoch 0/1  " + "━" * 20 + "─" * 20 + "  10/20  step 10/40  2.0 step/s  0:05 elapsed  ETA 0:19", METRICS],
}
BATCHES, VAL = [torch.ones(2, 1)] * 20, [torch.ones(2, 1)] * 4
ROWS = 12


def trained(make_fit, clock, pane, at=(), bar=RichProgressBar, fails=()):
    """A run with its bar in this pane. ``at``: what to do after these steps, when their bar is drawn; ``fails``: in them."""
    callbacks = [bar(console=Console(file=pane.open())), Seconds(clock, at)]
    make_fit(max_epochs=2, log_every_n_steps=1, callbacks=callbacks).run(FourMetrics(fails), BATCHES, VAL)


def bottom(bars):
    """A screen that has only these bars."""
    return [""] * (ROWS - len(bars)) + bars


@pytest.mark.parametrize("width", AT_10)
def test_four_metrics(make_fit, clock, width):
    with Pane(width, ROWS) as pane:
        trained(make_fit, clock, pane, {10: lambda: pane.looks(bottom(AT_10[width]))})
        pane.shows("epoch 0/1: step 20, 2.0 step/s", "epoch 1/1: step 40, 2.0 step/s")
        screen = pane.screen()
    assert screen[0].startswith("epoch 0/1: step 20")
    assert sum("step 40" in row for row in screen) == 1
    assert not any("━" in row or "ETA" in row for row in screen)


def test_the_time_left_includes_validation(make_fit, clock):
    def shows(left):
        return lambda: pane.shows(f"ETA {left}")

    with Pane(80, ROWS) as pane:
        trained(make_fit, clock, pane, {10: shows("0:19"), 30: shows("0:06"), 39: shows("0:02")})


def test_what_others_print_scrolls_above(make_fit, clock):
    """Another process on the terminal, a log handler made earlier, lines without an end: nothing damages the bar."""
    log = logging.getLogger("of the test")

    def after(text):
        return [*text, *bottom(AT_10[80])[len(text) :]]

    def disturb():
        subprocess.run(["sh", "-c", f"printf 'another\\nrank\\n' > {pane.tty}"], check=True, timeout=60)
        log.warning("a warning")
        handler.stream.write("half a ")
        handler.stream.flush()

    def more():
        handler.stream.write("line\n" + "".join(f"{number}\n" for number in range(20)))
        handler.stream.flush()

    with Pane(80, ROWS) as pane:
        handler = logging.StreamHandler(pane.open())
        log.addHandler(handler)
        try:
            at = {
                9: disturb,
                10: lambda: pane.looks(after(["another", "rank", "a warning", "half a"])),
                11: more,
                12: lambda: pane.shows("12/20", *(f"\n{number}\n" for number in range(12, 20))),
            }
            trained(make_fit, clock, pane, at)
        finally:
            log.removeHandler(handler)
        history = pane.screen(history=True)
    # What has scrolled out can still be read, once, and no bar is among it.
    assert history[:4] == ["another", "rank", "a warning", "half a line"]
    assert history[4:24] == [str(number) for number in range(20)]
    assert not any("━" in row for row in history)


def test_the_window_changes(make_fit, clock):
    with Pane(80, ROWS) as pane:
        at = {
            5: lambda: pane.resize(50, ROWS),
            10: lambda: pane.looks(bottom(AT_10[50])),
            11: lambda: pane.resize(200, 20),
            12: lambda: pane.shows("12/20", "elapsed"),
            13: lambda: pane.resize(80, 6),
            14: lambda: pane.shows("14/20"),
        }
        trained(make_fit, clock, pane, at)
        pane.shows("epoch 1/1: step 40")
        history = pane.screen(history=True)
    assert not any("━" in row or "ETA" in row for row in history), "\n".join(history)


@pytest.mark.parametrize("error", [RuntimeError("as planned"), KeyboardInterrupt()])
def test_an_error_leaves_the_terminal_clean(make_fit, clock, error):
    def fails():
        raise error

    with Pane(80, ROWS) as pane:
        with pytest.raises(type(error)):
            trained(make_fit, clock, pane, {10: lambda: pane.shows("10/20")}, fails={10: fails})
        pane.open().write("after\n" * (ROWS + 1) + "end")  # the whole screen scrolls again
        pane.flush()
        pane.looks(["after"] * (ROWS - 1) + ["end"])
        assert pane.screen(history=True)[0].startswith("epoch 0/1: step 10/40, ")


def test_several_loaders_and_the_sanity_check(make_fit, clock):
    """3 + 5 validation batches; the sanity check takes 2 and 2 of them."""
    loaders = [torch.utils.data.DataLoader(torch.ones(size, 1)) for size in (3, 5)]
    seen = []

    class Look(Callback):
        runs_last = True

        def on_validation_batch_end(self, run, module, outputs, batch, batch_idx, dataloader_idx=0):
            done = 3 * dataloader_idx + batch_idx + 1 if run.stage == "fit" else 2 * dataloader_idx + batch_idx + 1
            title, total = ("validation", 8) if run.stage == "fit" else ("sanity check", 4)
            seen.append(total)
            pane.shows(f"{title} {dataloader_idx + 1}/2  ", f"  {done}/{total}  4.0 batch/s")

    with Pane(80, ROWS) as pane:
        console = Console(file=pane.open())
        make_fit(
            max_epochs=1, num_sanity_val_steps=2, callbacks=[RichProgressBar(console=console), Seconds(clock), Look()]
        ).run(FourMetrics(), BATCHES[:2], loaders)
    assert seen == [4] * 4 + [8] * 8


def test_tqdms_look(make_fit, clock):
    pytest.importorskip("tqdm")
    expected = ["epoch 0/1:  50%|", "| 10/20 [00:05<00:05,  2.00step/s, ETA 0:19]", METRICS]

    def look():
        pane.shows(*expected)
        assert [len(row) for row in pane.screen()] == [0] * (ROWS - 2) + [79, 79]

    with Pane(80, ROWS) as pane:
        trained(make_fit, clock, pane, {10: look}, bar=TQDMProgressBar)
        pane.shows("epoch 1/1: step 40, 2.0 step/s")


def test_a_tiny_window(make_fit, clock):
    """The bar keeps one row, and what is printed has the others."""
    with Pane(30, 3) as pane:
        trained(make_fit, clock, pane, {10: lambda: pane.looks(["", "", "epoch 0/1  10/20  ETA 0:19"])})


TWO_RANKS = """
import sys, time, torch, pathlib
from callbacks import RichProgressBar
from engine import Fit, TrainModule

class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            print(f"rank {self.global_rank} speaks", flush=True)
        if batch_idx == 5:
            while not pathlib.Path(sys.argv[1], "go").exists():
                time.sleep(0.02)
        if batch_idx == 4:
            time.sleep(0.3)
        loss = (self.weight * batch[0]).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    validation_step = test_step = lambda self, batch, batch_idx: self.log("score", 0.5)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

fit = Fit(accelerator="cpu", devices=2, max_epochs=1, root_dir=sys.argv[1], callbacks=[RichProgressBar()])
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(20, 1)))
module = Model()
fit.run(module, data, data)
fit.test(module, data)
if fit.is_main_process:
    print("the end")
"""


@pytest.mark.slow
def test_two_ranks_on_one_terminal(tmp_path):
    """A print on another rank does not stop the bar, and there is one table of results."""
    (tmp_path / "script.py").write_text(TWO_RANKS)
    environment = clean_environment(TERM="screen", CI="")
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "TERM", "CI", "PATH")
    variables = " ".join(f"{name}='{environment[name]}'" for name in names)
    with Pane(80, 20, f"env {variables} {sys.executable} {tmp_path}/script.py {tmp_path}") as pane:
        pane.shows("rank 0 speaks", "rank 1 speaks", "epoch 0/0", " 5/10")
        (tmp_path / "go").touch()
        pane.shows("the end")
        screen = pane.screen()
    assert not any("━" in row for row in screen)
    for once in ("rank 0 speaks", "rank 1 speaks", "epoch 0/0: step 10", "test of step 10", "score"):
        assert sum(once in row for row in screen) == 1, "\n".join(screen)
