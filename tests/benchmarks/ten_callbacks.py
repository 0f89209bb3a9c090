"""What ten callbacks add to a step of ``Fit``: a bar, loggers, a checkpoint callback and monitors, on one CPU thread.

    python tests/benchmarks/ten_callbacks.py [--rounds 15] [--steps 1000]

Runs with none, with all ten, and with each alone take turns; ``measure.interleave`` says how start-up is subtracted. Processor time is counted,
so the loggers' threads are in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable
from statistics import median

from cases import Case, Contender, Work
from measure import Watch, interleave
from ours import Logged
from torch import nn

from callbacks import (
    CSVLogger,
    DeviceStatsMonitor,
    EarlyStopping,
    JSONLLogger,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StragglerMonitor,
    TensorBoardLogger,
    ThroughputMonitor,
)
from engine import Callback, Fit

TEN: tuple[Callable[[], Callback], ...] = (
    RichProgressBar,
    CSVLogger,
    JSONLLogger,
    TensorBoardLogger,
    lambda: ModelCheckpoint(every="10000 steps", save_last=False),
    LearningRateMonitor,
    ThroughputMonitor,
    DeviceStatsMonitor,
    StragglerMonitor,
    lambda: EarlyStopping("loss 0", patience=10**9),
)


def contender(name: str, makers: tuple[Callable[[], Callback], ...]) -> Contender:
    def train(work: Work) -> nn.Module:
        net = work.build()
        with tempfile.TemporaryDirectory() as root, open(os.devnull, "w") as nowhere:  # noqa: SIM117
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                fit = Fit(
                    accelerator="cpu",
                    devices=1,
                    max_steps=work.steps,
                    val_every=None,
                    callbacks=[make() for make in makers],
                    root_dir=root,
                )
                fit.run(Logged(net, 1), work.data)
        return net

    return Contender(name, "ours", train, logs=True, callbacks=True)


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--rounds", type=int, default=15)
    top.add_argument("--steps", type=int, default=1000)
    top.add_argument("--each", action="store_true", help="measure each callback alone, too")
    arguments = top.parse_args()
    contenders = [contender("none", ()), contender("none again", ()), contender("all ten", TEN)]
    if arguments.each:
        contenders += [contender(type(make()).__name__, (make,)) for make in TEN]
    case = Case("one log", logs=1)
    for each in contenders:
        each.train(case.work(20))
    found = interleave(case, contenders, arguments.rounds, arguments.steps, Watch())
    base = found.pop("none")
    print(f"{'none':20s} {median(base.steps_us()):8.1f} us a step")
    for name, times in found.items():
        over = median(each - own for each, own in zip(times.steps_us(), base.steps_us(), strict=True))
        fastest = times.fastest_us() - base.fastest_us()
        print(f"{name:20s} {over:+7.1f} us a step over none (median of the rounds), {fastest:+7.1f} (fastest runs)")


if __name__ == "__main__":
    main()
