"""QLoRA: small matrices learn beside a transformers model whose frozen weights have 4 bits; checkpoints have the small matrices alone.

    python examples/qlora.py
    python examples/qlora.py --strategy fsdp --devices 2
    python examples/qlora.py --strategy fsdp --devices 2 --max-steps 200 --resume

So that nothing has to be downloaded, the model is a tiny Llama, made here, and its text the sources of Python's standard library. ``--model PATH``
takes a real one, and its tokenizer. Needs ``pip install transformers peft bitsandbytes`` (QLoRA: Dettmers et al. 2023).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from callbacks import ModelCheckpoint, RichProgressBar
from engine import Fit
from engine.checkpoint.export import export_checkpoint
from engine.huggingface import HFModule

CONTEXT = 64


def quantized(path: str | None) -> Any:
    """The saved model, or a tiny one, with its linear layers in 4 bits (nf4)."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            torch.manual_seed(1)  # all ranks make the same model
            size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
            tiny = LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **size)
            LlamaForCausalLM(tiny).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(path or folder, quantization_config=config, device_map={"": "cpu"})


def rows(path: str | None) -> list[dict[str, torch.Tensor]]:
    """The standard library's sources in rows of CONTEXT tokens: bytes for the tiny model."""
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))[:60])
    ids = list(text)
    if path is not None:
        ids = AutoTokenizer.from_pretrained(path)(text.decode(errors="replace"))["input_ids"]
    pieces = torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA beside weights in 4 bits.")
    parser.add_argument("--model", default=None, help="a folder of from_pretrained (default: a tiny Llama)")
    parser.add_argument("--strategy", default="auto", help="such as ddp, fsdp")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    base = quantized(args.model)
    size = base.get_memory_footprint()
    torch.manual_seed(2)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    module = HFModule(model, lr=5e-3, scheduler=None)  # its checkpoints leave out the frozen base

    fit = Fit(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        max_steps=args.max_steps,
        global_batch_size=16,
        gradient_clip_val=1.0,
        callbacks=[RichProgressBar(), ModelCheckpoint(every="50 steps")],
        seed=1,
        root_dir="runs/qlora",
    )
    data = rows(args.model)
    loader = DataLoader(data[:-256], batch_size=16 // args.devices, shuffle=True)
    result = fit.run(module, loader, resume="auto" if args.resume else None)
    loss = fit.validate(module, DataLoader(data[-256:], batch_size=16))[0]["val/loss"]
    if fit.is_main_process and result.last_checkpoint is not None:
        checkpoint, adapter = Path(str(result.last_checkpoint)), Path(str(result.folder)) / f"adapter-{result.step}"
        export_checkpoint(checkpoint, adapter)  # PeftModel.from_pretrained(quantized(args.model), adapter) reads it
        print(
            f"base: {size:,} bytes, checkpoint with optimizer: {size_of(checkpoint):,}, {adapter}: {size_of(adapter):,}"
        )
        print(f"loss: {loss:.6f}")


if __name__ == "__main__":
    main()
