"""A SLURM cluster of two nodes on this machine, in a folder: munged, slurmctld and slurmd with their own configuration, sockets, ports.

As root, without systemd and without control groups::

    with Cluster(Path("/tmp/cluster")) as cluster:
        subprocess.run(["srun", "-n", "2", "hostname"], env=cluster.environment)

or in a shell: ``python tests/integration/slurm.py /tmp/cluster`` prints the variable to export, and ends the cluster at Ctrl-C or SIGTERM.
Needs Debian's packages slurmctld, slurmd, slurm-client and munge (or their like).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
SLOTS = 4
"""Tasks that fit on a node, whatever cores there are, and what it has in the way of GPUs: as good as none."""

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
MpiDefault=none
LaunchParameters=use_interactive_step
ReturnToService=2
JobRequeue=1
KillWait=10
MinJobAge=300
GresTypes=gpu
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4
"""


def missing() -> str:
    """Why no cluster can be started here; empty when nothing is known against it."""
    absent = [name for name in DAEMONS if _find(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.getuid() == 0 else "the daemons of SLURM are started by root only"


class Cluster:
    """``environment`` is for ``srun``, ``sbatch`` and the rest. Raises ``RuntimeError`` with the logs when the node does not come up."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder, self.nodes = folder, nodes
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        folder, host = self.folder, socket.gethostname().split(".")[0]
        names = [host, *(f"{host}-{number}" for number in range(2, self.nodes + 1))]  # the first one can be resolved
        for name in ("state", *(f"spool-{name}" for name in names)):
            (folder / name).mkdir(parents=True)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        controller, *ports = _free_ports(1 + self.nodes)
        each = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={SLOTS} Gres=gpu:{SLOTS}"
        nodes = [f"NodeName={name} Port={port} {each}" for name, port in zip(names, ports, strict=True)]
        text = CONFIGURATION.format(
            folder=folder, host=host, controller=controller, nodes="\n".join(nodes), names=",".join(names)
        )
        (folder / "slurm.conf").write_text(text.lstrip())
        # Any devices: SLURM counts them, and shows them to tasks as CUDA_VISIBLE_DEVICES.
        (folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[1-{SLOTS}]\n")
        try:
            files = [
                f"--{name}={folder}/munge.{end}"
                for name, end in (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"))
            ]
            self._start(
                "munged",
                "--foreground",
                "--force",
                *files,
                f"--log-file={folder}/munge.log",
                f"--seed-file={folder}/munge.seed",
            )
            self._await(lambda: (folder / "munge.socket").exists(), "munged")
            self._start("slurmctld", "-D", "-i", "-f", folder / "slurm.conf")
            for name in names:
                self._start("slurmd", "-D", "-f", folder / "slurm.conf", "-N", name)
            self._await(
                lambda: self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * self.nodes, "the nodes"
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if len(self._daemons) > 1:
            self.run("scancel", "--full", "-u", "root")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """End the cluster, which is running, afterwards."""
        try:
            yield
        finally:
            self.__exit__(None, None, None)

    def run(self, *command: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """A command of SLURM, its output as text."""
        return subprocess.run(
            [str(word) for word in command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def _start(self, name: str, *arguments: object) -> None:
        program = _find(name)
        assert program is not None
        with (self.folder / f"{name}.out").open("wb") as out:
            # Its own session: Ctrl-C in the terminal of the tests is not the daemons' business.
            command = [program, *map(str, arguments)]
            daemon = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._daemons.append(daemon)

    def _await(self, condition: object, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + 120
        while not condition():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
                logs = "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in files)
                raise RuntimeError(f"{what} did not come up{f'; ended: {ended}' if ended else ' within 120 s'}\n{logs}")
            time.sleep(0.1)


def _find(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


if __name__ == "__main__":
    reason = missing()
    if reason:
        sys.exit(reason)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with Cluster(Path(sys.argv[1])) as running:
        print(f"export SLURM_CONF={running.environment['SLURM_CONF']}", flush=True)
        ended.wait()
