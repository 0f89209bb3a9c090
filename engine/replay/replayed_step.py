"""What a step that was run again shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.utils.text import terminal_text


@dataclass(slots=True)
class ReplayedStep:
    """One optimizer step, run again from a checkpoint before it. ``str()`` gives it as text."""

    step: int
    """Its number: the optimizer steps done after it."""
    epoch: int
    checkpoint: str
    """The checkpoint that the run was repeated from; empty: from its start."""
    ranks: int
    """Processes that ran it now."""
    recorded_ranks: int
    """Processes of the run."""
    samples: list[int] | None = None
    """Indices of its samples in the dataset, in order (of ready batches: their numbers); ``None`` for a stream."""
    losses: list[list[float]] = field(default_factory=list)
    """The loss of each micro-batch, by rank; of a :class:`engine.Loss` sum / count."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the step logged, over all ranks."""
    grad_norm: float | None = None
    """The 2-norm of its gradients before clipping; ``None`` if the strategy keeps them to itself."""
    grad_norms: dict[str, float] = field(default_factory=dict)
    """The same by parameter."""
    recorded: dict[str, float] | None = None
    """The values of :attr:`metrics` that the run itself has logged at this step; ``None``: nobody looked for them."""
    nonfinite: str | None = None
    """The first place where a number was not finite, in the order of the computation; ``None``: all were finite."""

    def __str__(self) -> str:
        return self.text(per_layer=False)

    def text(self, per_layer: bool) -> str:
        """Lines for people. ``per_layer``: with the norm of each parameter's gradient."""
        of = f"{self.recorded_ranks} rank(s)" + ("" if self.ranks == self.recorded_ranks else f", now on {self.ranks}")
        lines = [f"step {self.step} (epoch {self.epoch}) from {self.checkpoint or 'the start'}, {of}"]
        shown = "a stream: not known" if self.samples is None else ", ".join(map(str, self.samples))
        lines.append(f"samples: {shown}")
        for rank, losses in enumerate(self.losses):
            lines += [f"rank {rank}, micro-batch {index}: loss {loss!r}" for index, loss in enumerate(losses)]
        lines += [f"logged: {name} = {value!r}{self._compared(name, value)}" for name, value in self.metrics.items()]
        if self.recorded == {}:
            lines.append("recorded: nothing at this step, so the values above are not compared with the run's")
        lines.append(f"gradient norm: {'not known' if self.grad_norm is None else repr(self.grad_norm)}")
        if per_layer:
            width = max(map(len, self.grad_norms), default=0)
            lines += [f"  {name.ljust(width)}  {norm:.6g}" for name, norm in self.grad_norms.items()]
        lines.append(f"first number that is not finite: {self.nonfinite or 'none'}")
        return "\n".join(terminal_text(line, one_line=True) for line in lines)

    def _compared(self, name: str, value: float) -> str:
        if self.recorded is None or name not in self.recorded:
            return ""
        recorded = self.recorded[name]
        same = value == recorded or (math.isnan(value) and math.isnan(recorded))
        return ", as recorded" if same else f", recorded: {recorded!r} (differs by {abs(value - recorded):.2g})"
