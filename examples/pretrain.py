"""From texts to a model: the sources of Python's standard library become files of tokens, packed rows, a mixture and a training.

python examples/pretrain.py --devices 2             # kill it when you like
python examples/pretrain.py --devices 1 --resume    # it continues with the samples that would have come next
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader

from callbacks import MixtureMonitor, ModelCheckpoint
from engine import DataModule, Fit, Loss, Mixture, Packed, TokenFile, TrainModule, document_mask, seed_everything

LENGTH, WIDTH = 256, 64
SOURCES = {"modules": "[a-d]*.py", "packages": "[a-d]*/*.py"}
WEIGHTS = {0: {"modules": 0.8, "packages": 0.2}, "256 samples": {"modules": 0.5, "packages": 0.5}}


class Sources(DataModule):
    def prepare_data(self) -> None:  # on one process of each machine; tokens are bytes, documents the definitions
        for name, pattern in SOURCES.items():
            texts = (file.read_text() for file in sorted(Path(os.__file__).parent.glob(pattern)))
            documents = (part for text in texts for part in text.split("\n\n\n") if part)
            if not Path(f"{name}.safetensors").exists():
                TokenFile.write(f"{name}.safetensors", documents, tokenizer=lambda text: list(text.encode()))

    def setup(self, stage: str) -> None:
        rows = {name: Packed(TokenFile(f"{name}.safetensors"), LENGTH, overflow="split") for name in SOURCES}
        self.mixture = Mixture(rows, WEIGHTS)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.mixture, batch_size=8, shuffle=True)


class Language(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 256)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Loss:
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)  # each [rows, 4 heads, tokens, 16]
        mask = document_mask(batch["document_ids"], dense=True)  # causal, and each document sees itself only
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        logits, labels = self.head(x + self.mlp(x))[:, :-1], batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = Loss(total / math.log(2), (labels != -100).sum())  # bits per byte, over all that are trained
        self.log("bits", loss)
        return loss

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    settings = {"devices": options.devices, "max_steps": options.max_steps, "global_batch_size": 16, "seed": 1}
    seed_everything(1)
    callbacks = [MixtureMonitor(), ModelCheckpoint(every="5 steps")]
    fit = Fit(**settings, root_dir="runs/pretrain", log_every_n_steps=5, callbacks=callbacks)
    result = fit.run(Language(), datamodule=Sources(), resume="auto" if options.resume else None)
    read = ", ".join(f"{row['samples']} rows of {row['source']}" for row in result.tables["mixture"])
    print(f"{result.metrics['bits']:.3f} bits per byte after {read}")
