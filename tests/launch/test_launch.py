"""``fit launch`` on one machine: what it prints and keeps, how it ends, and that nobody outlives it. Real agents and ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.commands import COMMAND, Launched, alive, free_port, pids
from support.ranks import PATIENCE_S, clean_environment
from torch.distributed.elastic.agent.server import local_elastic_agent


def script(place: Path, text: str, name: str = "script.py") -> Path:
    path = place / name
    path.write_text("import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text))
    return path


PID = "open(f'pid.{rank}.new', 'w').write(str(os.getpid())); os.rename(f'pid.{rank}.new', f'pid.{rank}')\n"


def test_output_files_and_environment(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("seed: 12\n")
    path = script(
        tmp_path,
        """
        print("out", rank, sys.argv[1:])
        print("err", rank, file=sys.stderr)
        sys.stdout.write("half\\rwhole\\nno newline")
        print(sorted(f"{k}={v}" for k, v in os.environ.items() if k in ("FIT_CONFIG", "OMP_NUM_THREADS", "WORLD_SIZE")), file=sys.stderr)
        """,
    )
    env = clean_environment()
    del env["OMP_NUM_THREADS"]
    command = [
        *COMMAND,
        "--nproc",
        "2",
        "--config",
        "settings.yaml",
        "--show",
        "0,1",
        path.name,
        "$$x",
        "--nproc",
        "-m",
    ]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[rank {rank}] ")] == [
            f"[rank {rank}] out {rank} ['$$x', '--nproc', '-m']",
            f"[rank {rank}] whole",
            f"[rank {rank}] no newline",
        ]
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    expected = [f"FIT_CONFIG={tmp_path / 'settings.yaml'}", f"OMP_NUM_THREADS={share}", "WORLD_SIZE=2"]
    assert f"[rank 1] {expected}" in done.stderr
    said = next(line for line in done.stderr.splitlines() if line.startswith("fit launch: 2 process(es)"))
    logs = tmp_path / said.rpartition(": ")[2]
    assert logs.parent == tmp_path / "runs" / "logs"
    kept = (logs / "rank=1.log").read_bytes().decode()
    assert kept.startswith("out 1 ")
    assert "err 1\n" in kept
    assert "half\rwhole\nno newline" in kept


def test_ranks_have_the_variables_of_torchs_agent(tmp_path: Path) -> None:
    with Launched(tmp_path, "--nproc", 1, "--no-python", "env") as job:
        assert job.wait() == 0, job.text
    names = {line.partition("=")[0] for line in job.stdout.splitlines()}
    agent = Path(local_elastic_agent.__file__).read_text()
    expected = set(re.findall(r'(?:^ {16}|worker_env\[)"([A-Z_]+)"(?:: |\] = )', agent, re.MULTILINE))
    assert len(expected) >= 17
    # Torch's agent sets those that choose devices only as this process has them: the ranks inherit them.
    assert {name for name in expected - names if not name.endswith("_VISIBLE_DEVICES")} == set()
    assert "TORCHELASTIC_ERROR_FILE" in names


def test_a_traceback_that_was_not_the_end_is_shown(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import traceback
        try:
            raise ValueError("handled")
        except ValueError:
            traceback.print_exc()
        """,
    )
    with Launched(tmp_path, "--nproc", 2, path) as job:
        assert job.wait() == 0, job.text
    assert job.stderr.count("[rank 1] ValueError: handled") == job.stderr.count("[rank 0] ValueError: handled") == 1


