import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ranks import PATIENCE_S, clean_environment, run_script
from support.threads import fails, failure_of

from engine.distributed import failures
from engine.launch import script_ranks
from engine.launch.supervisor import CommandRank
from engine.utils.errors import RankError

# What Fit does around a run, and a fault on one rank: the script's first argument names it.
SCRIPT = """
import contextlib, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from engine.distributed import collectives as c, environments, failures, join
from engine.launch import script_ranks
from engine.utils.errors import RankError

case, place = sys.argv[1], Path(sys.argv[2])
ranks = 3 if case in ("ok", "kill", "early", "python", "native", "stubborn", "gone") else 2
env = environments.detect(os.environ)
failures.attach(env)
(place / f"pid{env.rank}").write_text(str(os.getpid()))
if case == "before" and env.rank == 1:
    raise ValueError("before the run")
variables = dict(os.environ)
started = script_ranks.start(ranks) if env.world_size == 1 else None
if started:
    env = started.job.environment
    assert script_ranks.start(ranks) is started is script_ranks.current()
    assert dict(os.environ) == variables

def training():
    return started.training() if started else contextlib.nullcontext()

def run(case):
    store, check = (started.job.store, started.check) if started else (None, None)
    with training():
        g = join.join(env, torch.device("cpu"), timeout=timedelta(minutes=5), store=store, check=check)
        (place / f"joined{g.rank}").write_text(str(c.gather_object(g, (os.getpid(), os.getppid(), sys.argv, os.getcwd()))))
        if case == "raise" and g.rank == 1:
            raise ValueError("boom on rank 1")
        if case == "kill" and g.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "early" and g.rank == 2:
            os._exit(0)
        if case in ("python", "native", "stubborn") and g.rank == 2:
            raise ValueError("boom on rank 2")
        if case == "stubborn" and g.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        while case == "python" and g.rank == 0:
            time.sleep(0.01)
        if case == "native" and g.rank == 0:
            time.sleep(600)
        if case == "own" and g.rank == 0:
            raise KeyError("rank 0's own")
        if case == "all":
            raise KeyError("the same on all")
        if case == "interrupt":
            try:
                (place / f"ready{g.rank}").touch()
                time.sleep(300)
            except KeyboardInterrupt:
                time.sleep(1)
                (place / f"saved{g.rank}").touch()
                raise
        if case == "orphan":
            (place / f"ready{g.rank}").touch()
            time.sleep(600)
        g.barrier()

if case == "caught":
    try:
        run("raise")
    except RankError as error:
        (place / "caught").write_text(str(error))
else:
    run(case)
if case == "ok":
    run(case)
if case == "after" and env.rank == 1:
    time.sleep(1)
    raise ValueError("after the run")
if case == "gone":
    if env.rank == 1:
        sys.exit()
    time.sleep(3)
    run(case)
if started:
    (place / "end").touch()
"""


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(condition, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture
def run(tmp_path):
    def run(case, **options):
        ran = run_script(SCRIPT, case, tmp_path, check=False, env={"TMPDIR": str(tmp_path)}, forked=True, **options)
        assert not any(
            alive((tmp_path / f"pid{rank}").read_text()) for rank in (1, 2) if (tmp_path / f"pid{rank}").exists()
        )
        assert not list(tmp_path.glob("fit-ranks-*"))
        return ran

    return run


def test_the_other_ranks_repeat_the_command_line(run, tmp_path):
    ran = run("ok")
    assert (ran.returncode, ran.stderr) == (0, "")
    seen = [eval((tmp_path / f"joined{rank}").read_text()) for rank in range(3)]
    assert seen[0] == seen[1] == seen[2]
    pids, parents, arguments, places = zip(*seen[0], strict=True)
    assert parents[1:] == (pids[0], pids[0])
    assert len(set(pids)) == 3
    assert arguments[0] == arguments[1] == arguments[2]
    assert len(set(places)) == 1
    assert (tmp_path / "end").exists()


@pytest.mark.parametrize(
    ("case", "said", "limit_s"),
    [
        (
            "before",
            "RankError: rank 1 failed with exit code 1. Its traceback:\n\nTraceback|ValueError: before the run",
            20,
        ),
        (
            "raise",
            "RankError: rank 1 failed with exit code 1. Its traceback:\n\nTraceback|ValueError: boom on rank 1",
            20,
        ),
        ("kill", "RankError: rank 2 was killed by SIGKILL (the system may have run out of memory)", 20),
        ("early", "RankError: rank 2 ended early (exit code 0) while others still needed it", 20),
        pytest.param(
            "python",
            "RankError: rank 2 failed with exit code 1. Its traceback:\n\nTraceback|ValueError: boom on rank 2",
            20,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "native",
            "RankError: rank 2 failed with exit code 1. Its traceback:\n\nTraceback|rank 0 did not react within 5 s",
            25,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "stubborn",
            "RankError: rank 2 failed with exit code 1. Its traceback:\n\nTraceback",
            25,
            marks=pytest.mark.slow,
        ),
        pytest.param("gone", "RankError: rank 1 ended early (exit code 0)", 25, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_a_rank_that_dies_ends_all_with_the_first_traceback(run, tmp_path, case, said, limit_s):
    ran = run(case)
    assert ran.returncode == 1
    # torch marks each line that rank 0 prints once the group is there.
    text = ran.stderr.replace("[rank0]: ", "")
    assert all(part in text for part in said.split("|")), ran.stderr
    assert text.count("Traceback") <= 1  # of the first alone
    assert ran.seconds < 5 * limit_s  # on a machine that is idle, limit_s
    assert not (tmp_path / "end").exists()


def test_rank_0s_own_error_stays_as_it_is(run):
    ran = run("own")
    assert ran.returncode == 1
    assert 'KeyError: "rank 0\'s own"' in ran.stderr
    assert "RankError" not in ran.stderr


def test_an_error_of_all_ranks_is_rank_0s_own(run):
    ran = run("all")
    assert ran.returncode == 1
    assert ran.stderr.count("[rank0]: KeyError: 'the same on all'") == ran.stderr.count("Traceback") == 1
    assert ran.stderr.rstrip().endswith("rank 1: KeyError: 'the same on all'")
    assert "terminate called" not in ran.stderr


def test_a_rank_that_fails_after_the_run_gives_rank_0_an_exit_code(run, tmp_path):
    ran = run("after")
    assert (tmp_path / "end").exists()
    assert ran.returncode == 1
    assert "RankError: rank 1 failed with exit code 1. Its traceback:" in ran.stderr
    assert ran.stderr.rstrip().endswith("ValueError: after the run")


def test_a_failure_that_was_caught_is_dealt_with(run, tmp_path):
    ran = run("caught")
    assert "boom on rank 1" in (tmp_path / "caught").read_text()
    assert ran.returncode == 0
    assert (tmp_path / "end").exists()


@pytest.fixture
def launched(tmp_path):
    def launch(case):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        command = [sys.executable, str(script), case, str(tmp_path)]
        process = subprocess.Popen(
            command, env=clean_environment(), start_new_session=True, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), PATIENCE_S)
        return process

    processes: list[subprocess.Popen[str]] = []
    yield launch
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.communicate()


def test_when_rank_0_is_killed_the_others_end(launched, tmp_path):
    launched("orphan").kill()
    assert until(lambda: not alive((tmp_path / "pid1").read_text()), PATIENCE_S)


def test_ctrl_c_leaves_the_others_time_to_save(launched, tmp_path):
    process = launched("interrupt")
    os.killpg(process.pid, 2)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == -2
    assert "KeyboardInterrupt" in errors
    assert "RankError" not in errors
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))
    assert not alive((tmp_path / "pid1").read_text())


ENDS = """
import atexit, os, sys
from pathlib import Path
place, status = Path(sys.argv[1]), int(sys.argv[2])
rank = os.environ.get("RANK", "0")
atexit.register(lambda: (place / f"before {rank}").touch())
from engine.distributed import environments, failures
from engine.launch import script_ranks

class Cycle:
    def __init__(self, file):
        self.itself, self.file = self, file

    def __del__(self, create=os.open, path=str(place / "collected"), flags=os.O_CREAT | os.O_WRONLY):
        create(path, flags)

env = environments.detect(os.environ)
failures.attach(env)
atexit.register(lambda: (place / f"after {rank}").touch())
if env.world_size == 1:
    script_ranks.start(2)
else:
    plain, cycle = open(place / "plain", "w"), Cycle(open(place / "cycle", "w"))
    plain.write("text")
    cycle.file.write("text")
    sys.exit(status)
"""


@pytest.mark.parametrize("status", [0, 3])
def test_another_rank_ends_without_collecting_garbage_and_loses_nothing(tmp_path, status):
    ran = run_script(ENDS, tmp_path, status, check=False, forked=True)
    assert ran.returncode == (1 if status else 0)
    assert ("rank 1 failed with exit code 3" in ran.stderr) == bool(status)
    left = {path.name: path.read_text() for path in tmp_path.iterdir() if not path.name.endswith(" 0")}
    assert left == {"before 1": "", "after 1": "", "plain": "text", "cycle": "text"}


WORKER = """
import multiprocessing
from engine.launch import script_ranks
worker = multiprocessing.get_context("fork").Process(target=script_ranks.start, args=(2,))
worker.start()
worker.join()
"""
START = "from engine.launch import script_ranks\nscript_ranks.start(2)\n"
WHERE = """
import os, sys
from engine.distributed import environments
from engine.launch import script_ranks
if environments.detect(os.environ).world_size == 1:
    os.chdir("/")
    script_ranks.start(2)
else:
    print(os.getcwd(), sys.argv)
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["-c", WHERE, "x", "a b"], marks=pytest.mark.slow, id="-c"),
        pytest.param(["sub/../script.py", "x", "a b"], id="script"),
        pytest.param(["-m", "script", "x", "a b"], marks=pytest.mark.slow, id="-m"),
    ],
)
def test_scripts_modules_and_commands_are_repeated(tmp_path, how):
    (tmp_path / "sub").mkdir()
    (tmp_path / "script.py").write_text(WHERE if how[0] != "-m" else WHERE.replace("os.chdir", "str"))
    if how[0] == "-c":
        how = ["-c", WHERE.replace("os.chdir", "str"), *how[2:]]
    ran = subprocess.run(
        [sys.executable, *how], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=300
    )
    words = [
        line for line in ran.stderr.splitlines() if not line.startswith("rank 0 is done and waits")
    ]  # on a slow machine
    assert (ran.returncode, words) == (0, [])
    where, _, arguments = ran.stdout.partition(" ")
    assert where == str(tmp_path)
    assert eval(arguments)[1:] == ["x", "a b"]


@pytest.mark.parametrize(
    ("command", "given", "reason"),
    [
        pytest.param(["-"], START, "the script was read from standard input", marks=pytest.mark.slow, id="-"),
        pytest.param([], START, "the script was read from standard input", id="stdin"),
        pytest.param(["-i", "-c", START], "exit(1)", "interactive interpreter", marks=pytest.mark.slow, id="-i"),
        pytest.param(
            ["-c", "import sys; sys.modules['ipykernel'] = sys\n" + START], "", "Jupyter kernel", id="jupyter"
        ),
        pytest.param(["-c", WORKER], "", "worker of the multiprocessing module", id="worker"),
    ],
)
def test_what_cannot_be_repeated_is_refused(command, given, reason):
    ran = subprocess.run(
        [sys.executable, *command], input=given, env=clean_environment(), capture_output=True, text=True, timeout=300
    )
    assert reason in ran.stderr
    assert "torchrun --nproc-per-node 2 script.py" in ran.stderr


def test_pytest_is_refused():
    with pytest.raises(RuntimeError, match="it is a pytest session"):
        script_ranks.start(2)


def test_one_rank_needs_no_others():
    with pytest.raises(ValueError, match="world_size=1"):
        script_ranks.start(1)


def test_another_number_of_ranks_is_refused():
    script = WHERE.replace('os.chdir("/")', "") + "\nif script_ranks.current():\n    script_ranks.start(3)\n"
    ran = run_script(script, check=False, forked=True)
    assert ran.returncode == 1
    assert "3 ranks were requested, but this process has started 2" in ran.stderr


ONE_THEN_TWO = """
import sys
import torch
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

def run(devices):
    Fit(accelerator="cpu", devices=devices, root_dir=sys.argv[1], max_epochs=1).run(Net(), [torch.ones(2, 1)])

for devices in sys.argv[2:]:
    run(int(devices))
"""


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ((1, 2), "2 processes were requested, but an earlier Fit or Engine of this script has run in one process"),
        ((2, 1), "1 ranks were requested, but this process has started 2 before"),
    ],
)
def test_runs_of_one_script_need_the_same_number_of_ranks(tmp_path, devices, said):
    """The ranks that are started repeat the script: without an end the second run of one would wait for the first of another."""
    ran = run_script(ONE_THEN_TWO, tmp_path, *devices, check=False, forked=True)
    assert ran.returncode == 1
    assert said in ran.stderr


def test_threads_are_shared_out():
    script = """
import os, torch
from engine.distributed import environments
from engine.launch import script_ranks
cores = len(os.sched_getaffinity(0))
if environments.detect(os.environ).world_size == 1:
    script_ranks.start(2)
print(torch.get_num_threads() == max(1, cores // 2))
"""
    environ = clean_environment()
    del environ["OMP_NUM_THREADS"]
    ran = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "True\nTrue\n"), ran.stderr


@pytest.mark.parametrize(
    ("given", "script", "expected"),
    [
        ("train.py --lr 1", "train.py --lr 1", "train.py --lr 1"),
        ("-X dev -m train --lr 1", "/w/train.py --lr 1", "-X dev -m train --lr 1"),
        ("-m pdb train.py --lr 1", "train.py --lr 1", "train.py --lr 1"),
        ("-mpdb train.py", "train.py", "train.py"),
        ("-W error -m pdb -c continue -c q train.py --lr 1", "train.py --lr 1", "-W error train.py --lr 1"),
        ("-m pdb -m package.train --lr 1", "package.train --lr 1", "-m package.train --lr 1"),
        ("-m cProfile -o out -m train", "train", "-m train"),
        ("/bin/coverage run --data-file=x train.py -m", "train.py -m", "train.py -m"),
        ("/bin/coverage run -m package.train", "/w/package/train.py", "-m package.train"),
        ("-m trace --count --module train", "/w/train.py", "-m train"),
        ("/code/debugpy/launcher/../../debugpy --connect 1 --configure-qt none train.py a", "train.py a", "train.py a"),
        (
            "profile.py --lr 1",
            "profile.py",
            "profile.py --lr 1",
        ),  # a script of that name, which has changed its arguments
        ("/bin/mytool train.py", "train.py", "/bin/mytool train.py"),  # whatever it does is done by all ranks
        ("-m pdb train.py --lr 1", "train.py", None),
        ("-m pdb train.py --lr 1", "other.py --lr 1", None),
    ],
)
def test_a_tool_is_left_out(given: str, script: str, expected: str | None) -> None:
    assert script_ranks.without_tool(given.split(), script.split()) == (
        expected.split() if expected is not None else None
    )


def test_an_error_in_the_thread_that_ends_ranks_is_reported(tmp_path, monkeypatch, caplog):
    def note_failure(ranks):
        ranks._failed.set()
        ranks._interrupt.forbid()  # as if rank 0 had reacted already

    monkeypatch.setattr(script_ranks.ScriptRanks, "_await_failure", note_failure)
    monkeypatch.setattr(script_ranks.Supervisor, "end", fails)
    script_ranks.ScriptRanks(None, [], tmp_path)
    told = failure_of(caplog, "fit-ranks", "fit-terminate")
    assert told.endswith("has failed with Planted: on purpose; the other ranks may have to be ended by hand")


def test_rank_0_waits_for_a_rank_that_ends_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(script_ranks, "CAUSE_S", 0.0)
    with subprocess.Popen(["sh", "-c", "sleep 0.5; exit 1"]) as process:
        rank = CommandRank(1, 1, process, tmp_path / "1.json")
        failures.record(ValueError("the cause"), rank.error_file)
        ranks = script_ranks.ScriptRanks(None, [rank], tmp_path)
        with pytest.raises(RankError, match=r"rank 1 failed with exit code 1\.[\s\S]*ValueError: the cause"):
            ranks.fail(RuntimeError("[gloo/pair.cc:553] Connection closed by peer"))
        for thread in ranks._threads:
            thread.join(PATIENCE_S)
