"""``engine.launch.notebook`` and ``debug``: functions as ranks, from scripts and from a Jupyter kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import PATIENCE_S, clean_environment, run_script

from engine import RankError, launch

# What every script starts with. The first line has used this process's threads for a backward pass, as a notebook's cells do.
HEAD = """
import os, signal, sys, time
import torch
from engine import Engine, Fit, RankError, TrainModule, launch

weight = torch.randn(300, 300, requires_grad=True)
(weight @ weight).sum().backward()
rank = lambda: int(os.environ["RANK"])
"""

FORKS = (
    HEAD
    + """
class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.arange(32.0).view(8, 4) / 32

def fit(epochs):
    net = Net()
    result = Fit(accelerator="cpu", max_epochs=epochs, seed=0).run(net, torch.utils.data.DataLoader(data, batch_size=1, shuffle=True))
    return result.step, net.layer.weight.tolist(), torch.get_num_threads()

def engine(offset):
    engine = Engine(accelerator="cpu")
    return engine.gather(torch.tensor([float(offset + rank())])).tolist()

def one_fails():
    if rank() == 1:
        raise ValueError("no such layer")
    Engine(accelerator="cpu")
    time.sleep(600)

def one_dies():
    if rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

def problem(function):
    begun = time.monotonic()
    try:
        launch.notebook(function, num_processes=2)
    except RankError as error:
        return str(error), time.monotonic() - begun

before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
found = {
    "fit": launch.notebook(fit, 2, num_processes=2),
    "one": launch.notebook(fit, 2, num_processes=1),
    "engine": launch.notebook(engine, 3, num_processes=2),
    "fails": problem(one_fails),
    "dies": problem(one_dies),
    "exits": launch.notebook(sys.exit, num_processes=2),
}
assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
report(found)
"""
)


def test_forks_run_fit_and_engine_and_tell_the_first_failure() -> None:
    found = run_script(FORKS, forked=True).value
    (step, weight, threads), second = found["fit"]
    assert second == [step, weight, threads]
    assert (step, threads) == (8, 1)
    torch.testing.assert_close(torch.tensor(weight), by_hand(2, 2), atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.tensor(found["one"][0][1]), by_hand(2, 1), atol=1e-6, rtol=0)
    assert found["engine"] == [[3.0, 4.0], [3.0, 4.0]]
    assert found["exits"] == [None, None]
    story, seconds = found["fails"]
    assert story.startswith("rank 1 on ")
    assert story.endswith("ValueError: no such layer")
    assert seconds < 300
    story, seconds = found["dies"]
    assert "rank 0 on " in story
    assert "killed by SIGKILL" in story
    assert seconds < 300


# A device whose driver starts when it is asked, and then stays out of forks, as CUDA's. Without NVML a count asks it too.
POISONED = (
    HEAD
    + """
from types import SimpleNamespace

started = []
ask = lambda: started.append(os.getpid()) or 2
driver = SimpleNamespace(
    is_available=lambda: bool(ask()),
    device_count=ask,
    _is_in_bad_fork=lambda: any(pid != os.getpid() for pid in started),
)
torch.accelerator.current_accelerator = lambda check_available=False: SimpleNamespace(type="cuda")
torch.get_device_module = lambda device=None: driver

def uses():
    assert not driver._is_in_bad_fork(), "Cannot re-initialize CUDA in forked subprocess"
    return driver.device_count()

def problem(**options):
    try:
        return launch.notebook(uses, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)

