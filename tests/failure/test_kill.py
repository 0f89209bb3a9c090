"""A run that is killed several times, some of them inside a save, ends with the very bits of one that is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from job import read_diary
from safetensors.torch import load_file
from support.checkpoints import read
from support.ranks import clean_environment

# One process imports everything and forks the runs: a start takes milliseconds, so that a kill takes little time.
SCRIPT = """
import json, os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from job import read_diary, train

root, kills, chance = Path(sys.argv[1]), int(sys.argv[3]), random.Random(int(sys.argv[4]))

def start(place):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            metrics = train(place, place / "diary.jsonl")
            (place / "metrics.json").write_text(json.dumps(metrics))
            code = 0
        finally:
            os._exit(code)
    return child

(root / "whole").mkdir()
assert os.waitpid(start(root / "whole"), 0)[1] == 0
place = root / "killed"
place.mkdir()
inside = killed = 0

def drafts():
    return list((place / "checkpoints").glob(".*.partial"))

def lasts(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

def comes(child, event, pause=0.0):
    while not event() and lasts(child):
        time.sleep(pause)

def lines():
    return len(read_diary(place / "diary.jsonl"))

for number in range(kills):
    child = start(place)
    if number % 2:  # inside a save: a draft is there
        for _ in range(chance.randrange(4)):
            comes(child, drafts)
            comes(child, lambda: not drafts())
        comes(child, drafts)
    else:  # after so many steps, or while it starts
        steps = lines() + chance.randrange(3)
        comes(child, lambda: lines() >= steps, 0.002)
        time.sleep(chance.uniform(0.0, 0.02))
    inside += bool(drafts())
    os.kill(child, signal.SIGKILL)
    if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        break  # it came to its end before
    killed += 1
before = lines()
assert os.waitpid(start(place), 0)[1] == 0
print(json.dumps({"inside": inside, "killed": killed, "steps": lines() - before}))
"""


def test_kills_change_nothing(tmp_path: Path) -> None:
    kills = 4
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent), str(kills), "1"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["killed"] >= kills - 2, report  # on a busy machine a run may be over before the last ones
    assert report["inside"] >= kills // 4, report
    whole, killed = (read_diary(tmp_path / name / "diary.jsonl") for name in ("whole", "killed"))
    expected = {line["step"]: line for line in whole}
    assert len(expected) == len(whole)
    assert sorted(i for line in whole if line["epoch"] == 0 for i in line["ids"]) == list(range(61))
    assert {line["step"] for line in killed} >= set(expected)
    for line in killed:
        assert line == expected[line["step"]]
    one, other = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "killed"))
    if report["steps"]:  # a run that has nothing left to train has no metrics of its last step
        assert one == other
    last = max(os.listdir(tmp_path / "whole" / "checkpoints"))
    files = (
        load_file(tmp_path / name / "checkpoints" / last / "rank=00000.safetensors") for name in ("whole", "killed")
    )
    one, other = ({key: value for key, value in file.items() if not key.startswith("state/")} for file in files)
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.equal(other[key]), key
    states = [read(tmp_path / name / "checkpoints" / last).shared for name in ("whole", "killed")]
    assert states[0]["state"] == states[1]["state"]
    assert states[0]["metrics"] == states[1]["metrics"]
    assert states[0]["schedulers"] == states[1]["schedulers"]
