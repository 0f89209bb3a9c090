"""Writes predictions to files while a model makes them, and reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from engine import Callback, Run, TensorFiles, open_file, separate, serialize_tensors

_COMPLETE, _WAITING = "complete.json", ".waiting-rank"
_FORMATS = ("safetensors", "jsonl")
_BYTES = 8 << 20
"""Bytes of tensors in a file with ``write_interval="auto"``."""
_LONGEST = 1 << 30
"""Longest line of JSON that is read, in bytes."""
_MOST_LOADERS = 1 << 20
"""Largest number of loaders that is read: each takes memory, even without a batch."""


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions in a format of their own. Override one of its two methods, or both::

        class Rows(BasePredictionWriter):
            def write_on_batch_end(self, run, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
                ...

    Batches are dealt to the ranks in turn, so that batch ``i`` of a rank is number ``i * world_size + rank`` in the data's order. ``batch_indices``
    are the numbers of its samples; ``None`` for a stream and for a sampler of the loader's own, which do not tell them. The arguments are
    Lightning's.

    Args:
        write_interval: ``"batch"``: after each batch; ``"epoch"``: at the end, and until then predictions are in memory;
            ``"batch_and_epoch"``: both.

    Raises:
        ValueError: ``write_interval`` is none of these words.
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        if write_interval not in ("batch", "epoch", "batch_and_epoch"):
            raise ValueError(f"write_interval={write_interval!r}: it must be 'batch', 'epoch' or 'batch_and_epoch'")
        self.interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[list[int] | None]] = []

    def write_on_batch_end(
        self,
        run: Run,
        module: nn.Module,
        prediction: Any,
        batch_indices: list[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the ``prediction`` of one batch."""
        raise NotImplementedError(f"{type(self).__name__} must define write_on_batch_end, or write_interval='epoch'")

    def write_on_epoch_end(self, run: Run, module: nn.Module, predictions: list[Any], batch_indices: list[Any]) -> None:
        """Write this rank's ``predictions``: with several loaders one list each. ``batch_indices`` has a list per loader, even of a single one."""
        raise NotImplementedError(f"{type(self).__name__} must define write_on_epoch_end, or write_interval='batch'")

    def on_predict_start(self, run: Run, module: nn.Module) -> None:
        self._predictions = [[] for _ in run.num_eval_batches]
        self._indices = [[] for _ in run.num_eval_batches]

    def on_predict_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        indices = _indices(run, batch_idx, dataloader_idx)
        if "batch" in self.interval:
            self.write_on_batch_end(run, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if "epoch" in self.interval:
            self._predictions[dataloader_idx].append(outputs)
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, run: Run, module: nn.Module) -> None:
        if "epoch" in self.interval:
            predictions = self._predictions[0] if len(self._predictions) == 1 else self._predictions
            self.write_on_epoch_end(run, module, predictions, self._indices)
            self._predictions, self._indices = [], []


def _indices(run: Run, batch_idx: int, dataloader_idx: int) -> list[int] | None:
    """The numbers of the samples in a batch of this rank; ``None`` if the data is not read in its order."""
    loader = run.loaders.prepared["predict"][dataloader_idx].loader
    size = getattr(loader, "batch_size", None)
    if not isinstance(size, int) or type(getattr(loader, "sampler", None)) is not SequentialSampler:
        return None
    group = run.engine.loss_group
    first = (batch_idx * group.world_size + group.rank) * size
    return [*range(first, min(first + size, len(loader.dataset)))]


