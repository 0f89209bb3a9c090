"""Fine-tuning with LoRA: small matrices beside the frozen weights of a transformers model learn, and only they are saved.

    python examples/lora.py
    python examples/lora.py --rank 2

So that nothing has to be downloaded, the model is a tiny Llama, pretrained here for some steps on the code of Python's standard library;
the adapter then learns the prose of its documentation. Take ``AutoModelForCausalLM.from_pretrained(...)`` for a real one. Needs
``pip install transformers peft`` (LoRA: Hu et al. 2021).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from callbacks import RichProgressBar
from engine import Fit, TrainModule

CONTEXT = 64


def chunks(pattern: str) -> TensorDataset:
    """Bytes of the standard library's files, int64 [chunks, CONTEXT]."""
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob(pattern)))
    whole = len(text) // CONTEXT * CONTEXT
    return TensorDataset(torch.frombuffer(bytearray(text[:whole]), dtype=torch.uint8).long().view(-1, CONTEXT))


class LanguageModel(TrainModule):
    """Learns what of ``model`` has ``requires_grad``: bytes [B, CONTEXT] to the mean loss of the next byte."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), lr=self.lr)


def train(name: str, module: TrainModule, data: TensorDataset, max_steps: int) -> None:
    """Train ``module`` on all chunks but the last 256."""
    loader = DataLoader(TensorDataset(data.tensors[0][:-256]), batch_size=16, shuffle=True)
    options: dict[str, Any] = {"devices": 1, "accelerator": "cpu", "seed": 1, "root_dir": f"runs/lora/{name}"}
    Fit(max_steps=max_steps, log_every_n_steps=10, callbacks=RichProgressBar(), **options).run(module, loader)


@torch.no_grad()
def loss_of(model: nn.Module, data: TensorDataset) -> float:
    """Of the last 256 chunks, which are not trained on."""
    held = data.tensors[0][-256:]
    return model.eval()(input_ids=held, labels=held).loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA on a tiny transformers model.")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter's matrices (default: 8)")
    parser.add_argument("--pretrain-steps", type=int, default=200)
    parser.add_argument("--max-steps", type=int, default=100)
    args = parser.parse_args()

    torch.manual_seed(1)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **size))
    train("pretrained", LanguageModel(base, lr=3e-3), chunks("*.py"), args.pretrain_steps)

    frozen = {name: value.clone() for name, value in base.state_dict().items()}
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets))
    learns, whole = model.get_nb_trainable_parameters()
    print(f"trainable: {learns:,} of {whole:,} parameters")
    prose = chunks("pydoc_data/topics.py")  # the language reference, as help() shows it
    before = loss_of(model, prose)
    train("adapted", LanguageModel(model, lr=1e-2), prose, args.max_steps)
    print(f"loss on prose: {before:.3f} before, {loss_of(model, prose):.3f} after")

    folder = Path("runs/lora/adapter")
    model.save_pretrained(folder)  # the adapter alone; PeftModel.from_pretrained(base, folder) puts it back
    print(f"adapter: {(folder / 'adapter_model.safetensors').stat().st_size:,} bytes in {folder}")
    kept = model.unload().state_dict()
    print(f"the base is unchanged: {all(torch.equal(kept[name], value) for name, value in frozen.items())}")


if __name__ == "__main__":
    main()
