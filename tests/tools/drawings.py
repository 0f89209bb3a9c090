"""Draws the parts of a ``Run`` and the way of a save, as SVG.

python tests/tools/drawings.py    # writes examples/pictures/run.svg and save.svg
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[2] / "examples" / "pictures"
FONT = "ui-sans-serif, system-ui, Helvetica, Arial, sans-serif"
INK, QUIET, LINE = "#1f2937", "#4b5563", "#6b7280"
SHADES = ("#dbeafe", "#dcfce7", "#fef3c7", "#fce7f3", "#e0e7ff", "#ccfbf1")
"""Colors of global batches."""
COLORS = {"user": "#fef3c7", "core": "#dbeafe", "engine": "#dcfce7", "disk": "#f3e8ff"}


@dataclass
class Drawing:
    """A drawing of ``width`` and ``height`` pixels, with a ``title`` for those who cannot see it."""

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, name: str, about: str, color: str, height: int = 52) -> None:
        """Draw a box with a ``name`` and a line ``about`` it; ``color``: a key of :data:`COLORS`."""
        self.shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{COLORS[color]}" stroke="{LINE}"/>'
        )
        self.text(x + width // 2, y + 22, name, INK, 14, bold=True)
        self.text(x + width // 2, y + 40, about, QUIET, 11)

    def text(
        self,
        x: int,
        y: int,
        text: str,
        color: str = QUIET,
        size: int = 12,
        *,
        bold: bool = False,
        left: bool = False,
        right: bool = False,
        font: str = "",
    ) -> None:
        """Write ``text`` around ``x``, from there on (``left``) or up to there (``right``)."""
        anchor, weight = "start" if left else "end" if right else "middle", ' font-weight="600"' if bold else ""
        family = f' font-family="{font}"' if font else ""
        self.shapes.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}"{weight}{family} fill="{color}">{escape(text)}</text>'
        )

    def parts(self, step: int, y: int, ranks: int) -> None:
        """Draw the global batch of a ``step``, divided among ``ranks``."""
        x, height = 20 + 130 * step, 64 // ranks
        for rank in range(ranks):
            self.shapes.append(
                f'<rect x="{x}" y="{y + rank * height}" width="104" height="{height}" fill="{SHADES[step % len(SHADES)]}" stroke="{LINE}"/>'
            )
        halo = f'paint-order="stroke" stroke="{SHADES[step % len(SHADES)]}" stroke-width="5"'
        self.shapes.append(
            f'<text x="{x + 52}" y="{y + 37}" text-anchor="middle" font-size="13" font-weight="600" fill="{INK}" {halo}>step {step}</text>'
        )

    def arrow(self, *points: tuple[int, int], dashed: bool = False) -> None:
        """Draw an arrow through ``points``."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.5"{dash} marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """The drawing as the text of an SVG file."""
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker>'
        )
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" '
            f'font-family="{FONT}" role="img" aria-label="{escape(self.title)}">',
            f"<title>{escape(self.title)}</title><defs>{tip}</defs>",
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#ffffff"/>',  # readable on dark pages, too
        ]
        return "\n".join([*head, *self.shapes, "</svg>\n"])


def run_parts() -> Drawing:
    """The objects of a training, and who calls whom."""
    drawing = Drawing(
        960, 500, "Fit makes a Run, which has an Engine, its own parts and the hooks of callbacks and module"
    )
    drawing.box(20, 20, 200, "Fit", "settings; one call a run", "user")
    drawing.box(380, 20, 200, "Run", "what callbacks see", "core")
    drawing.box(740, 20, 200, "Engine", "also for your own loop", "engine")
    drawing.arrow((220, 46), (380, 46))
    drawing.text(300, 38, "makes")
    drawing.arrow((580, 46), (740, 46))
    drawing.text(660, 38, "has one")
    drawing.box(20, 120, 200, "TrainModule", "your steps and hooks", "user")
    drawing.box(20, 200, 200, "Callback", "hooks of others", "user")
    drawing.box(20, 280, 200, "Hooks", "whom each event calls", "core")
    drawing.arrow((380, 60), (300, 60), (300, 306), (220, 306))
    drawing.arrow((120, 280), (120, 252))
    drawing.arrow((60, 280), (60, 172))
    for index, (name, about) in enumerate(
        (
            ("TrainState", "the counters"),
            ("RunLoaders", "who reads which sample"),
            ("PlacedModule", "the module on its device"),
            ("Optimization", "one window, one step"),
            ("Logbook", "logged values"),
            ("StopControl", "the end"),
            ("RunCheckpoints", "its checkpoints"),
            ("RunSnapshot", "its state, for checkpoints"),
        )
    ):
        row, column = divmod(index, 2)
        drawing.box(330 + 170 * column, 120 + 80 * row, 150, name, about, "core")
    drawing.arrow((490, 72), (490, 112))
    for index, (name, about) in enumerate(
        (
            ("Strategy", "how ranks share a model"),
            ("Window", "what a micro-batch weighs"),
            ("Stepper", "clip, check, step"),
            ("CheckpointWriter", "files, in a thread"),
        )
    ):
        drawing.box(740, 120 + 80 * index, 200, name, about, "engine")
    drawing.arrow((840, 72), (840, 112))
    drawing.text(20, 440, "The parts do not know the run and call no hooks:", left=True)
    drawing.text(20, 458, "only the run, the loop and the optimization do.", left=True)
    drawing.text(20, 484, "yellow: yours; blue: a training's; green: shared with loops of your own", left=True)
    return drawing