found = {"default": problem(), "again": problem(num_processes=1), "many": problem(num_processes=3)}
torch.accelerator.current_accelerator().type and torch.get_device_module().is_available()  # as a cell does
found["asked before"] = problem()
os.environ["FIT_ACCELERATOR"] = "cpu"
found["on the CPU"] = launch.notebook(rank, num_processes=2)
report(found)
"""
)


def test_forks_can_use_the_device_unless_this_process_has_started_its_driver() -> None:
    found = run_script(POISONED).value
    assert found["default"] == [
        2,
        2,
    ]  # one process for each device, and asking how many there are has not started the driver here
    assert found["again"] == [2]
    assert "num_processes = 3: torch sees 2 GPU(s)" in found["many"]
    assert "its GPU's driver has been started" in found["asked before"]
    assert "PYTORCH_NVML_BASED_CUDA_CHECK=1" in found["asked before"]
    assert found["on the CPU"] == [0, 1]


def by_hand(epochs: int, world_size: int) -> torch.Tensor:
    """The weight that plain SGD gives: the loss is linear, so its gradient is the mean of a global batch whatever the weights are."""
    torch.manual_seed(0)
    weight = torch.nn.Linear(4, 1).weight.detach()
    data = torch.arange(32.0).view(8, 4) / 32
    # Every sample once an epoch, each in one step: the sum of the steps' means.
    return weight - 0.1 * epochs * data.sum(0, keepdim=True) / world_size


def add(x: int) -> tuple[int, int, bool]:
    return int(os.environ["RANK"]) + x, int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()


def fails() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no such layer")
    time.sleep(600)


def nested() -> Any:
    return launch.debug(add, 1)


def test_debug_returns_what_each_rank_returns() -> None:
    assert launch.debug(add, 3) == [(3, 2, False), (4, 2, False)]


@pytest.mark.slow
def test_debug_raises_the_first_failure() -> None:
    with pytest.raises(RankError, match=r"rank 1 on .*failed with exit code 1[\s\S]*ValueError: no such layer$"):
        launch.debug(fails)


def test_what_cannot_be_started() -> None:
    with pytest.raises(TypeError, match=r"top level of a module, or use engine.launch.notebook"):
        launch.debug(lambda: 1)
    with pytest.raises(ValueError, match=r"num_processes=0: it must be at least 1"):
        launch.debug(add, 1, num_processes=0)


@pytest.mark.slow
def test_a_rank_starts_no_ranks() -> None:
    with pytest.raises(RankError, match=r"itself one of several"):
        launch.debug(nested)


@pytest.mark.slow
def test_ctrl_c_reaches_the_ranks_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        HEAD
        + textwrap.dedent(
            """
            def wait():
                try:
                    open(f"begun.{rank()}", "w").close()  # inside: the signal may come right after it
                    time.sleep(600)
                except KeyboardInterrupt:
                    time.sleep(0.5)
                    open(f"interrupted.{rank()}", "w").close()
                    raise

            try:
                launch.notebook(wait, num_processes=2)
            except KeyboardInterrupt:
                print("interrupted")
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=clean_environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    while len(list(tmp_path.glob("begun.*"))) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal and a notebook do: to the whole group
    assert process.communicate(timeout=300)[0] == b"interrupted\n"
    assert process.returncode == 0
    assert len(list(tmp_path.glob("interrupted.*"))) == 2


def test_a_rank_alone_gets_ctrl_c_below_another_thread_than_the_main_one() -> None:
    """Only the main thread may handle signals: the others end all the same, and the caller sees a Ctrl-C."""
    script = """
import os, signal, threading, time
from engine import launch

def rank():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)

def call():
    try:
        launch.notebook(rank, num_processes=2)
    except BaseException as error:
        raised.append(type(error).__name__)

raised = []
thread = threading.Thread(target=call)
thread.start()
thread.join()
report(raised)
"""
    assert run_script(script, forked=True).value == ["KeyboardInterrupt"]


CELLS = (
    HEAD
    + """
def work(x):
    engine = Engine(accelerator="cpu")
    sys.stdout.write(f"from rank {rank()}\\n")
    sys.stdout.flush()
    return engine.gather(torch.tensor([float(x + rank())])).tolist()
""",
    "print('values', launch.notebook(work, 1, num_processes=2))",
    "launch.notebook(lambda: 1 / (1 - rank()), num_processes=2)",
    "launch.debug(work, 1)",
)


@pytest.mark.slow
def test_in_a_jupyter_kernel() -> None:
    pytest.importorskip("ipykernel", reason="a Jupyter kernel is needed: pip install ipykernel")
    manager = pytest.importorskip("jupyter_client.manager")
    km, client = manager.start_new_kernel(kernel_name="python3", env=clean_environment())
    outputs: list[dict[str, Any]] = []
    errors: list[tuple[str, str]] = []
    try:
        for cell in CELLS:
            content = client.execute_interactive(
                cell, timeout=PATIENCE_S, output_hook=lambda message: outputs.append(message)
            )["content"]
            errors += [(content["ename"], content["evalue"])] if content["status"] == "error" else []
        text = "".join(each["content"]["text"] for each in outputs if each["msg_type"] == "stream")
        assert "values [[1.0, 2.0], [1.0, 2.0]]" in text
        assert "from rank 0" in text
        assert "from rank 1" in text
        assert [name for name, _ in errors] == ["RankError", "TypeError"]
        assert "ZeroDivisionError" in errors[0][1]
        assert "debug(work): it is defined in a notebook" in errors[1][1]
    finally:
        client.stop_channels()
        km.shutdown_kernel(now=True)