def test_a_module_and_a_program(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("import sys; print('module', sys.argv[1:])")
    with Launched(tmp_path, "-m", "package.module", "-x") as job:
        assert job.wait() == 0, job.text
    assert job.stdout == "module ['-x']\n"  # alone: no prefix
    with Launched(
        tmp_path, "--nproc", 2, "--show", "1", "--no-python", "/bin/sh", "-c", "echo $RANK of $WORLD_SIZE", name="sh"
    ) as job:
        assert job.wait() == 0, job.text
    assert job.stdout == "[rank 1] 1 of 2\n"


def test_a_rank_that_raises_at_import_while_another_hangs(tmp_path: Path) -> None:
    # Rank 0 cannot be ended by SIGTERM, as a process in the middle of a collective cannot.
    path = script(
        tmp_path,
        PID
        + "if rank == 1:\n    raise ValueError('no such layer')\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)",
    )
    with Launched(tmp_path, "--nproc", 2, path) as job:
        job.until(lambda: pids(tmp_path, 2))
        begun = time.monotonic()
        assert job.wait() == 1
        seconds = time.monotonic() - begun
    assert seconds < 300, seconds  # the other would sleep for 600
    assert not any(map(alive, pids(tmp_path, 2)))
    head, _, shown = job.stderr.rpartition("Traceback (most recent call last):")
    assert shown.rstrip().endswith("ValueError: no such layer\n\nrank 0: was ended because of it")
    assert job.stderr.count("Traceback") == 1  # the launcher's alone
    said = head.rstrip().splitlines()[-1]
    assert said.startswith(
        f"fit launch: rank 1 on {socket.gethostname()} (process {pids(tmp_path, 2)[1]}) failed with exit code 1; its output: "
    )
    assert (
        Path(said.split("its output: ")[1].split(". Its traceback")[0])
        .read_text()
        .rstrip()
        .endswith("ValueError: no such layer")
    )


BEFORE = """
import torch
from engine import Fit, TrainModule

class Net(TrainModule):
    def configure_model(self):
        if rank == 1:
            raise ValueError("no such layer")
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

open(f'begun.{rank}', 'w').close()
Fit(accelerator="cpu", max_steps=2).run(Net(), torch.utils.data.DataLoader(torch.ones(8, 2)))
"""


def test_a_rank_that_raises_before_the_first_collective(tmp_path: Path) -> None:
    with Launched(tmp_path, "--nproc", 2, script(tmp_path, BEFORE)) as job:
        job.until(lambda: len(list(tmp_path.glob("begun.*"))) == 2)
        begun = time.monotonic()
        assert job.wait() == 1
        seconds = time.monotonic() - begun
    assert seconds < 300, seconds  # the other would sleep for 600
    # Not rank 0's "connection closed by peer".
    assert job.stderr.rstrip().endswith("ValueError: no such layer\n\nrank 0: lost another rank")
    assert job.stderr.count("Traceback") == 1
    assert "fit launch: rank 1 on " in job.stderr


GRACEFUL = (
    """
def end(number, frame):
    print("saving", flush=True)
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
"""
    + PID
    + "while True:\n    time.sleep(0.1)\n"
)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_ranks_which_save(tmp_path: Path, number: int, status: int) -> None:
    with Launched(tmp_path, "--nproc", 2, "--max-restarts", 3, script(tmp_path, GRACEFUL)) as job:
        job.until(lambda: pids(tmp_path, 2))
        job.process.send_signal(number)
        if number == signal.SIGTERM:  # a scheduler may send it twice
            time.sleep(0.2)
            job.process.send_signal(number)
        assert job.wait() == status, job.text
    assert sorted(job.stdout.split("\n")) == [
        "",
        "[rank 0] saved",
        "[rank 0] saving",
        "[rank 1] saved",
        "[rank 1] saving",
    ]
    assert "restart" not in job.stderr
    assert "failed" not in job.stderr


EARLY = """
import os, signal, sys, time
from pathlib import Path
from engine.cli.main import main
from engine.launch import agent

class SignalledAtStart(agent.Command):
    def start(self, local_rank, rank, *rest):
        started = super().start(local_rank, rank, *rest)
        while rank and not (Path(f"pid.{rank}").exists() and Path("pid.0").exists()):
            time.sleep(0.01)
        if rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return started

agent.Command = SignalledAtStart
sys.exit(main(["launch", "--nproc", "2", sys.argv[1]]))
"""


def test_a_signal_while_the_ranks_are_started_reaches_them_all(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(EARLY)
    words = [sys.executable, "early.py", str(script(tmp_path, GRACEFUL))]
    done = subprocess.run(
        words, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 143, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "saved" in line) == ["[rank 0] saved", "[rank 1] saved"]


STUBBORN = (
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    + PID
    + "time.sleep(600)"
)


@pytest.mark.slow
def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    with Launched(tmp_path, "--nproc", 2, script(tmp_path, STUBBORN)) as job:
        job.until(lambda: pids(tmp_path, 2))
        job.process.send_signal(signal.SIGINT)
        job.until(lambda: "again to kill" in job.stderr)
        time.sleep(0.3)
        assert job.process.poll() is None
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.text
    assert not any(map(alive, pids(tmp_path, 2)))


@pytest.mark.slow
def test_nohup(tmp_path: Path) -> None:
    path = script(tmp_path, PID + "while not os.path.exists('go'):\n    time.sleep(0.01)\nprint('went on')")
    with Launched(tmp_path, "--nproc", 1, path, prefix=("nohup",)) as job:
        job.until(lambda: pids(tmp_path, 1))
        job.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.text
    assert job.stdout == "went on\n"


def test_no_rank_outlives_a_killed_agent(tmp_path: Path) -> None:
    with Launched(tmp_path, "--nproc", 2, script(tmp_path, STUBBORN)) as job:
        job.until(lambda: pids(tmp_path, 2))
        job.process.kill()
        job.wait()
    deadline = time.monotonic() + PATIENCE_S
    while any(map(alive, pids(tmp_path, 2))):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_ranks_that_a_scheduler_ends_are_not_started_again(tmp_path: Path) -> None:
    with Launched(tmp_path, "--nproc", 2, "--max-restarts", 3, script(tmp_path, GRACEFUL)) as job:
        job.until(lambda: pids(tmp_path, 2))
        for pid in pids(tmp_path, 2):
            os.kill(pid, signal.SIGTERM)
        assert job.wait() == 143, job.text
    assert "restart" not in job.stderr


@pytest.mark.slow
def test_restarts_are_counted_and_each_cause_is_told(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("attempt", attempt)
        if rank == 0 and attempt < 2:
            raise RuntimeError(f"cause {attempt}")
        """,
    )
    with Launched(tmp_path, "--nproc", 2, "--max-restarts", 2, path) as job:
        assert job.wait() == 0, job.text
    assert job.stderr.count("RuntimeError: cause 0") == job.stderr.count("RuntimeError: cause 1") == 1
    assert "restart 1 of 2" in job.stderr
    assert "restart 2 of 2" in job.stderr
    assert "attempt 0\nTraceback" in job.log(0)
    assert "--- attempt 3 ---\nattempt 2\n" in job.log(0)


OWN_GROUP = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
sums = torch.ones(1)
dist.all_reduce(sums)
if rank == 1 and not os.path.exists("again"):
    open("again", "w").close()
    raise ValueError("no such layer")
dist.all_reduce(sums)  # the first attempt's other rank waits here
print(sums.item(), os.environ["MASTER_PORT"])
dist.destroy_process_group()
"""


def test_a_script_with_a_process_group_of_its_own_is_started_again(tmp_path: Path) -> None:
    port = free_port()
    options = ("--nproc", 2, "--max-restarts", 1, "--rdzv", f"localhost:{port}")
    with Launched(tmp_path, *options, script(tmp_path, OWN_GROUP)) as job:
        assert job.wait() == 0, job.text
    assert "restart 1 of 1" in job.stderr
    lines = [line.split() for line in job.stdout.splitlines()]
    assert sorted(line[:3] for line in lines) == [["[rank", "0]", "4.0"], ["[rank", "1]", "4.0"]]
    # The keys of the ranks before are in the store of the first round.
    assert {line[3] for line in lines}.isdisjoint({str(port)})


@pytest.mark.parametrize("nodes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_busy_port(tmp_path: Path, nodes: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with Launched(tmp_path, "--nnodes", nodes, "--rdzv", f"localhost:{port}", script(tmp_path, "")) as job:
            assert job.wait(PATIENCE_S) == 1, job.text
        assert f"localhost:{port}: the port is busy" in job.stderr
        assert "Choose another port" in job.stderr
        assert "Traceback" not in job.stderr


@pytest.mark.slow
def test_an_address_that_is_not_known(tmp_path: Path) -> None:
    with Launched(
        tmp_path,
        "--nnodes",
        2,
        "--rdzv",
        "no-such-host.invalid:1",
        "--join-timeout",
        1,
        "--nproc",
        1,
        script(tmp_path, ""),
    ) as job:
        assert job.wait(PATIENCE_S) == 1, job.text
    assert "no-such-host.invalid:1 cannot be resolved yet" in job.stderr
    assert "this machine did not find it within 1 s" in job.stderr
    assert "Traceback" not in job.stderr


def machines(place: Path, path: Path, fixed: bool, *options: object) -> tuple[Launched, Launched]:
    """Two agents of one job, as on two machines."""
    shared = ("--nnodes", 2, "--rdzv", f"localhost:{free_port()}", *options)
    one, other = (("--node-rank", number) if fixed else () for number in (0, 1))
    return Launched(place, *shared, *one, path, name="one"), Launched(place, *shared, *other, path, name="other")


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True], ids=["c10d", "static"])
def test_two_agents(tmp_path: Path, fixed: bool) -> None:
    path = script(tmp_path, "print(rank, 'of', os.environ['WORLD_SIZE'])")
    one, other = machines(tmp_path, path, fixed, "--nproc", 2)
    with one, other:
        assert one.wait() == other.wait() == 0, one.text + other.text
    found = [sorted(job.stdout.splitlines()) for job in (one, other)]
    expected = [[f"[rank {rank}] {rank} of 4" for rank in ranks] for ranks in ((0, 1), (2, 3))]
    assert found == expected if fixed else sorted(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True], ids=["c10d", "static"])
def test_a_failure_on_one_machine_ends_the_other_which_tells_it_too(tmp_path: Path, fixed: bool) -> None:
    fail = "while not os.path.exists('pid.0'):\n    time.sleep(0.01)\nif rank == 1:\n    raise ValueError('no such layer')\n"
    path = script(tmp_path, PID + fail + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)")
    one, other = machines(tmp_path, path, fixed)
    with one, other:
        one.until(lambda: pids(tmp_path, 2))
        begun = time.monotonic()
        assert one.wait() == other.wait() == 1, one.text + other.text
        assert time.monotonic() - begun < 100
    for job in (one, other):
        assert job.stderr.count("ValueError: no such layer") == 1, job.text
        assert "fit launch: rank 1 on " in job.stderr
    assert not any(map(alive, pids(tmp_path, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True], ids=["c10d", "static"])
def test_two_agents_start_a_script_with_a_process_group_of_its_own_again(tmp_path: Path, fixed: bool) -> None:
    one, other = machines(tmp_path, script(tmp_path, OWN_GROUP), fixed, "--max-restarts", 2)
    with one, other:
        assert one.wait() == other.wait() == 0, one.text + other.text
    ports = {line.split()[3] for line in (one.stdout + other.stdout).splitlines()}
    assert len(ports) == 1


@pytest.mark.slow
def test_a_failure_on_one_machine_restarts_both(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import torch
        from engine import Engine
        engine = Engine(accelerator="cpu")
        if rank == 1 and not os.path.exists("again"):
            open("again", "w").close()
            raise ValueError("no such layer")
        print(engine.gather(torch.tensor([float(rank)])).tolist())
        """,
    )
    one, other = machines(tmp_path, path, False, "--max-restarts", 1)
    with one, other:
        assert one.wait() == other.wait() == 0, one.text + other.text
    assert sorted(one.stdout.splitlines() + other.stdout.splitlines()) == [
        f"[rank {rank}] [0.0, 1.0]" for rank in (0, 1)
    ]


def test_wrong_arguments_end_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = subprocess.run(
        [*COMMAND, "trian.py"], env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no script 'trian.py'; did you mean 'train.py'?" in done.stderr


def test_help_does_not_import_torch() -> None:
    code = "import sys\nfrom engine.cli.main import main\ntry:\n    main(['launch', '--help'])\nexcept SystemExit:\n    print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_lines_that_no_terminal_could_show(tmp_path: Path) -> None:
    text = """
        import subprocess
        for _ in range(150):  # a line of 15 MB
            sys.stdout.write("x" * 100_000)
        sys.stdout.flush()
        sys.stdout.buffer.write("\\n\\u2603\\n".encode() + bytes(range(256)) + b"\\nlast\\n")
        subprocess.Popen(["sh", "-c", "for i in $(seq 200000); do echo left behind; done; sleep 1"], start_new_session=True)
    """
    with Launched(tmp_path, "--nproc", 2, script(tmp_path, text), PYTHONIOENCODING="ascii") as job:
        assert job.wait(PATIENCE_S) == 0, job.text
    assert "[rank 1] ?\n" in job.out.read_text(errors="replace")
    for rank in range(2):
        (kept,) = tmp_path.glob(f"*-logs/*/rank={rank}.log")
        assert kept.read_bytes().startswith(b"x" * 15_000_000 + "\n☃\n".encode() + bytes(range(256)))


def test_standard_output_that_was_closed(tmp_path: Path) -> None:
    path = script(tmp_path, "print('said')")
    line = [*COMMAND, "--log-dir", "logs", "--nproc", "2", path.name]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *line],
        env=clean_environment(),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in tmp_path.glob("logs/*/rank=*.log")] == ["said\n", "said\n"]
