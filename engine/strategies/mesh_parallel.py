"""Tensor, pipeline and data parallel together, on one mesh of ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from engine.distributed.group import Group
from engine.distributed.mesh import data_group
from engine.strategies import tensor_parallel
from engine.strategies.fsdp import FSDP


@dataclass(kw_only=True)
class MeshParallel(FSDP):
    """Ranks on the axes ``pp, dp_replicate, dp_shard, cp, tp``; the sizes multiply to the number of processes, -1 is what the others leave.

    Along ``tp`` (neighbouring ranks) modules are cut by a plan; along ``dp_shard`` what is left of each parameter is sharded as by
    :class:`FSDP`, whose settings hold here too; along ``dp_replicate`` it is copied. Ranks that differ in the ``dp_`` axes see
    different data. Gradients, norms, clipping and checkpoints are those of the whole model.

    The plan is ``plan``, else what the model's method ``parallelize(self, mesh)`` returns (it may also cut the model itself and return
    ``None``), else a Hugging Face model's own. Of a model's parts that no plan names, every ``tp`` rank computes the same. Heads and
    channels that a module cuts must be read from its tensors (``view(..., -1, head_size)``): a rank has 1/tp of them.
    """

    tp: int = 1
    """Ranks that the planned modules are cut over."""
    pp: int = 1
    """Stages that the model's depth is cut into."""
    cp: int = 1
    """Ranks that a sequence is cut over."""
    plan: tensor_parallel.Plan | None = None
    """Styles of ``torch.distributed.tensor.parallel``, or their names (``"colwise"``, ``"rowwise"``, ...), by names of modules."""
    sequence_parallel: bool = False
    """Insist on sequence parallel: the plan must have it; ``parallelize(mesh, sequence_parallel=True)`` is told where it asks."""
    loss_parallel: bool = False
    """Compute the cross entropy on logits that are cut over the vocabulary: the output layer's style is
    ``ColwiseParallel(use_local_output=False)``, and nothing gathers them."""
    _losses: AbstractContextManager[Any] | None = field(default=None, init=False, repr=False)

    @classmethod
    def from_megatron(
        cls, *, tp_degree: int = 1, pp_degree: int = 1, num_micro_batches: int = 1, sequence_parallelism: bool = False, **settings: Any
    ) -> MeshParallel:
        """By the names of Megatron-LM's settings; the other ranks are data parallel, without sharding unless ``dp_shard`` says so."""
        data = {"dp_replicate": -1, "dp_shard": 1} if "dp_shard" not in settings and "dp_replicate" not in settings else {}
        return cls(**{"tp": tp_degree, "pp": pp_degree, "sequence_parallel": sequence_parallelism, **data, **settings})

    def _axes(self) -> dict[str, int]:
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}

    def connect(self, group: Group) -> None:
        super().connect(group)
        if self._sizes["cp"] > 1:
            raise ValueError(
                f"MeshParallel(cp={self.cp}) on {group.device.type}: torch's context parallel has no backward pass on the CPU; "
                "use tp with sequence_parallel to spread long sequences"
            )
        self.data_group = data_group(group, self._sizes)
        self.random_stream = self.data_group.rank * self._sizes["pp"] + group.rank // (group.world_size // self._sizes["pp"])
        self.speaks = group.rank % self._sizes["tp"] == 0

    def _shard(self, model: nn.Module) -> None:
        if self._sizes["tp"] > 1:
            mesh = self.mesh()
            plan = tensor_parallel.plan_for(model, self.plan, mesh, self.sequence_parallel)
            if plan is not None:
                tensor_parallel.cut(model, plan, mesh["tp"], self._settle, self._note)
        if self.loss_parallel and self._losses is None:
            self._losses = loss_parallel()
            self._losses.__enter__()
        if self._sizes["dp_replicate"] * self._sizes["dp_shard"] > 1:
            super()._shard(model)
        else:
            self._settle(model)

    def release(self) -> None:
        if self._losses is not None:
            self._losses.__exit__(None, None, None)
            self._losses = None

    def _holders(self, grad: Tensor) -> int:
        return self.group.world_size // self._sizes["pp"]
