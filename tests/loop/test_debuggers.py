"""``Fit`` under what watches each call or line: a profiler, a debugger that keeps a breakpoint, a coverage measurement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import clean_environment, run_ranks

TOOLS = """
import cProfile, io, pdb, sys
import coverage, torch
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()  # stop here
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

def run():
    net = Net()
    fit = Fit(accelerator="cpu", root_dir=sys.argv[1], max_epochs=1)
    step = fit.run(net, torch.utils.data.DataLoader(torch.ones(8, 1), 2)).step
    return [step, net.w.item()]

found = {}
profile = cProfile.Profile()
found["cProfile"] = profile.runcall(run)
debugger = pdb.Pdb(stdin=io.StringIO("c\\n" * 99), stdout=io.StringIO(), nosigint=True, readrc=False)
line = next(i for i, text in enumerate(open(__file__), 1) if "# stop here" in text)
assert debugger.set_break(__file__, line) is None
found["pdb"] = debugger.runcall(run)
found["stops"] = debugger.get_breaks(__file__, line)[0].hits
sys.settrace(None)
measured = coverage.Coverage(data_file=None, include=[__file__])
measured.start()
found["coverage"] = run()
measured.stop()
found["covered"] = line in measured.get_data().lines(__file__)
report(found)
"""


def test_one_process_trains_under_each(tmp_path: Path) -> None:
    (ran,) = run_ranks(TOOLS, 1, tmp_path)
    assert ran.value == {"cProfile": [4, -4.0], "pdb": [4, -4.0], "stops": 4, "coverage": [4, -4.0], "covered": True}


def test_two_processes_train_under_each(tmp_path: Path) -> None:
    for ran in run_ranks(TOOLS, 2, tmp_path):
        assert ran.value == {
            "cProfile": [2, -2.0],
            "pdb": [2, -2.0],
            "stops": 2,
            "coverage": [2, -2.0],
            "covered": True,
        }


BREAKPOINT = """
import os, sys
import torch
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch, batch_idx):
        breakpoint()
        return (self.w * batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

net = Net()
fit = Fit(accelerator="cpu", devices=2, root_dir=sys.argv[1], max_epochs=1)
step = fit.run(net, torch.utils.data.DataLoader(torch.ones(8, 1), 2)).step
# One write: the other rank writes to the same pipe.
print(f"trained {sys.argv[1:]} {step} {net.w.item()} {'pdb' in str(sys.orig_argv)}", flush=True)
"""


@pytest.mark.slow
def test_a_breakpoint_stops_rank_0_alone(tmp_path: Path) -> None:
    """``python -m pdb script.py`` and ``breakpoint()`` with ranks that ``Fit`` starts: the debugger and the terminal are rank 0's."""
    script = tmp_path / "script.py"
    script.write_text(BREAKPOINT)
    ran = subprocess.run(
        [sys.executable, "-m", "pdb", "-c", "continue", str(script), str(tmp_path)],
        input="p ('held at', batch_idx)\nc\n" * 2 + "q\n",
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    arguments = [str(tmp_path)]
    assert f"trained {arguments} 2 -2.0 True" in ran.stdout, ran.stdout + ran.stderr
    assert f"trained {arguments} 2 -2.0 False" in ran.stdout
    assert ran.stdout.count("('held at', ") == 2
    assert ran.stderr.count("rank 1 does not stop at breakpoint() in ") == 1
    assert "Error" not in ran.stdout + ran.stderr
