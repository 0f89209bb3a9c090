from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from callbacks import ModelSummary
from callbacks.model_summary import quantity, size
from engine import Callback, TrainModule


class Net(TrainModule):
    """A convolution, a batch norm, a dropout and two linear layers, one of them frozen and one inside another module."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.rest = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(4 * 6 * 6, 8))
        self.head = nn.Linear(8, 1, bias=False)
        self.head.requires_grad_(False)
        self.mean = MeanMetric()
        self.calls, self.seen, self.losses, self.talks = 0, [], [], False

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.seen.append(batch_idx)
        batch.mul_(0.5)
        with torch.no_grad():
            self.head.weight.mul_(0.9).add_(
                random.random() + np.random.rand(), alpha=0.01
            )  # as a teacher's weights are
        loss = self.head(self.rest(self.norm(self.conv(batch)))).pow(2).mean()
        self.mean.update(loss.detach())
        self.log("loss", loss)
        if self.talks:
            self.log_text("text", "once")
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def images():
    return DataLoader(torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(1)), batch_size=6, shuffle=True)


def parameters_of(summary):
    return {layer.name: (layer.parameters, layer.trainable, layer.bytes) for layer in summary.layers}


def test_counts_flops_and_shapes(make_fit, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    summary = ModelSummary(max_depth=2)
    make_fit(max_epochs=1, callbacks=[summary]).run(Net(), images())
    # Buffers of the norm: two of 4 floats and an int64.
    assert parameters_of(summary) == {
        "": (40 + 8 + 1160 + 8, 40 + 8 + 1160, 4 * (40 + 8 + 1160 + 8) + 40),
        "conv": (4 * 9 + 4, 40, 160),
        "norm": (8, 8, 32 + 40),
        "rest": (144 * 8 + 8, 1160, 4640),
        "rest.0": (0, 0, 0),
        "rest.1": (0, 0, 0),
        "rest.2": (1160, 1160, 4640),
        "head": (8, 0, 32),
        "mean": (0, 0, 0),
    }
    # Two operations for each multiplication and addition: 6 images, 36 places, 4 kernels of 9; then the matrix products.
    conv, linear, head = 2 * 6 * 36 * 4 * 9, 2 * 6 * 144 * 8, 2 * 6 * 8
    flops = {layer.name: layer.flops for layer in summary.layers}
    assert flops == {
        "": conv + linear + head,
        "conv": conv,
        "rest": linear,
        "rest.2": linear,
        "head": head,
    } | dict.fromkeys(("norm", "rest.0", "rest.1", "mean"), 0)
    moves = {layer.name: (layer.inputs, layer.outputs) for layer in summary.layers}
    assert moves["conv"] == ([6, 1, 8, 8], [6, 4, 6, 6])
    assert moves["rest"] == ([6, 4, 6, 6], [6, 8])
    assert moves["head"] == ([6, 8], [6, 1])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["name", "type", "params", "trainable", "bytes", "FLOPs", "in", "out"]
    assert [
        "conv",
        "Conv2d",
        "40",
        "all",
        "160",
        "B",
        "15.6",
        "K",
        "[6,",
        "1,",
        "8,",
        "8]",
        "[6,",
        "4,",
        "6,",
        "6]",
    ] in rows
    assert ["head", "Linear", "8", "none", "32", "B", "96", "[6,", "8]", "[6,", "1]"] in rows
    assert " ".join(rows[-2]) == "Net: 1.22 K parameters, 1.21 K trainable, 4.9 KB"
    assert " ".join(rows[-1]) == "29.5 K FLOPs in a forward pass of a batch [6, 1, 8, 8]"


class Texts(Callback):
    takes = frozenset({"text"})

    def __init__(self):
        self.count = 0

    def on_media(self, run, module, kind, name, value, options):
        self.count += 1


def test_the_training_does_not_notice(make_fit):
    """Random numbers, buffers, metrics, counters, a parameter and a batch that the step itself changes, logged values."""
    results = []
    for callbacks in ([], [ModelSummary()]):
        torch.manual_seed(0)
        module, texts = Net(), Texts()
        module.talks = True
        result = make_fit(max_epochs=2, seed=3, callbacks=[texts, *callbacks]).run(module, list(images()))
        assert texts.count == 4
        state = {name: value.clone() for name, value in module.state_dict().items()}
        results.append((module.losses, state, module.calls, module.seen, float(module.mean.compute()), result.metrics))
    plain, summed = results
    assert plain[0] == summed[0]
    assert all(torch.equal(plain[1][name], value) for name, value in summed[1].items())
    assert plain[2:] == summed[2:]
    assert plain[2] == 4


def test_a_resumed_run_is_summed_up_and_the_same(make_fit):
    def run(epochs, **resume):
        torch.manual_seed(0)
        module = Net()
        fit = make_fit(max_epochs=epochs, seed=3, callbacks=[ModelSummary(), Saves()])
        fit.run(module, images(), **resume)
        return module.losses

    whole = run(4)
    run(2)
    assert run(4, resume="last") == whole[4:]


class Saves(ModelSummary):
    """A second callback of this kind, which saves at the end of an epoch and shows the totals only."""

    runs_last = True

    def __init__(self):
        super().__init__(max_depth=0)

    def on_train_epoch_end(self, run, module):
        run.save_checkpoint()


def test_depth(make_fit, scripted, batches, capsys):
    def rows(depth):
        summary = ModelSummary(depth, measure=False)
        make_fit(max_epochs=1, callbacks=[summary]).run(Net(), images())
        return [layer.name for layer in summary.layers][1:]

    assert rows(0) == []
    assert "Net: 1.22 K parameters" in capsys.readouterr().out.splitlines()[0]
    assert rows(1) == ["conv", "norm", "rest", "head", "mean"]
    assert rows(-1) == rows(2) == ["conv", "norm", "rest", "rest.0", "rest.1", "rest.2", "head", "mean"]
    for wrong in (-2, 1.0, True):
        with pytest.raises(ValueError, match="all levels"):
            ModelSummary(wrong)


def test_where_nothing_is_measured_the_reason_is_given(make_fit, capsys):
    class Manual(Net):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.rand(4, 1, 8, 8))

    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if not self.calls:
                self.calls += 1
                raise RuntimeError("as planned")
            return super().training_step(batch, batch_idx)

    make_fit(max_epochs=1, callbacks=[ModelSummary()]).run(Manual(), images())
    make_fit(max_epochs=1, callbacks=[ModelSummary()]).run(Net(), DataLoader(Stream(), batch_size=2))
    with pytest.raises(RuntimeError, match="as planned"):
        make_fit(max_epochs=1, callbacks=[ModelSummary()]).run(Fails(), images())
    notes = [line for line in capsys.readouterr().out.splitlines() if "not measured" in line]
    assert [note.partition(": ")[2] for note in notes] == [
        "training_step would train, with automatic_optimization=False",
        "a stream's batches cannot be read ahead of the training",
        "RuntimeError: as planned",
    ]


def test_numbers_as_text():
    assert [quantity(n) for n in (0, 999, 1234, 999_999, 7_000_000_000)] == ["0", "999", "1.23 K", "1 M", "7 G"]
    assert [size(n) for n in (12, 4_940_000)] == ["12 B", "4.94 MB"]


TWO_RANKS = """
import sys, io, contextlib, torch
from callbacks import ModelSummary
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, bias=False)
        self.outer = torch.nn.Linear(8, 4, bias=False)

    def training_step(self, batch, batch_idx):
        return self.outer(torch.nn.functional.dropout(self.inner(batch))).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

