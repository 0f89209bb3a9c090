"""Two machines, as two network namespaces joined by a cable (a veth pair): a job over both, and the cable cut in its middle."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Launched, alive

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PORT = 29400
HEAD = "fit-head"
"""The first host's name."""

SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import job
from engine import Callback

root, pause = Path(sys.argv[2]), float(sys.argv[3])
rank = os.environ["RANK"]
(root / f"pid.{rank}").write_text(str(os.getpid()))

class Slow(Callback):
    def __init__(self, step): pass
    def on_train_batch_start(self, run, module, batch, batch_idx):
        time.sleep(pause)

job.Die = Slow
job.train(root, root / f"diary.{rank}", workers=0, strategy="ddp", max_epochs=2 if not pause else 200)
"""


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """Two hosts: namespace, network interface and address (higher than a loopback one, so that it does not become rank 0 by luck)."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts on one machine need the ip command (iproute2)")
    names = [(f"fit-{os.getpid()}-{i}", f"fit{i}p{os.getpid() % 100000}", f"192.168.77.{i}") for i in (1, 2)]
    try:
        try:
            for space, _, _ in names:
                ip("netns", "add", space)
            ip(
                "link",
                "add",
                names[0][1],
                "netns",
                names[0][0],
                "type",
                "veth",
                "peer",
                "name",
                names[1][1],
                "netns",
                names[1][0],
            )
            for space, link, address in names:
                ip("-n", space, "addr", "add", f"{address}/24", "dev", link)
                ip("-n", space, "link", "set", link, "up")
                ip("-n", space, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        for number, (space, _, _) in enumerate(names):
            # As on many machines: the first one finds its own name at a loopback address.
            place = Path("/etc/netns") / space
            place.mkdir(parents=True)
            (place / "hosts").write_text(f"127.0.0.1 localhost\n{'192.168.77.1' if number else '127.0.1.1'} {HEAD}\n")
        yield names
    finally:
        for space, _, _ in names:
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        for space, _, _ in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def start(
    place: Path, hosts: list[tuple[str, str, str]], root: Path, pause: float, number: int, head: str, **env: str
) -> Launched:
    script = place / "train.py"
    script.write_text(SCRIPT)
    root.mkdir(exist_ok=True)
    space, _, _ = hosts[number]
    return Launched(
        place,
        *("--nnodes", 2, "--nproc", 1, "--rdzv", f"{head}:{PORT}", script, HERE.parent / "failure", root, pause),
        name=f"host{number}",
        prefix=("ip", "netns", "exec", space),
        **env,
    )


def test_two_hosts_give_the_weights_of_one(tmp_path: Path, hosts: list[tuple[str, str, str]]) -> None:
    # The second host is there first and waits for the one that serves the rendezvous.
    two = tmp_path / "two"
    with start(tmp_path, hosts, two, 0.0, 1, HEAD) as second:
        second.until(lambda: "1 process(es) here, 2 machines" in second.stderr)
        with start(tmp_path, hosts, two, 0.0, 0, HEAD) as first:
            assert first.wait() == 0, first.text + second.text
            assert second.wait() == 0, second.text
    one = tmp_path / "one"
    one.mkdir()
    with Launched(
        tmp_path, "--nproc", 2, tmp_path / "train.py", HERE.parent / "failure", one, 0.0, name="alone"
    ) as alone_:
        assert alone_.wait() == 0, alone_.text
    last = max(os.listdir(one / "checkpoints"))
    files = sorted(path for folder in ("model", "optim") for path in (one / "checkpoints" / last / folder).iterdir())
    assert files
    for file in files:
        assert file.read_bytes() == (two / "checkpoints" / last / file.parent.name / file.name).read_bytes(), file.name


def test_a_cut_cable_ends_both_sides_with_the_lost_peers_name(
    tmp_path: Path, hosts: list[tuple[str, str, str]]
) -> None:
    limit_s, root = 6.0, tmp_path / "job"
    env = {"FIT_TIMEOUT": f"{limit_s:g} s"}
    with (
        start(tmp_path, hosts, root, 0.05, 0, hosts[0][2], **env) as first,
        start(tmp_path, hosts, root, 0.05, 1, hosts[0][2], **env) as second,
    ):
        sides = (first, second)
        first.until(lambda: (root / "diary.1").exists() and len((root / "diary.1").read_text().splitlines()) >= 3)
        ranks = {rank: int((root / f"pid.{rank}").read_text()) for rank in (0, 1)}
        ip("-n", hosts[0][0], "link", "set", hosts[0][1], "down")
        begun = time.monotonic()
        try:
            ended: dict[int, float] = {}
            while len(ended) < 2 and time.monotonic() - begun < limit_s + 60:  # 13 s where nothing else runs
                ended |= {
                    i: time.monotonic() - begun
                    for i, side in enumerate(sides)
                    if i not in ended and side.process.poll() is not None
                }
                time.sleep(0.05)
            print(f"seconds from the cut to the end of each side, with a limit of {limit_s:g} s: {ended}")
            assert len(ended) == 2, first.text + second.text
        finally:
            ip("-n", hosts[0][0], "link", "set", hosts[0][1], "up")
    assert [side.process.returncode for side in sides] == [1, 1], first.text + second.text
    assert not any(map(alive, ranks.values()))
    # Which side has rank 0 follows from the addresses.
    for side, other in ((first, 1), (second, 0)):
        story = side.stderr.rpartition("fit launch: rank ")[2]
        assert re.search(rf"\brank {other}\b", story), side.text
        assert str(ranks[other]) in story, side.text