class PredictionWriter(Callback):
    """Writes the outputs of ``predict_step`` to files, each rank its part: with ``Fit.predict(..., return_predictions=False)`` none stays in memory.

    :func:`read_predictions` reads the files, in the order of the data, whatever the number of ranks and worker processes. Samples that
    a rank repeats only to keep the ranks matched are not written. A run that is killed leaves the predictions that were written before;
    ``complete.json`` is written last.

    Neither format can contain code:

    - ``"safetensors"``: a file for each ``write_interval``, ``<loader>-<first batch>-rank<r>.safetensors``, with tensors of any dtype but
      complex128 and dtypes that pack or quantize numbers. Batches that wait for their file are in ``.waiting-rank<r>`` meanwhile, where a kill
      leaves them.
    - ``"jsonl"``: one file a rank, ``rank<r>.jsonl``, one line a batch, where tensors are lists:
      ``{"loader": 0, "index": 12, "prediction": ...}``.

    ``index`` is the number of the batch in the data's order, over all ranks. A prediction is a tensor, a NumPy array, a number, a text or
    ``None``, or dicts, lists and tuples of them.
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        write_interval: Literal["auto", "batch", "epoch"] | int = "auto",
        format: Literal["safetensors", "jsonl"] = "safetensors",
        overwrite: bool = False,
    ) -> None:
        """
        Args:
            output_dir: a folder, by default ``predictions`` in the run's folder; with several machines one that all of them see.
            write_interval: ``"auto"``: a file has some megabytes, and yet each batch is on disk when its hook returns; ``"batch"``: a file for
                each batch; a number: a file for that many batches; ``"epoch"``: one file at the end (until then a
                rank's part is in memory).
            format: the format of the files.
            overwrite: remove earlier predictions in the folder; by default they are an error.

        Raises:
            ValueError: an argument is not valid.
        """
        is_number = isinstance(write_interval, int) and not isinstance(write_interval, bool) and write_interval >= 1
        if write_interval not in ("auto", "batch", "epoch") and not is_number:
            raise ValueError(
                f"PredictionWriter(write_interval={write_interval!r}): it must be 'auto', 'batch', 'epoch' or a number of batches; what is written "
                "after batches is complete at the end of the epoch"
            )
        if format not in _FORMATS:
            raise ValueError(f"PredictionWriter(format={format!r}): it must be 'safetensors' or 'jsonl'")
        self.output_dir = None if output_dir is None else Path(output_dir).expanduser()
        self.write_interval, self.format, self.overwrite = write_interval, format, overwrite
        self.folder: Path | None = None
        """The folder of the latest predictions."""
        self._every: int | None = write_interval if isinstance(write_interval, int) else None
        if write_interval == "batch" or (write_interval == "auto" and format == "jsonl"):
            self._every = 1
        self._waiting_file: FileIO | None = None
        self._bytes = 0  # of the batches in the waiting file
        # Batches for the next file: their lines, or their trees and tensors. They are texts, because the garbage collector would visit objects.
        self._waiting: list[str] = []
        self._tensors: dict[str, Tensor] = {}
        self._first = self._loader = 0
        self._counts: list[int] = []
        self._lines: TextIO | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if methods := {"write_on_batch_end", "write_on_epoch_end"} & vars(cls).keys():
            raise TypeError(
                f"{cls.__name__}.{min(methods)} is not called: for files of your own, subclass BasePredictionWriter"
            )

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        if stage != "predict":
            return
        self.folder = run.folder / "predictions" if self.output_dir is None else self.output_dir
        earlier_files = _prediction_files(self.folder)
        if earlier_files and not self.overwrite:
            raise ValueError(
                f"PredictionWriter: {self.folder} has predictions already ({earlier_files[0].name}, ...): give another output_dir, or overwrite=True"
            )

    def on_predict_start(self, run: Run, module: nn.Module) -> None:
        assert self.folder is not None
        run.engine.wait_for_everyone()  # all ranks have looked for earlier predictions
        if run.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in _prediction_files(self.folder):
                path.unlink()
        run.engine.wait_for_everyone()
        self._clear()
        self._loader, self._counts = 0, [0] * len(run.num_eval_batches)

    def on_predict_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        prediction = _with_full_tensors(outputs, type(module).__name__)  # a collective for sharded outputs
        if not run.engine.strategy.is_counted:
            return  # another rank has the same outputs
        if dataloader_idx != self._loader:
            self._write(run)
            self._loader = dataloader_idx
        ranks = run.engine.loss_group  # batches are dealt to them in turn
        index = batch_idx * ranks.world_size + ranks.rank
        if not self._waiting:
            self._first = index
        tensors: dict[str, Tensor] = {}
        if self.format == "jsonl":
            row = {"loader": dataloader_idx, "index": index, "prediction": _jsonable(prediction)}
            self._waiting.append(f"{json.dumps(row)}\n")
        else:
            self._waiting.append(f'"{index}": {_encoded(prediction, str(index), tensors)}')
            self._tensors.update(tensors)
        self._counts[dataloader_idx] += 1
        if self._every is not None and len(self._waiting) >= self._every:
            self._write(run)
        elif self.write_interval == "auto":
            self._append_to_waiting_file(run, tensors)

    def on_predict_end(self, run: Run, module: nn.Module) -> None:
        assert self.folder is not None
        self._write(run)
        if self._waiting_file is not None:
            (self.folder / f"{_WAITING}{run.rank}").unlink()
        counts = run.engine.reduce(torch.tensor(self._counts, dtype=torch.int64, device=run.device)).tolist()
        if run.is_main_process:
            _write_whole_file(self.folder / _COMPLETE, json.dumps({"format": self.format, "batches": counts}).encode())
        run.engine.wait_for_everyone()

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        self._clear()
        if self._waiting_file is not None:
            self._waiting_file.close()
            self._waiting_file = None
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _append_to_waiting_file(self, run: Run, tensors: Mapping[str, Tensor]) -> None:
        """Append the newest batch, which has ``tensors``, to the waiting file; if that is large enough, write a file of predictions."""
        assert self.folder is not None
        if self._waiting_file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._waiting_file = (self.folder / f"{_WAITING}{run.rank}").open("xb", buffering=0)
            self._bytes = 0
        parts = [*serialize_tensors(tensors, self._metadata(self._waiting[-1:]))]
        size = sum(map(len, parts))
        content = b"".join([size.to_bytes(8, "little"), *parts])
        with _naming_file(self._waiting_file.name):
            while content:  # one call writes only a part of 2 GiB and more, or on a disk that is nearly full
                content = content[self._waiting_file.write(content) :]
        self._bytes += size
        if self._bytes >= _BYTES:
            self._write(run)

    def _write(self, run: Run) -> None:
        if not self._waiting:
            return
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.format == "jsonl":
            if self._lines is None:
                path = self.folder / f"rank{run.rank}.jsonl"
                separate(path)
                self._lines = path.open("a", encoding="utf-8")
            with _naming_file(self._lines.name):
                self._lines.writelines(self._waiting)
                self._lines.flush()
        else:
            path = self.folder / f"{self._loader}-{self._first:08d}-rank{run.rank}.safetensors"
            hidden = path.with_name(f".{path.name}")
            with _naming_file(path), hidden.open("wb") as file:
                file.writelines(serialize_tensors(self._tensors, self._metadata(self._waiting)))
            hidden.replace(path)
            if self._waiting_file is not None:
                self._waiting_file.seek(0)
                self._waiting_file.truncate()
                self._bytes = 0
        self._clear()

    def _clear(self) -> None:
        self._waiting.clear()
        self._tensors.clear()

    def _metadata(self, trees: Sequence[str]) -> dict[str, str]:
        """Metadata of a file: the loader, and the structure of each batch."""
        return {"loader": str(self._loader), "trees": f"{{{', '.join(trees)}}}"}


def read_predictions(folder: str | Path, *, partial: bool = False) -> list[Any]:
    """Read the predictions that :class:`PredictionWriter` wrote: one entry a batch in the order of the data; several loaders give one list each.

    Args:
        folder: the writer's ``folder``.
        partial: also read the predictions of a run that has not ended.

    Returns:
        Predictions as ``predict_step`` returned them, on the CPU; from ``jsonl`` with lists for tensors and tuples.

    Raises:
        FileNotFoundError: ``folder`` has no complete predictions.
        ValueError: files are missing, or a file does not hold predictions; the message names it.
    """
    folder = Path(folder)
    by_loader: dict[int, dict[int, Any]] = {}
    complete: list[int] | None = None
    for path in _prediction_files(folder):
        try:
            if path.name == _COMPLETE:
                complete = _counts(path)
            else:
                _add_file(by_loader, path)
        except (
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
            AttributeError,
            SafetensorError,
        ) as error:
            raise ValueError(
                f"{path} does not hold predictions that PredictionWriter has written: {error!s:.500}"
            ) from error
    if complete is None and not partial:
        kind = ValueError if by_loader else FileNotFoundError
        raise kind(
            f"{folder} has no complete predictions ({_COMPLETE} is missing); partial=True reads what was written"
        )
    counts = [0] * (max(by_loader, default=-1) + 1) if complete is None else complete
    read_counts = [len(by_loader.get(loader, {})) for loader in range(len(counts))]
    if not partial and read_counts != counts:
        raise ValueError(
            f"{folder} has {read_counts} batches of its loaders, and {counts} were written: files are missing; partial=True reads the others"
        )
    results = [
        [by_loader[loader][i] for i in sorted(by_loader[loader])] if loader in by_loader else []
        for loader in range(len(counts))
    ]
    return results[0] if len(results) == 1 else results


def _prediction_files(folder: Path) -> list[Path]:
    """The files with predictions in ``folder``.

    Raises:
        PermissionError: the folder may not be read.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    patterns = "*-rank*.safetensors", "rank*.jsonl", f"{_WAITING}*", _COMPLETE
    return [folder / name for pattern in patterns for name in names if fnmatchcase(name, pattern)]


def _counts(path: Path) -> list[int]:
    """Return the number of batches of each loader.

    Raises:
        ValueError: the file is not one of :class:`PredictionWriter`.
    """
    with os.fdopen(open_file(path), "rb") as file:
        counts = json.loads(file.read(_LONGEST) or b"")["batches"]
    if not isinstance(counts, list) or not all(type(count) is int for count in counts):
        raise ValueError(f"'batches' is {counts!r:.60}")
    return counts


def _add_file(by_loader: dict[int, dict[int, Any]], path: Path) -> None:
    """Add the predictions in a file. The file may be anything: only its name was checked."""
    if path.suffix == ".jsonl":
        with os.fdopen(open_file(path), "rb") as file:
            while (line := file.readline(_LONGEST)).endswith(b"\n"):  # otherwise the run was killed while it wrote
                row = json.loads(line)
                _batches(by_loader, row["loader"])[int(row["index"])] = row["prediction"]
        if len(line) == _LONGEST:
            raise ValueError(f"a line has more than {_LONGEST:,} bytes")
    elif path.name.startswith(_WAITING):
        for content in _complete_parts(path):
            metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
            _add_batches(by_loader, metadata, load(content).__getitem__)
    elif not path.name.startswith("."):  # a kill left that one half written
        files = TensorFiles(path, [path])
        _add_batches(by_loader, files.metadata[path], files.whole_tensors().__getitem__)


def _complete_parts(path: Path) -> Iterator[bytes]:
    """The parts of a waiting file. A hole ends it, and so does a last part that a kill left unfinished."""
    with os.fdopen(open_file(path), "rb") as file:
        remaining = os.fstat(file.fileno()).st_size
        while 0 < (size := int.from_bytes(file.read(8), "little")) <= (remaining := remaining - 8):
            yield file.read(size)
            remaining -= size


def _batches(by_loader: dict[int, dict[int, Any]], loader: Any) -> dict[int, Any]:
    """The batches of a loader, by their numbers.

    Raises:
        ValueError: no run has a loader of this number.
    """
    if not 0 <= int(loader) < _MOST_LOADERS:
        raise ValueError(f"the loader is {loader!r:.60}")
    return by_loader.setdefault(int(loader), {})


def _add_batches(
    by_loader: dict[int, dict[int, Any]], metadata: Mapping[str, str], tensor: Callable[[str], Tensor]
) -> None:
    batches = _batches(by_loader, metadata["loader"])
    batches.update({int(index): _decoded(tree, tensor) for index, tree in json.loads(metadata["trees"]).items()})


@contextmanager
def _naming_file(path: Any) -> Iterator[None]:
    """Add the file's name to errors of the block, such as a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _write_whole_file(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all."""
    hidden = path.with_name(f".{path.name}")
    hidden.unlink(missing_ok=True)  # it may be a pipe, or a link to somewhere else
    with _naming_file(path), hidden.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)


