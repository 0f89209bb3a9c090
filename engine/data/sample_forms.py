"""Compares the samples of a mixture's sources: torch's ``default_collate`` makes batches only of samples that have one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """The form of a sample, or of an entry of one."""

    kind: str
    shape: tuple[int, ...] = ()
    entries: Mapping[Any, Form] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.kind == "a dict":
            return f"a dict with the keys {', '.join(map(str, self.entries)) or '(none)'}"
        return f"a tensor of shape {list(self.shape)}" if self.kind == "a tensor" else self.kind


def form_of(sample: Any) -> Form:
    """The form of a sample."""
    if isinstance(sample, Mapping):
        return Form("a dict", entries={key: form_of(value) for key, value in sample.items()})
    if isinstance(sample, (Tensor, numpy.ndarray)):
        return Form("a tensor", tuple(sample.shape))
    if isinstance(sample, (tuple, list)):
        return Form(f"{type(sample).__name__} of {len(sample)}", entries=dict(enumerate(map(form_of, sample))))
    if isinstance(sample, (bool, int, float, numpy.number, numpy.bool_)):
        return Form("a number")
    return Form("a text" if isinstance(sample, (str, bytes)) else type(sample).__name__)


class SampleForms:
    """The forms of the samples of several sources, which must be alike.

    Sources of the library say their keys before they are read (``sample_keys``), and rows of one length this length. Of others the first sample is
    looked at when it is read.

    Args:
        names: those of the sources.
        sources: the datasets.

    Raises:
        ValueError: two sources say that their samples are unlike.
    """

    def __init__(self, names: Sequence[str], sources: Sequence[Any]) -> None:
        self.names = names
        self.unseen = set(range(len(names)))
        """The numbers of the sources of which no sample was looked at."""
        self._first: tuple[str, Form] | None = None
        """The source of the first sample that was looked at, and its form."""
        forms = [(name, _told_form(source)) for name, source in zip(names, sources, strict=True)]
        before: tuple[str, Form] | None = None
        for name, form in forms:
            if form is not None and before is not None:
                _compare(*before, name, form)
            before = before if form is None else (name, form)

    def see(self, s: int, sample: Any) -> None:
        """Look at the first sample of source ``s``.

        Raises:
            ValueError: it is unlike that of another source.
        """
        self.unseen.discard(s)
        form = form_of(sample)
        if self._first is None:
            self._first = self.names[s], form
        else:
            _compare(*self._first, self.names[s], form)


def _told_form(source: Any) -> Form | None:
    """The form of a source's samples as it says before it is read; ``None``: it does not."""
    keys, length = getattr(source, "sample_keys", None), getattr(source, "tokens_per_sample", None)
    if keys is None:
        return None
    return Form("a dict", entries={key: Form("a tensor", () if length is None else (length,)) for key in keys})


def _compare(name: str, form: Form, other_name: str, other: Form) -> None:
    """Refuse unlike samples of two sources."""
    if difference := _difference(name, form, other_name, other, ""):
        raise ValueError(
            f"Mixture: {difference}. One batch cannot have both: let all sources give samples of one form, or give DataLoader(collate_fn=) a "
            "function that joins them"
        )


def _difference(name: str, form: Form, other_name: str, other: Form, entry: str) -> str:
    """The first difference between two forms as text; empty: there is none."""
    if form.kind == other.kind and form.shape == other.shape and form.entries.keys() == other.entries.keys():
        parts = (
            _difference(name, part, other_name, other.entries[key], f"{entry}[{key!r}]")
            for key, part in form.entries.items()
        )
        return next((part for part in parts if part), "")
    return f"a sample{entry} of {name!r} is {form}, and of {other_name!r} {other}"
