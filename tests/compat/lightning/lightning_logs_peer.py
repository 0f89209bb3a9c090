"""A module's own notes of a training by the installed Lightning, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    import lightning
    import torch
    from torch.utils.data import DataLoader

    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    import test_trainer_view as tests
    from support.toys import ones

    own = {name: value for name, value in vars(tests.Logs).items() if callable(value) and name != "__init__"}

    class Theirs(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))
            self.found: list[Any] = []

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    for name, value in own.items():
        setattr(Theirs, name, value)
    module = Theirs()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", num_sanity_val_steps=0, log_every_n_steps=2, default_root_dir=sys.argv[1], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(tests.growing(), batch_size=None), DataLoader(ones(2), batch_size=None))
    with open(os.environ["TEST_REPORT"], "w") as file:
        json.dump(module.found, file)
