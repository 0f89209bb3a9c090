"""Trainings of a toy for ``figures.py``, in a process of their own: ``python walk.py walk CHECKOUT OUT.json`` and ``python walk.py train``.

``walk`` counts the calls of functions of ``engine`` from ``Fit.run`` to the first ``training_step`` and in one window of four micro-batches,
and notes which classes arrive at which parameter. ``train`` trains, saves and resumes with whatever of the library is importable.
"""

from __future__ import annotations

import collections
import importlib
import itertools
import json
import os
import sys
import tempfile
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

if sys.argv[1] == "walk":
    importlib.import_module("engine.fit")
    CLOSURE = sorted(name for name in sys.modules if name.startswith("engine."))

from callbacks import CSVLogger, EarlyStopping, ModelCheckpoint
from engine import Callback, DataModule, Fit, TrainModule


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Whole(Net):
    """Everything else that a run may do, for the classes of what is passed."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def on_train_start(self) -> None:
        _ = self.trainer, self.optimizers(), self.run.total_steps


class Looks(Callback):
    def on_log(self, run: Any, module: Any, values: Any, step: int) -> None:
        _ = run.metrics, run.progress


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader()


def loader() -> Any:
    """One epoch of 16 batches."""
    return DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=2, shuffle=True)


class Walk:
    """Calls of functions below one folder while it watches, and the classes of their arguments."""

    def __init__(self, package: str) -> None:
        self.package = package + os.sep
        self.calls: list[tuple[str, str]] = []
        """The file and the name of each function that was called."""
        self.classes: dict[tuple[str, int, str, str], set[str]] = collections.defaultdict(set)

    def watch(self, frame: FrameType, event: str, argument: object) -> None:
        """As ``sys.setprofile`` calls it. Comprehensions are left out: they are functions before Python 3.12 only."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.package):
            return
        if code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>"):
            return
        self.calls.append((code.co_filename, code.co_qualname))
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            if name in frame.f_locals and name not in ("self", "cls"):
                cls = type(frame.f_locals[name])
                place = (code.co_filename.removeprefix(self.package), code.co_firstlineno, code.co_qualname, name)
                self.classes[place].add(f"{cls.__module__}.{cls.__qualname__}")

    def __enter__(self) -> Walk:
        sys.setprofile(self.watch)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


class Traced(Net):
    """Notes at each micro-batch how many calls there were; the calls of the step are not counted."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk, self.at, self.frames = [walk], [], 0
        """The walk is in a list: a module takes no other objects apart."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (walk,) = self.walk
        walk.__exit__()
        if not self.at:
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "<module>":
                self.frames += frame.f_code.co_filename.startswith(walk.package)
                frame = frame.f_back
        self.at.append(len(walk.calls))
        loss = super().training_step(batch, batch_idx)
        walk.__enter__()
        return loss


def main(checkout: str, out: str) -> None:
    walk = Walk(os.path.join(checkout, "engine"))
    folder = tempfile.mkdtemp()
    settings = {"accelerator": "cpu", "root_dir": folder}
    fit = Fit(
        **settings,
        max_epochs=1,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=1000,
    )
    module, data = Traced(walk), loader()
    with walk:
        fit.run(module, data)
    first = walk.calls[: module.at[0]]
    files = [file for file, _ in first]
    window = module.at[8] - module.at[4]
    with walk:
        for epochs in (1, 2):
            extensions = [Looks(), CSVLogger(), ModelCheckpoint(), EarlyStopping("val")]
            fit = Fit(
                **{**settings, "root_dir": folder + "/whole"},
                max_epochs=epochs,
                callbacks=extensions,
                log_every_n_steps=2,
            )
            fit.run(Whole(), datamodule=Data(), resume="auto")
        fit.validate(Whole(), loader())
        fit.predict(Whole(), loader())
    counted = {
        "closure": CLOSURE,
        "calls": len(first),
        "files": len(set(files)),
        "switches": sum(one != other for one, other in itertools.pairwise(files)),
        "frames": module.frames,
        "window": window,
        "passed": [[*place, sorted(classes)] for place, classes in walk.classes.items()],
    }
    with open(out, "w") as file:
        json.dump(counted, file)


def train() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for epochs in (1, 2):
            fit = Fit(accelerator="cpu", max_epochs=epochs, root_dir=folder, callbacks=[CSVLogger(), ModelCheckpoint()])
            result = fit.run(Net(), loader(), resume="auto")
    assert result.step == 32, result.step
    print("trained")


if __name__ == "__main__":
    main(*sys.argv[2:]) if sys.argv[1] == "walk" else train()
