"""Images, tables and files that a module logs: checked before they are taken, and copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from engine import Callback, Fit, Run, TrainModule
from engine.metrics.media import as_medium


class Gallery(Callback):
    takes = frozenset({"image", "text", "table", "artifact"})

    def __init__(self) -> None:
        self.got: list[tuple[int, str, str, Any, dict[str, Any]]] = []

    def on_media(self, run: Run, module: nn.Module, kind: str, name: str, value: Any, options: dict[str, Any]) -> None:
        self.got.append((run.step, kind, name, value, options))


class Painter(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 2, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log_image("weight", self.weight, caption=f"batch {batch_idx}")
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_a_callback_gets_copies_of_the_values_at_their_step(tmp_path: Path) -> None:
    gallery, module = Gallery(), Painter()
    Fit(max_steps=2, root_dir=tmp_path, callbacks=gallery).run(module, [torch.zeros(1)] * 2)
    assert [(step, kind, name, options["caption"]) for step, kind, name, _, options in gallery.got] == [
        (0, "image", "weight", "batch 0"),
        (1, "image", "weight", "batch 1"),
    ]
    assert [value.tolist() for *_, value, _ in gallery.got] == [
        [[[0.0, 0.0], [0.0, 0.0]]],
        [[[-1.0, -1.0], [-1.0, -1.0]]],
    ]


def test_the_sanity_check_logs_no_media(tmp_path: Path) -> None:
    class Validates(Painter):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.weight.sum()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log_text("note", f"step {self.global_step}")

    gallery = Gallery()
    fit = Fit(max_steps=2, num_sanity_val_steps=1, val_every="1 steps", root_dir=tmp_path, callbacks=gallery)
    fit.run(Validates(), [torch.zeros(1)] * 2, [torch.zeros(1)])
    assert [value for _, _, _, value, _ in gallery.got] == ["step 1", "step 2"]


def test_a_kind_that_no_logger_takes_is_left_out_with_one_warning(tmp_path: Path) -> None:
    class Noisy(Painter):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log_audio("hum", torch.zeros(8), 8000)
            return self.weight.sum()

    gallery = Gallery()
    with pytest.warns(UserWarning, match="log_audio: no logger of this run takes it; 'hum' and others") as said:
        Fit(max_steps=2, root_dir=tmp_path, callbacks=gallery).run(Noisy(), [torch.zeros(1)] * 2)
    assert len(said) == 1
    assert not gallery.got


def test_outside_a_run_nothing_is_recorded() -> None:
    with pytest.warns(UserWarning, match=r"Painter.log_text\(\) outside a Fit run records nothing"):
        Painter().log_text("note", "hello")


def test_arrays_and_pictures_become_tensors() -> None:
    assert as_medium("image", "a", numpy.zeros((2, 3), dtype="uint8")).shape == (2, 3)
    assert as_medium("histogram", "a", [1, 2, 3]).tolist() == [1, 2, 3]
    Image = pytest.importorskip("PIL.Image")
    picture = Image.new("RGB", (5, 4), (255, 0, 7))
    assert as_medium("image", "a", picture)[:, 0, 0].tolist() == [255, 0, 7]
    assert as_medium("image", "a", picture).shape == (3, 4, 5)
    assert as_medium("image", "a", picture.convert("L")).shape == (4, 5)


@pytest.mark.parametrize(
    ("kind", "value", "error", "words"),
    [
        ("image", torch.zeros(5, 4, 3), ValueError, r"shape \(5, 4, 3\).*permute"),
        ("image", torch.zeros(4), ValueError, r"shape \(4,\)"),
        ("image", torch.zeros(2, 2, dtype=torch.int64), TypeError, "int64"),
        ("image", "cat.png", TypeError, "got str"),
        ("histogram", torch.zeros(0), ValueError, "no values"),
        ("histogram", torch.zeros(2, dtype=torch.complex64), TypeError, "complex"),
        ("text", 3, TypeError, "got int: give a str"),
        ("audio", torch.zeros(3, dtype=torch.int16), ValueError, "int16"),
        ("figure", 3, TypeError, "give a figure"),
        ("table", (["a", "b"], [[1, 2], [3]]), ValueError, "row 1 has 1 values for 2 columns"),
        ("table", ("ab", [[1, 2]]), TypeError, "columns must be a list"),
        ("artifact", "no/such/file", ValueError, "does not exist"),
        ("artifact", 3, TypeError, "give the path"),
        ("imagge", torch.zeros(2, 2), ValueError, "'image'"),
    ],
)
def test_wrong_values_are_errors_that_name_them(kind: str, value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        as_medium(kind, "name", value)
    with pytest.raises(TypeError, match="not empty"):
        as_medium("text", "", "x")