def _with_full_tensors(value: Any, who: str) -> Any:
    """Return the prediction with sharded tensors gathered and NumPy arrays as tensors.

    Raises:
        TypeError: the prediction contains an object that :class:`PredictionWriter` cannot write.
    """
    if isinstance(value, Tensor):
        return value.full_tensor() if hasattr(value, "full_tensor") else value
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return torch.as_tensor(value)
    if isinstance(value, Mapping):
        items = {str(key): _with_full_tensors(item, who) for key, item in value.items()}
        if len(items) < len(value):
            raise TypeError(
                f"{who}.predict_step returned two keys with the same text among {[*value]!r:.60}: keys are written as texts, "
                "which must differ"
            )
        return items
    if isinstance(value, (list, tuple)):
        parts = [_with_full_tensors(item, who) for item in value]
        return parts if isinstance(value, list) else tuple(parts)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{who}.predict_step returned {value!r:.60} of type {type(value).__name__}, which cannot be written: return tensors, numbers, texts, or "
        "dicts, lists and tuples of them"
    )


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> str:
    """Return ``value`` as JSON, where each container is a list of its kind and its items, and copy its tensors into ``tensors``."""
    if isinstance(value, Tensor):
        path = path.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be in a file
        # {"a.b": ..., "a": {"b": ...}} has one name twice; the suffix stands for pairs of numbers.
        while path in tensors or path.endswith("@complex128"):
            path += "'"
        tensors[path] = value.clone() if value.is_cpu else value.cpu()
        return f'["tensor", {json.dumps(path)}]'
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_encoded(item, f'{path}.{key}', tensors)}" for key, item in value.items()]
        return f'["dict", {{{", ".join(items)}}}]'
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return f'["{"list" if isinstance(value, list) else "tuple"}", [{", ".join(items)}]]'
    return json.dumps(value)


def _decoded(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Rebuild the prediction that :func:`_encoded` took apart."""
    if not isinstance(tree, list):
        return tree
    kind, content = tree
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return {key: _decoded(item, tensor) for key, item in content.items()}
    items = [_decoded(item, tensor) for item in content]
    return items if kind == "list" else tuple(items)


def _jsonable(value: Any) -> Any:
    """Return ``value`` with lists for tensors and tuples, for JSON."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value
