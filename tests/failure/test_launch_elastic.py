"""Jobs of ``fit launch`` that lose machines, or get more, continue from the last checkpoint: the same global batches and losses.

That a lost rank changes no bit is tested by ``test_campaign.py``.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from job import read_diary
from support.commands import Launched, alive, free_port
from test_elastic import check, phase, steps_of

HERE = Path(__file__).parent

# Diaries are numbered by the order of the attempts, which here follows from the number of ranks.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import job
from engine import Callback

root, settings, numbers, pause = Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]), json.loads(sys.argv[5])
rank, world = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]

class Slow(Callback):
    def __init__(self, step): pass
    def on_train_batch_start(self, run, module, batch, batch_idx):
        time.sleep(pause.get(world, 0.0))

job.Die = Slow
diary = root / f"diary{numbers[world]}.{rank}"
(root / f"pid.{rank}").write_text(str(os.getpid()))
metrics = job.train(root, diary, workers=0, batch_size=2, **settings)
if rank == 0:
    (root / "metrics.json").write_text(json.dumps(metrics))
"""


def arguments(
    place: Path,
    root: Path,
    settings: dict[str, object],
    numbers: dict[int, int],
    pause: Mapping[int, float] = MappingProxyType({}),
) -> list[object]:
    """``pause``: by the number of ranks, how long (s) each waits before a step."""
    script = place / "train.py"
    script.write_text(SCRIPT)
    root.mkdir(exist_ok=True)
    return [script, HERE, root, json.dumps(settings), json.dumps(numbers), json.dumps(dict(pause))]


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def lines(root: Path, diary: str) -> int:
    return len(read_diary(root / diary))


TWO = ("--nnodes", "1:2", "--nproc", 1, "--dead-after", 5, "--join-wait", 2)
SAME = {"dropout": 0.0, "global_batch_size": 24}


@pytest.mark.slow
def test_a_lost_machine_shrinks_the_world(tmp_path: Path) -> None:
    root = tmp_path / "job"
    port = free_port()
    options = (
        *TWO,
        "--rdzv",
        f"127.0.0.1:{port}",
        *arguments(tmp_path, root, SAME, {2: 1, 1: 2}, pause={1: 0.05, 2: 0.05}),
    )
    with Launched(tmp_path, *options, name="first") as first:
        first.until(lambda: answers(port))  # it serves the rendezvous
        with Launched(tmp_path, *options, name="second") as second:
            second.until(lambda: lines(root, "diary1.1") >= 4)
            ranks = [int((root / f"pid.{rank}").read_text()) for rank in range(2)]
            mine = Path(f"/proc/{second.process.pid}/task/{second.process.pid}/children").read_text().split()
            second.process.kill()
            begun = time.monotonic()
            second.wait()
        first.until(lambda: lines(root, "diary2.0") >= 1)
        print(f"{time.monotonic() - begun:.2f} s from the kill of the agent to the next step")
        assert [pid for pid in ranks if str(pid) in mine]
        assert not any(alive(int(pid)) for pid in mine)
        assert first.wait() == 0, first.text
    assert steps_of(root)
    verify(tmp_path, root)


@pytest.mark.slow
def test_a_machine_that_joins_grows_the_world(tmp_path: Path) -> None:
    root = tmp_path / "job"
    options = (
        *TWO,
        "--rdzv",
        f"127.0.0.1:{free_port()}",
        *arguments(tmp_path, root, SAME, {1: 1, 2: 2}, pause={1: 3.0}),
    )
    with Launched(tmp_path, *options, name="first") as first:
        first.until(lambda: lines(root, "diary1.0") >= 1)
        with Launched(tmp_path, *options, name="second") as second:
            assert second.wait() == 0, first.text + second.text
        assert first.wait() == 0, first.text
    # The one that was there finished its step and saved: no step was done twice.
    done = [[line["step"] for line in read_diary(path)] for path in (root / "diary1.0", root / "diary2.1")]
    assert done[0] + done[1] == list(range(1, 13))
    assert len(done[1]) >= 1
    verify(tmp_path, root)


@pytest.mark.slow
def test_a_machine_that_is_drained_saves_and_the_other_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "job"
    port = free_port()
    options = (
        *TWO,
        *("--join-wait", 15),  # the second machine starts within, on a machine that does much else
        "--rdzv",
        f"127.0.0.1:{port}",
        *arguments(tmp_path, root, SAME, {2: 1, 1: 2}, pause={1: 0.05, 2: 0.05}),
    )
    with Launched(tmp_path, *options, name="first") as first:
        first.until(lambda: answers(port))
        with Launched(tmp_path, *options, name="second") as second:
            second.until(lambda: lines(root, "diary1.1") >= 3)
            second.process.terminate()
            assert second.wait() == 143, second.text
        assert first.wait() == 0, first.text
    done = [[line["step"] for line in read_diary(path)] for path in (root / "diary1.0", root / "diary2.0")]
    assert done[0] + done[1] == list(range(1, 13))
    verify(tmp_path, root)


def verify(tmp_path: Path, root: Path) -> None:
    """Global batches and losses of every step, and the last metrics, equal those of one process that nobody disturbs."""
    alone = tmp_path / "alone"
    alone.mkdir()
    metrics = phase(alone, 0, 1, "single", -1)
    check(root, json.loads((root / "metrics.json").read_text()), (steps_of(alone), metrics))