def save() -> Drawing:
    """The way of a save: what the training waits for, what a thread does, and when hooks hear of it."""
    drawing = Drawing(
        960, 330, "A save: the training waits for copies only; a thread writes the files, the manifest last"
    )
    drawing.text(20, 32, "training", INK, 14, bold=True, left=True)
    drawing.text(20, 180, "thread", INK, 14, bold=True, left=True)
    training = (
        ("a step ends", "ModelCheckpoint asks"),
        ("collect", "states by name"),
        ("agree", "who writes which part"),
        ("train on", "copied in the meantime"),
        ("a later step", "on_checkpoint_saved"),
    )
    for index, (name, about) in enumerate(training):
        drawing.box(20 + 190 * index, 48, 160, name, about, "core" if index != 3 else "engine")
        if index:
            drawing.arrow((20 + 190 * index - 30, 74), (20 + 190 * index, 74))
    thread = (
        ("tensors", "safetensors files"),
        ("trees", "JSON files"),
        ("manifest", "sizes, checksums, last"),
        ("rename", "the draft gets its name"),
        ("remove", "older checkpoints"),
    )
    for index, (name, about) in enumerate(thread):
        drawing.box(20 + 190 * index, 196, 160, name, about, "disk")
        if index:
            drawing.arrow((20 + 190 * index - 30, 222), (20 + 190 * index, 222))
    drawing.arrow((480, 100), (480, 140), (100, 140), (100, 196))
    drawing.text(290, 132, "the copies, in host memory")
    drawing.arrow((670, 196), (670, 160), (860, 160), (860, 100), dashed=True)
    drawing.text(765, 152, "news, to all ranks")
    drawing.text(
        20, 290, "A kill before the rename leaves a draft, which nothing reads, and the earlier checkpoints.", left=True
    )
    drawing.text(20, 308, "The next optimizer step waits for the copies, if they are not made yet.", left=True)
    return drawing


def elastic() -> Drawing:
    """A run that is killed on two ranks, resumed on four with the same global batches, and one of its steps repeated."""
    drawing = Drawing(
        960,
        330,
        "A run killed on two ranks continues on four with the same global batches; one of its steps is replayed",
    )
    drawing.text(20, 52, "2 ranks", INK, 14, bold=True, left=True)
    drawing.text(20, 148, 'resume="auto"', INK, 14, bold=True, left=True)
    drawing.text(20, 166, "on 4 ranks", left=True)
    for step in range(1, 4):
        drawing.parts(step, 30, ranks=2)
    drawing.text(20 + 130 * 4 + 52, 60, "killed", "#b91c1c", 14, bold=True)
    for step in range(3, 7):
        drawing.parts(step, 128, ranks=4)
    drawing.arrow((20 + 130 * 3 - 14, 96), (20 + 130 * 3 - 14, 118), (20 + 130 * 3 + 10, 118), (20 + 130 * 3 + 10, 126))
    drawing.text(20 + 130 * 3 - 24, 112, "checkpoint of step 2", right=True)
    drawing.text(20, 246, "fit replay", INK, 14, bold=True, left=True)
    drawing.text(20, 264, "--step 5", left=True)
    drawing.arrow((20 + 130 * 5 + 52, 194), (20 + 130 * 5 + 52, 222))
    drawing.shapes.append(f'<rect x="150" y="224" width="780" height="84" rx="6" fill="#111827" stroke="{LINE}"/>')
    for line, text in enumerate(
        (
            "step 5 (epoch 0) from runs/checkpoints/step=00000004, 4 rank(s)",
            "samples: 211, 14, 226, 281, 372, 8, 85, 272",
            "first number that is not finite: the output of net.2 (Linear) in micro-batch 0",
        )
    ):
        drawing.text(166, 250 + 22 * line, text, "#e5e7eb", 13, left=True, font="ui-monospace, monospace")
    return drawing


DRAWINGS = {"run.svg": run_parts, "save.svg": save, "elastic.svg": elastic}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (PICTURES / name).write_text(draw().svg())


if __name__ == "__main__":
    main()
