"""Training a transformers model without a subclass, and three of Trainer's options as recipes: label smoothing, NEFTune, grouping by length.

    python examples/causal_lm.py
    python examples/causal_lm.py --label-smoothing 0.1 --neftune 5 --group-by-length --devices 2

So that nothing has to be downloaded, model and tokenizer are made here, from the docstrings of Python's standard library. Take
``AutoModelForCausalLM.from_pretrained(...)`` and its tokenizer for real ones. Needs ``pip install transformers``.
"""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from callbacks import ModelCheckpoint, RichProgressBar
from engine import Fit, Loss
from engine.checkpoint.export import export_checkpoint
from engine.huggingface import HFModule

IGNORED = -100


class Smoothed(HFModule):
    """With label smoothing (Szegedy et al. 2016): a share ``smoothing`` of each target goes to all words alike."""

    smoothing = 0.1

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Loss:
        logits, labels = outputs.logits[:, :-1].float(), batch["labels"][:, 1:]
        smoothing = self.smoothing if self.training else 0.0
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
        )
        return Loss(total, (labels != IGNORED).sum())


def neftune(alpha: float, embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A forward hook: uniform noise of at most ``alpha / sqrt(length * width)`` on embeddings [B, length, width] in training (Jain et al. 2023)."""
    if not embedding.training:
        return output
    return output + torch.empty_like(output).uniform_(-1, 1) * alpha / (output.shape[1] * output.shape[2]) ** 0.5


class GroupedByLength(Sampler[int]):
    """Samples of similar length after each other: random groups of ``group`` samples, each sorted. The run divides what it gives among the ranks."""

    def __init__(self, lengths: list[int], group: int, seed: int) -> None:
        self.lengths, self.group, self.seed, self.epoch = lengths, group, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """The run calls this, so that every epoch has an order of its own and a resumed run the same."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        for low in range(0, len(order), self.group):
            yield from sorted(order[low : low + self.group], key=lambda i: self.lengths[i], reverse=True)


def texts() -> list[str]:
    """Docstrings of the standard library's modules, of very different lengths."""
    found = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        nodes = [
            n
            for n in ast.walk(ast.parse(path.read_bytes()))
            if isinstance(n, (ast.Module, ast.FunctionDef, ast.ClassDef))
        ]
        found += [text for node in nodes if (text := ast.get_docstring(node)) and len(text) > 40]
    return found


def tokenizer_of(corpus: list[str]) -> PreTrainedTokenizerFast:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(corpus, vocab_size=1000, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny Llama on docstrings.")
    parser.add_argument("--devices", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--neftune", type=float, default=0.0, metavar="ALPHA", help="such as 5")
    parser.add_argument("--group-by-length", action="store_true")
    parser.add_argument("--root-dir", default="runs/causal_lm")
    args = parser.parse_args()

    torch.manual_seed(1)
    corpus = texts()
    tokenizer = tokenizer_of(corpus)
    rows = [{"input_ids": ids} for ids in tokenizer(corpus, truncation=True, max_length=128)["input_ids"]]
    train, held = rows[:-100], rows[-100:]
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, pad_token_id=2, **size)
    )
    if args.neftune:
        model.get_input_embeddings().register_forward_hook(partial(neftune, args.neftune))

    options: dict[str, Any] = {
        "lr": 3e-3,
        "weight_decay": 0.1,
        "scheduler": "cosine",
        "warmup": 0.1,
        "tokenizer": tokenizer,
    }
    module = (Smoothed if args.label_smoothing else HFModule)(model, generation={"max_new_tokens": 24}, **options)
    if args.label_smoothing:
        module.smoothing = args.label_smoothing

    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # pads; labels are -100 there
    lengths = [len(row["input_ids"]) for row in train]
    sampler = GroupedByLength(lengths, group=256, seed=1) if args.group_by_length else None
    loader = DataLoader(train, batch_size=16, sampler=sampler, shuffle=sampler is None, collate_fn=collate)
    fit = Fit(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        callbacks=[RichProgressBar(), ModelCheckpoint(every=args.max_steps)],
        seed=1,
        root_dir=args.root_dir,
    )
    result = fit.run(module, loader, DataLoader(held, batch_size=16, collate_fn=collate))
    metrics = fit.validate(module, DataLoader(held, batch_size=16, collate_fn=collate))[0]
    start = tokenizer(["Return the", "This module"], return_tensors="pt")
    prompt = [{"input_ids": start["input_ids"], "attention_mask": start["attention_mask"]}]
    words = fit.predict(module, prompt)[0]
    if fit.is_main_process and result.last_checkpoint is not None:
        print(f"perplexity: {metrics['val/perplexity']:.1f}")
        print(*tokenizer.batch_decode(words), sep="\n")
        done = export_checkpoint(result.last_checkpoint, Path(str(result.folder)) / "exported")
        print(*done.files, *done.published, sep="\n")


if __name__ == "__main__":
    main()
