"""Makes the pictures of the documents: a run on a terminal, a report, and a plan, each shown by the library itself.

    python tests/tools/pictures.py                 # writes examples/pictures/; needs Chromium and tmux, takes about a minute

They are small on purpose (the repository keeps every version of them), and made again only when what they show looks different.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from callbacks import ModelCheckpoint, Report, write_report

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from planning.llama import SHAPES, Llama, tokens  # noqa: E402
from support import browser as chromium  # noqa: E402
from support.terminal import Pane, wait_for  # noqa: E402

from engine import Fit  # noqa: E402
from examples.digits import Digits, DigitsData  # noqa: E402

PICTURES = ROOT / "examples" / "pictures"
WIDTH, HEIGHT = 1000, 1000
"""Of a picture at most, in pixels: as wide as a page of a code host."""
COLUMNS, ROWS = 100, 9
"""Of the terminal."""
BEST_FIRST = """
{
  const best = [...document.querySelectorAll(".sortable thead button")].find((button) => button.textContent.startsWith("best"));
  best.click(); best.click();
}
"""
"""Sorts the table of runs by the best score, as a reader would."""
HALF = re.compile(r"epoch [2-9]/.* (1[5-9]|2\d)/40 ")
"""The bar in the middle of an epoch."""


def terminal(folder: Path) -> Path:
    """The digits example while it trains."""
    pipe = f"{sys.executable} {ROOT}/examples/digits.py --devices 1 --max-epochs 500"
    with Pane(COLUMNS, ROWS, f"cd {folder} && PYTHONPATH={ROOT} {pipe}") as pane:
        wait_for(lambda: any(HALF.search(row) for row in pane.screen()), lambda: "\n".join(pane.screen()))
        rows = pane.colored().rstrip("\n").split("\n")
    with (folder / "typed").open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        for row in ["[b]$ python examples/digits.py --devices 1[/b]", *map(Text.from_ansi, rows)]:
            console.print(row, highlight=False)
    page = folder / "terminal.html"
    page.write_text(console.export_html(theme=MONOKAI, inline_styles=True))
    return page


def report(folder: Path) -> Path:
    """Six runs of digits with different learning rates and clipping, compared in one page."""
    for lr in (1e-3, 4e-3, 1.6e-2):
        for clip in (1.0, 0.1):
            torch.manual_seed(0)
            callbacks = [Report(), ModelCheckpoint(every="1 epochs", monitor="val/accuracy", mode="max")]
            options: dict[str, Any] = {
                "accelerator": "cpu",
                "max_epochs": 4,
                "log_every_n_steps": 10,
                "gradient_clip_val": clip,
            }
            fit = Fit(**options, root_dir=folder / "digits", name=f"lr={lr} clip={clip}", callbacks=callbacks)
            fit.run(Digits(lr, 4), datamodule=DigitsData(32))
    write_report([folder / "digits"], folder / "report.html")
    return folder / "report.html"


def plan(folder: Path) -> Path:
    """Llama 3.1 with 8 billion parameters on 16 H100 under FSDP2."""
    fit = Fit(strategy="fsdp", precision="bf16-mixed", activation_checkpointing="selective", root_dir=folder)
    fit.plan(Llama(SHAPES["8B"]), tokens(1, 8192), world_size=16, device="h100").write_page(folder / "plan.html")
    return folder / "plan.html"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, chromium.chromium() as browser:
        for make, drawn, script in ((terminal, False, ""), (report, True, BEST_FIRST), (plan, False, "")):
            folder = Path(place) / make.__name__
            folder.mkdir()
            browser.open(make(folder), width=WIDTH, height=100, drawn=drawn)
            browser.evaluate(script)
            picture = PICTURES / f"{make.__name__}.png"
            browser.screenshot(picture, HEIGHT)
            print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
