from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from callbacks import RichProgressBar
from engine import Callback


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=120)


@pytest.fixture
def pipe():
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def test_a_pipe_gets_one_line_an_epoch(make_fit, scripted, batches, pipe):
    make_fit(max_epochs=3, log_every_n_steps=1, callbacks=[RichProgressBar(console=pipe)]).run(
        scripted([1.0]), batches, batches
    )
    lines = pipe.file.getvalue().splitlines()
    assert len(lines) == 3
    for epoch, line in enumerate(lines):
        assert re.fullmatch(rf"epoch {epoch}: step {4 * (epoch + 1)}, [\d.]+ step/s .*train/weight\S*=-\S+", line)


def test_the_terminal_is_drawn_and_given_back(make_fit, scripted, batches, terminal):
    make_fit(max_epochs=2, log_every_n_steps=1, callbacks=[RichProgressBar(console=terminal)]).run(
        scripted([1.0]), batches, batches
    )
    text = terminal.file.getvalue()
    assert "epoch 0" in text
    assert "step/s" in text
    assert "train/weight" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0  # the cursor: hidden, then shown


@pytest.mark.parametrize("error", [RuntimeError("as planned"), KeyboardInterrupt()])
def test_it_is_closed_after_an_error(make_fit, scripted, batches, terminal, error):
    class Failing(scripted):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise error
            return super().training_step(batch, batch_idx)

    with pytest.raises(type(error)):
        make_fit(callbacks=[RichProgressBar(console=terminal)]).run(Failing(), batches)
    text = terminal.file.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


def test_it_is_drawn_by_the_clock(make_fit, scripted, batches, terminal, monkeypatch):
    import callbacks.progress_bar as place

    now = 0.0
    monkeypatch.setattr(place.time, "monotonic", lambda: now)
    drawn = []

    class Counting(RichProgressBar):
        def _draw(self, task, done, text):
            drawn.append(done)
            super()._draw(task, done, text)

    class Tick(Callback):
        def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
            nonlocal now
            now += 0.03

    bar = Counting(refresh_rate=10, console=terminal)
    make_fit(max_epochs=1, callbacks=[Tick(), bar]).run(scripted(), batches * 5)
    # A batch takes 0.03 s and 0.1 s lie between two drawings: the first batch, then every fourth.
    assert drawn == [1, 5, 9, 13, 17]


def test_evaluation_has_its_own_bar(make_fit, scripted, batches, terminal):
    fit = make_fit(max_epochs=1, num_sanity_val_steps=1, callbacks=[RichProgressBar(console=terminal)])
    module = scripted([1.0])
    fit.run(module, batches, batches)
    text = terminal.file.getvalue()
    assert "sanity check" in text
    assert "validation" in text
    fit.test(module, batches)
    assert "test" in terminal.file.getvalue()


def test_the_rate_leaves_validation_out(make_fit, scripted, batches, pipe, monkeypatch):
    import callbacks.progress_bar as place

    now = 0.0
    monkeypatch.setattr(place.time, "monotonic", lambda: now)

    class Clock(Callback):
        def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
            nonlocal now
            now += 0.5

        def on_validation_batch_end(self, run, module, outputs, batch, batch_idx, dataloader_idx=0):
            nonlocal now
            now += 100.0

    make_fit(max_epochs=1, callbacks=[Clock(), RichProgressBar(console=pipe)]).run(scripted([1.0]), batches, batches)
    assert "2.0 step/s" in pipe.file.getvalue()


def test_the_line_of_an_epoch_has_the_metrics_of_that_epoch(make_fit, scripted, batches, pipe):
    class Means(scripted):
        def training_step(self, batch, batch_idx):
            self.log("mean", float(self.current_epoch), prog_bar=True, on_step=False, on_epoch=True)
            return (self.weight * batch).mean()

    make_fit(max_epochs=3, callbacks=[RichProgressBar(console=pipe)]).run(Means(), batches)
    assert re.findall(r"mean=(\S+)", pipe.file.getvalue()) == ["0", "1", "2"]


@pytest.mark.parametrize("rate", [0, -1, 11])
def test_wrong_rate(rate):
    with pytest.raises(ValueError, match="at most 10 Hz"):
        RichProgressBar(refresh_rate=rate)
