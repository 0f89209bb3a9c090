"""Detect pods of Kubeflow's training operator (PyTorchJob) and trainer (TrainJob). A pod without a launcher inside is one rank."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.distributed.addresses import is_loopback
from engine.distributed.environments.environment import Environment, Variables

_BY_TORCHRUN = "torchrun script.py (which reads these variables)"


class Kubernetes:
    """Reads ``PET_*``, which are defaults for torchrun and describe pods, or the older ``RANK`` and ``WORLD_SIZE``, which also count pods."""

    names = (
        *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        *(
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "KUBERNETES_SERVICE_HOST",
        ),
    )

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        if not (environ.get("PET_NODE_RANK") or environ.get("RANK")):
            return None
        read = Variables(environ, self.names, f"Start the container's command with {_BY_TORCHRUN}, or correct them.")
        if "LOCAL_RANK" in read or "LOCAL_WORLD_SIZE" in read:
            return None
        if "PET_NODE_RANK" in read:
            return self._pet(read)
        if "KUBERNETES_SERVICE_HOST" not in read or "RANK" not in read:
            return None
        if is_loopback(read.text("MASTER_ADDR")) and read.text("RANK") != "0":
            return None  # several processes in one pod; only in the first pod the address may be localhost
        return self._pods(
            read, "RANK", read.integer("WORLD_SIZE", minimum=1), "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
        )

    def _pet(self, read: Variables) -> Environment:
        """Read the ``PET_*`` variables of a pod."""
        nodes, processes = read.text("PET_NNODES") or "1", read.text("PET_NPROC_PER_NODE") or "1"
        if nodes == "1" and processes in ("1", "auto", "cpu", "gpu"):
            return Environment("single", variables=read.values)
        min_pods, _, max_pods = nodes.partition(":")
        if max_pods and max_pods != min_pods:
            raise read.error(
                f"the number of pods may change ({nodes[:200]}), which needs a launcher in each pod: {_BY_TORCHRUN}"
            )
        # With its default "auto", PyTorchJob still counts its pods as ranks (WORLD_SIZE).
        counted = processes == "auto" and read.text("WORLD_SIZE") == min_pods
        if processes != "1" and not counted:
            raise read.error(
                f"each pod should run several processes (PET_NPROC_PER_NODE={processes[:200]}), but nothing has started them. Start the container's "
                f"command with {_BY_TORCHRUN} or fit launch, or request one process per pod"
            )
        if not re.fullmatch(r"[1-9]\d{0,8}", min_pods):
            raise read.error("PET_NNODES must be a number of at least 1")
        return self._pods(read, "PET_NODE_RANK", int(min_pods), "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")

    def _pods(
        self, read: Variables, rank_name: str, world_size: int, size_name: str, address: str, port: str
    ) -> Environment:
        """Describe one of ``world_size`` pods with one process each."""
        rank = read.integer(rank_name)
        read.require_less(rank_name, rank, size_name, world_size)
        for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
            if name in read and read.integer(name) != value:
                raise read.error(f"{name} is not {value}, as {rank_name if name == 'RANK' else size_name} says")
        if world_size > 1:
            read.require(address, port)
        return Environment(
            "kubernetes",
            rank,
            world_size,
            num_nodes=world_size,
            master_addr=read.text(address),
            master_port=read.port(port) if port in read else None,
            variables=read.values,
        )
