"""Handwritten digits in your own loop: only the four marked lines differ from plain PyTorch.

    python examples/raw_loop.py
    torchrun --nproc-per-node 2 examples/raw_loop.py

Needs scikit-learn, which has the images: ``pip install fit-trainer[examples]``.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from engine import Engine  # changed: line 1 of 4


def main() -> None:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16.0, torch.tensor(labels, dtype=torch.long))
    train, test = random_split(data, [1437, 360])
    loader = DataLoader(train, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    engine = Engine()  # changed: line 2 of 4
    model, optimizer, loader = engine.prepare(model, optimizer, loader)  # changed: line 3 of 4
    for epoch in range(15):
        for images, targets in loader:
            loss = F.cross_entropy(model(images), targets)
            engine.backward(loss)  # changed: line 4 of 4, was loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}")

    # Every process evaluates all test images, as it would without the engine, so all get the same result.
    model.eval()
    images, targets = test[:]
    with torch.no_grad():
        logits = model(images.to(loss.device)).cpu()
    print(f"test accuracy: {(logits.argmax(dim=1) == targets).float().mean().item():.2%}")


if __name__ == "__main__":
    main()