weights = []
for callbacks in ([], [ModelSummary()]):
    torch.manual_seed(0)
    module, out = Net(), io.StringIO()
    fit = Fit(strategy="fsdp", accelerator="cpu", max_epochs=2, seed=1, root_dir=sys.argv[1], callbacks=callbacks)
    with contextlib.redirect_stdout(out):
        fit.run(module, torch.utils.data.DataLoader(torch.arange(64.0).view(8, 8) / 64, batch_size=2))
    weights.append(fit.state_dict(module, everywhere=True))
layers = callbacks[0].layers
report({
    "same": all(torch.equal(weights[0][name], value) for name, value in weights[1].items()),
    "held": layers[0].held, "bytes": layers[0].bytes, "flops": [layer.flops for layer in layers], "text": out.getvalue(),
})
"""


def test_two_ranks(tmp_path):
    """Under FSDP a rank holds half of it; the collectives of a sharded model are matched, and the weights end up the same."""
    first, second = (rank.value for rank in run_ranks(TWO_RANKS, 2, tmp_path))
    for rank in (first, second):
        assert rank["same"]
        assert (rank["bytes"], rank["held"]) == (4 * (64 + 32), 4 * (64 + 32) / 2)
        assert rank["flops"] == [2 * 2 * (64 + 32), 2 * 2 * 64, 2 * 2 * 32]
    assert "rank 0 of 2 holds 192 B" in first["text"]
    assert not second["text"]
