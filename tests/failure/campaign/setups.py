"""How jobs are started: by hand, by the library, by torchrun and by ``fit launch``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .recipes import Recipe
from .watch import ADDRESS, ROOT

HERE = Path(__file__).parent
TREE = HERE.parents[2]
_FOREIGN = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
        "MASTER_",
        "TORCHELASTIC_",
        "SLURM_",
        "FIT_",
        "PYTEST_",
        "OMPI_",
        "PMI",
        "PET_",
    ),
    *("MPI_LOCAL", "MV2_", "KUBERNETES_", "RAY_ADDRESS", "NODE_RANK", "CAMPAIGN_"),
)


@dataclass(frozen=True)
class Setup:
    """One way to start the job."""

    name: str
    launcher: tuple[str, ...] = ()
    """What stands before the script; ``{restarts}`` and ``{logs}`` are put in."""
    ranks: int = 2
    strategy: str = "ddp"
    model: str = "plain"
    """Of ``models.py``."""
    needs: str = ""
    """The package without which it cannot be run."""
    restarts: tuple[int, ...] = (0,)
    """How often the launcher may start the ranks again by itself: one of these."""
    binds: bool = True
    """Whether the ranks end with the launcher, even when it is killed."""
    waits: bool = True
    """Whether the next start waits for all processes of the one before, loaders' workers included."""

    @property
    def victims(self) -> tuple[str, ...]:
        """Who can be killed."""
        launcher = ("launcher",) if self.launcher else ()
        return (*(f"rank {rank}" for rank in range(self.ranks)), *launcher, "all")

    def command(self, recipe: Recipe, place: Path, diaries: Path, restarts: int) -> list[str]:
        """The command line of one start."""
        values = {"restarts": restarts, "logs": place / "logs"}
        script = [str(HERE / "job.py"), self.strategy, str(self.ranks), str(diaries), recipe.name, self.model]
        return [sys.executable, *(each.format(**values) for each in self.launcher), *script]

    def environment(self, tree: Path, place: Path, address: str) -> dict[str, str]:
        """Its variables; two of them mark all of its processes."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(place / "tmp")}
        own["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles its steps, for half a minute in each start
        return {**kept, **own, ADDRESS: address, ROOT: str(place / "root")}


_FIT = ("-m", "engine.cli.main", "launch", "--nproc=2", "--max-restarts={restarts}", "--log-dir={logs}")
_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts={restarts}")
SETUPS = {
    setup.name: setup
    for setup in (
        Setup("single", ranks=1, strategy="auto", waits=False),
        Setup("devices=2"),
        Setup("torchrun", _TORCHRUN, restarts=(0, 2), binds=False),
        Setup("fit launch", _FIT, restarts=(0, 1, 3)),
        Setup("fsdp", _FIT, strategy="fsdp", restarts=(0, 2)),
        Setup("fsdp Muon", _FIT, strategy="fsdp", model="Muon", restarts=(0, 2)),
        Setup("fsdp 8-bit AdamW", _FIT, strategy="fsdp", model="8-bit AdamW", needs="torchao", restarts=(0, 2)),
        Setup("fsdp 4-bit base", _FIT, strategy="fsdp", model="4-bit base", needs="bitsandbytes", restarts=(0, 2)),
        Setup("ddp 4-bit base", _FIT, model="4-bit base", needs="bitsandbytes", restarts=(0, 2)),
    )
}


def runnable() -> list[str]:
    """The names of the set-ups whose packages are installed."""
    return [name for name, setup in SETUPS.items() if not setup.needs or find_spec(setup.needs) is not None]
