"""A tiny Llama, its data and its adapter, trained by ``Fit``, by ``Engine`` and by a bare loop over whole global batches."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from callbacks import ModelCheckpoint
from engine import Callback, Engine, Fit, Loss
from engine.huggingface import CountedLoss, HFModule, Publication, parameter_groups

STEP, EPOCHS, LR, DECAY, WARMUP = 8, 2, 5e-3, 0.1, 2
"""Samples of a step; the last step of an epoch has 4."""
ROWS = 20
STEPS = EPOCHS * 3


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **{"vocab_size": 50, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, **sizes, **changes}
    )
    return LlamaForCausalLM(config)


def adapted(base: Any) -> PeftModel:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute that transformers is renaming
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():  # so that the first step trains both matrices
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def model_of(kind: str, base: Path | None = None) -> Any:
    """``"full"`` or ``"lora"``."""
    return llama() if kind == "full" else adapted(llama() if base is None else LlamaForCausalLM.from_pretrained(base))


def rows() -> list[dict[str, Tensor]]:
    """Very different numbers of labels; every first label is left out by the shift."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(ROWS):
        ids = torch.randint(3, 50, (10,), generator=generator)
        labels = ids.clone()
        labels[: (number * 3) % 10] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def bare(kind: str) -> tuple[list[float], Tensor]:
    """Each step's loss, over all its tokens, and the logits afterwards."""
    model = model_of(kind).train()
    data = rows()
    optimizer = torch.optim.AdamW(parameter_groups(model, DECAY), lr=LR)
    schedule = get_scheduler("cosine", optimizer, WARMUP, STEPS)
    losses = []
    for _ in range(EPOCHS):
        for low in range(0, ROWS, STEP):
            batch = {name: torch.stack([row[name] for row in data[low : low + STEP]]) for name in data[0]}
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, logits_of(model)


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model.eval()(input_ids=torch.stack([row["input_ids"] for row in rows()[:4]])).logits


class Losses(Callback):
    """The logged loss of each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, run: Any, module: Any, values: dict[str, float], step: int) -> None:
        if "train/loss" in values:
            self.found.append(values["train/loss"])


def strategy(name: str) -> Any:
    if name == "zero3":
        return {"name": "deepspeed", "stage": 3, "param_persistence_threshold": 0}
    return {"name": "fsdp", "min_size": 0} if name == "fsdp" else name


def module_of(kind: str, model: Any = None, **options: Any) -> HFModule:
    options = {"lr": LR, "weight_decay": DECAY, "scheduler": "cosine", "warmup": WARMUP, **options}
    return HFModule(model_of(kind) if model is None else model, **options)


def by_fit(name: str, module: HFModule, root: Path, **settings: Any) -> tuple[Fit, list[float]]:
    """Trained with ``Fit`` in this job; a checkpoint lies in ``root``."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    losses = Losses()
    callbacks = [losses, ModelCheckpoint(every=f"{EPOCHS} epochs")]
    options = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 1,
        **settings,
    }
    fit = Fit(strategy=strategy(name), accelerator="cpu", seed=0, callbacks=callbacks, root_dir=root, **options)
    fit.run(module, DataLoader(rows(), batch_size=STEP // 2 // world))
    return fit, losses.found


def by_engine(name: str, model: Any, path: Path) -> tuple[Engine, Any, list[float]]:
    """Trained with a loop of its own; a checkpoint lies at ``path``."""
    engine = Engine(strategy=strategy(name), accelerator="cpu", seed=0, accumulate_grad_batches=2)
    loss_of, publication = CountedLoss(model), Publication(model)
    optimizer = torch.optim.AdamW(parameter_groups(model, DECAY), lr=LR)
    schedule = get_scheduler("cosine", optimizer, WARMUP, STEPS)
    loader = DataLoader(rows(), batch_size=STEP // 2 // engine.num_processes)
    model, optimizer, loader, schedule = engine.prepare(model.train(), optimizer, loader, schedule)
    engine.register_for_checkpointing(publication)
    losses: list[float] = []
    window: list[Loss] = []
    for _ in range(EPOCHS):
        for batch in loader:
            with engine.accumulate(model):
                loss = loss_of(model(**batch, use_cache=False), batch)
                engine.backward(loss)
                window.append(loss)
                if engine.sync_gradients:
                    engine.clip_grad_norm_(model.parameters(), 1.0)
                    sums = torch.stack(
                        [torch.stack([each.sum.detach().double(), each.count.double()]) for each in window]
                    )
                    total, count = engine.reduce(sums.sum(dim=0)).tolist()
                    losses.append(total / count)
                    window = []
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    engine.save_state(path)
    return engine, model, losses
