"""Two networks against each other, with manual optimization: a generator that learns to draw handwritten digits.

    python examples/gan.py                     # the last lines are drawn digits
    python examples/gan.py --devices 2

A batch has two optimizer steps, one of each network (Goodfellow et al. 2014, with the generator's non-saturating loss). Needs scikit-learn, which
has the images: ``pip install fit-trainer[examples]``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from digits import DigitsData
from torch import Tensor, nn
from torch.nn import functional as F

from callbacks import RichProgressBar
from engine import Fit, TrainModule

SHADES = " .:-=+*#%@"


class GAN(TrainModule):
    """Noise [B, 32] to images [B, 1, 8, 8] with values from 0 to 1."""

    automatic_optimization = False

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.generator = nn.Sequential(
            nn.Linear(32, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.Sigmoid(),
            nn.Unflatten(1, (1, 8, 8)),
        )
        self.discriminator = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, _ = batch
        generator, discriminator = self.optimizers()
        fake = self(torch.randn(len(real), 32, device=real.device))

        # The discriminator learns to tell them apart; the images' own gradients are not needed for it.
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        discriminator.zero_grad()
        self.manual_backward(loss)
        discriminator.step()

        # The generator learns to pass for real. This backward pass also reaches the discriminator, which clears its gradients above.
        deceit = F.softplus(-self.discriminator(fake)).mean()
        generator.zero_grad()
        self.manual_backward(deceit)
        generator.step()

        right = ((on_real > 0).float().mean() + (on_fake < 0).float().mean()) / 2
        self.log("discriminator/loss", loss.detach())
        self.log("discriminator/accuracy", right, prog_bar=True)
        self.log("generator/loss", deceit.detach(), prog_bar=True)

    def configure_optimizers(self) -> list[Any]:
        networks = self.generator, self.discriminator
        return [torch.optim.Adam(each.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999)) for each in networks]


@torch.no_grad()
def drawn(module: GAN, count: int) -> str:
    """Images of the generator, side by side as text."""
    images = module.eval()(torch.randn(count, 32, generator=torch.Generator().manual_seed(0))).squeeze(1)
    shades = (images * len(SHADES)).long().clamp(max=len(SHADES) - 1)
    return "\n".join(
        "   ".join("".join(SHADES[v] * 2 for v in image[row].tolist()) for image in shades) for row in range(8)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A GAN on handwritten digits, with manual optimization.")
    parser.add_argument("--devices", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--max-epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a batch on each process")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    fit = Fit(
        devices=args.devices,
        accelerator="cpu",
        max_epochs=args.max_epochs,
        val_every=None,
        seed=1,
        root_dir="runs/gan",
        callbacks=RichProgressBar(),
    )
    module, data = GAN(args.lr), DigitsData(args.batch_size)
    data.setup("fit")
    result = fit.run(module, data.train_dataloader())
    if fit.is_main_process:
        print(drawn(module, 6))
        print(
            f"{result.step} steps; the discriminator is right for {result.metrics['discriminator/accuracy']:.0%} of the images"
        )


if __name__ == "__main__":
    main()
