"""MLflow's own server on loopback, with a database: a killed and resumed run has every step once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from readers import read_mlflow
from support.ranks import PATIENCE_S, clean_environment, run_ranks
from test_all_loggers import SCRIPT, check, killed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's packages
def test_every_step_once_in_a_server(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    options = f"--host 127.0.0.1 --port {address.rpartition(':')[2]} --workers 1 --backend-store-uri sqlite:///{tmp_path}/server.db"
    command = [sys.executable, "-m", "mlflow", "server", *options.split()]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, env=clean_environment(), stdout=log, stderr=log, cwd=tmp_path, start_new_session=True
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not answers(f"{address}/health"):
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        killed(("MLflowLogger",), tmp_path, address)
        folder = run_ranks(SCRIPT, 1, tmp_path, -1, "MLflowLogger", address)[0].value
        check(read_mlflow(Path(folder), address))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
