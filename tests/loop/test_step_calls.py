"""How many calls a step makes: the goals of ``tests/benchmarks/calls.py``, which every machine counts alike; and how many collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.ranks import ranks_of_file, run_ranks, run_script
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from engine import Callback, Fit, TrainModule
from engine.distributed import agreement

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "calls.py"


MISSED = """
import json, logging, sys, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import calls
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
found = calls.count_all(calls.LOCAL_CASES, 100, False) | json.loads(Path(sys.argv[2]).read_text())
page = calls.README.read_text()
free = calls.TABLE.sub(lambda table: table[0].replace("+", "+1,000"), page)
tight = calls.TABLE.sub(lambda table: table[0].replace("+", "+0."), page)
above = [calls.above(found, text) for text in (page, free, tight)]
report([sorted(found), calls.missed(found), *above[:2], [line.partition(":")[0] for line in above[2]]])
"""


def test_a_step_makes_no_more_calls_than_promised(tmp_path: Path) -> None:
    """Neither more than the goals allow, nor than the table in ``engine/README.md`` says. Fewer calls are no problem."""
    two = tmp_path / "two.json"
    run_ranks(BENCHMARK, 2, "--no-peers", "--steps=100", f"--worker={two}")
    counted, missed, above, above_a_loose_table, above_a_tight_table = run_script(
        MISSED, BENCHMARK.parent, two, forked=True
    ).value
    local = ["DataLoader", "accumulate 4", "bf16", "one log", "plain", "ten callbacks", "twenty logs"]
    assert counted == ["DDP tiny", *local]
    assert missed == []
    assert above == [], "python tests/benchmarks/calls.py --write writes the table"
    assert above_a_loose_table == []
    by_engine = {"DDP tiny", *local} - {"one log", "twenty logs", "ten callbacks"}
    ours = [f"{case}, Fit" for case in ["DDP tiny", *local]] + [f"{case}, Engine" for case in by_engine]
    assert sorted(above_a_tight_table) == sorted(ours)


class Logs(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Profiled(Callback):
    """Counts gloo's collectives from the start of batch 20 to the start of batch 60."""

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 20:
            self.profile = profile(activities=[ProfilerActivity.CPU], acc_events=True)
            self.profile.start()
        if batch_idx == 60:
            self.profile.stop()
            self.counts = {event.key: event.count for event in self.profile.key_averages() if "gloo:" in event.key}


def rank_counts() -> dict[str, int]:
    agreement.PERIOD_S = 1e6  # as if steps were fast, whatever else this machine does
    counter = Profiled()
    data = [torch.full((2, 4), float(i)) for i in range(140)]
    fit = Fit(strategy="ddp", accelerator="cpu", max_epochs=1, log_every_n_steps=10, callbacks=[counter])
    fit.run(Logs(), data)
    return counter.counts


def test_two_ranks_reduce_gradients_and_little_else() -> None:
    for counts in ranks_of_file(__file__, 2)["counts"]:
        assert counts.pop("gloo:all_gather") == 4  # one at each log boundary: after steps 30, 40, 50 and 60
        # The ranks agree whether to stop; between two checks lie at least 16 steps, as the interval grows fourfold from the first step on.
        assert 40 <= counts.pop("gloo:all_reduce") <= 40 + 3
        assert not counts
