"""The commands of the Kubernetes examples, with the variables that the operators set, as pods on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from expected import accuracy
from support.ranks import ROOT, clean_environment

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples" / "kubernetes"


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def run_pods(container: dict[str, Any], variables: list[dict[str, str]], runs: Path) -> list[str]:
    """What each pod writes. ``/runs`` is a folder here, and ``fit`` this checkout's."""
    command = [word.replace("/runs", str(runs)) for word in [*container["command"], *container["args"]]]
    starts = {"python": [sys.executable], "fit": [sys.executable, "-m", "engine.cli.main"]}
    pods = [
        subprocess.Popen(
            [*starts[command[0]], *command[1:]],
            env=clean_environment(**own, KUBERNETES_SERVICE_HOST="10.96.0.1"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for own in variables
    ]
    texts = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0] * len(pods), "\n".join(texts)
    return texts


def test_pytorchjob(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    world_size = sum(replica["replicas"] for replica in replicas.values())
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator sets its variables in this one
    port = free_port()
    variables = [
        {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        | {
            "PET_NODE_RANK": str(rank),
            "PET_NNODES": str(world_size),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
        }
        | {"PET_NPROC_PER_NODE": "auto"}
        for rank in range(world_size)
    ]
    texts = run_pods(container, variables, tmp_path)
    assert accuracy("".join(texts)) > 90


def test_trainjob(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    job = yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    port = free_port()
    shared = {
        "PET_NNODES": trainer["numNodes"],
        "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
        "PET_MASTER_ADDR": "127.0.0.1",
    }
    variables = [
        {name: str(value) for name, value in (shared | {"PET_MASTER_PORT": port, "PET_NODE_RANK": node}).items()}
        for node in range(trainer["numNodes"])
    ]
    texts = run_pods(trainer, variables, tmp_path)
    assert accuracy("".join(texts)) > 90
    assert os.environ.get("RANK") is None


def test_several_processes_a_pod_without_a_launcher_are_an_error(tmp_path: Path) -> None:
    variables = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "29400",
    }
    command = [sys.executable, str(ROOT / "tests" / "integration" / "trained.py"), str(tmp_path), str(tmp_path / "r")]
    done = subprocess.run(
        command, env=clean_environment(**variables), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert (
        "Start the container's command with torchrun script.py (which reads these variables) or fit launch"
        in done.stderr
    )
