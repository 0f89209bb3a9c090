"""``Plan``: the forecast of a run on many ranks, from one traced step of each rank that differs from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.checkpoint import manifest
from engine.checkpoint.content import file_count
from engine.planning import device_memory, paper_formulas, step_time
from engine.planning.device_memory import Need, is_enough, memory_need
from engine.planning.device_table import Hardware
from engine.planning.job import BatchStage, Job
from engine.planning.paper_formulas import Check
from engine.planning.plan_page import page
from engine.planning.plan_text import as_text, plural, show_plan
from engine.planning.rank_trace import Collective as Collective
from engine.planning.rank_trace import HostTraffic as HostTraffic
from engine.planning.rank_trace import Memory as Memory
from engine.planning.rank_trace import Moment as Moment
from engine.planning.rank_trace import Operation as Operation
from engine.planning.rank_trace import RankTrace as RankTrace
from engine.planning.step_time import BUBBLE_FORMULAS, StepTime, bubble_fraction, model_flops
from engine.utils.hard_links import separate
from engine.utils.paths import expanded

VERSION = 2
"""Version of :meth:`Plan.as_json`. Adding keys keeps it; a key that changes its meaning increases it."""
_MOMENTS = 2000
"""The maximum number of moments of a rank's timeline in :meth:`Plan.as_json`. A longer timeline keeps the highest of neighbouring moments."""


@dataclass(frozen=True)
class Plan:
    """Memory, communication and time of a run, as :meth:`engine.Fit.plan` forecasts them.

    ``print(plan)`` shows it as tables; ``plan.write_page("plan.html")`` writes one page that opens without network.
    """

    traces: tuple[RankTrace, ...]
    """The traced steps: one for each group of ranks that do the same work."""
    job: Job
    """The planned job."""
    device: Hardware
    """The device of each rank, and the links between them."""
    price: float | None = None
    """Price of one device for one hour, in any currency."""
    storage: float | None = None
    """Bytes a second at which all ranks together write checkpoints."""

    def __post_init__(self) -> None:
        if not self.traces:
            raise ValueError("a plan needs the trace of at least one rank")

    # -- memory -----------------------------------------------------------------------------------------------------------------

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """Memory need of each traced rank on its device, margins included."""
        return tuple(memory_need(trace, self.device) for trace in self.traces)

    @cached_property
    def worst(self) -> RankTrace:
        """The rank that needs the most memory."""
        return max(zip(self.needs, self.traces, strict=True), key=lambda pair: pair[0].total)[1]

    @property
    def need(self) -> Need:
        """Memory need of :attr:`worst`."""
        return self.needs[self.traces.index(self.worst)]

    @property
    def peak_bytes(self) -> int:
        """The largest memory need of a rank: the peak of its tensors, the allocator's rounding and the margins."""
        return self.need.total

    @property
    def memory_bytes(self) -> int:
        """Memory of a device (bytes)."""
        return self.device.memory

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory that it needs, margins included."""
        return self.peak_bytes <= self.memory_bytes

    @property
    def verdict(self) -> str:
        """Whether the run fits into the memory: ``"yes"``, ``"only without the margins"`` or ``"no"``.

        Without the margins the tensors fit, but not with what may come on top; or they fit only if the allocator returns memory to the device and
        asks for new memory in each step, which takes time.
        """
        if self.fits:
            return "yes"
        enough = all(is_enough(trace, self.device) for trace in self.traces)
        return "only without the margins" if enough else "no"

    # -- time -------------------------------------------------------------------------------------------------------------------

    @cached_property
    def bubble(self) -> float:
        """The fraction of the passes' time that the ranks of a pipeline wait."""
        if self.job.schedule is None:
            return 0.0
        return bubble_fraction(self.job.schedule, self.job.pipeline, self.job.parts)

    @cached_property
    def times(self) -> tuple[StepTime, ...]:
        """Step time of each traced rank."""
        ranks_per_node = self.job.ranks_per_node
        options = {"tf32": self.job.tf32, "compiled": self.job.compiled}
        return tuple(
            step_time.step_time(trace, self.device, ranks_per_node, bubble=self.bubble, **options)
            for trace in self.traces
        )

    @cached_property
    def slowest(self) -> StepTime:
        """Step time of the slowest rank, for which all others wait."""
        return max(self.times, key=lambda time: time.expected_s)

    @property
    def step_seconds(self) -> float:
        """The estimated seconds of one optimizer step."""
        return self.slowest.expected_s

    @property
    def samples_per_step(self) -> int:
        """Samples of a step over all ranks: the global batch."""
        return max(trace.samples for trace in self.traces) * self.job.data_ranks

    @property
    def samples_per_second(self) -> float:
        """Samples a second over all ranks."""
        return self.samples_per_step / self.step_seconds if self.step_seconds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second over all ranks; ``None``: the tokens of a sample are not known."""
        length = self.job.shape.sequence if self.job.shape else 0
        return self.samples_per_second * length if length else None

    @cached_property
    def peak_flops(self) -> float:
        """The device's peak operations a second in the dtype of most of the step's FLOPs."""
        by_dtype: dict[str, int] = {}
        for operation in self.traces[0].operations:
            by_dtype[operation.dtype] = by_dtype.get(operation.dtype, 0) + operation.flops * operation.count
        return self.device.peak(max(by_dtype, key=lambda name: by_dtype[name], default="float32"), self.job.tf32)

    def _utilization(self, seconds: float) -> float:
        model_flop_count = max(model_flops(trace.operations) for trace in self.traces)
        return model_flop_count / (self.peak_flops * seconds) if seconds else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization at the estimated step time: FLOPs without recomputation over what the device could do in that time."""
        return self._utilization(self.step_seconds)

    @property
    def mfu_bound(self) -> float:
        """Model FLOPs utilization if all communication is hidden and there is no bubble."""
        return self._utilization(max(time.best_s for time in self.times))

    # -- the whole run ----------------------------------------------------------------------------------------------------------

    @property
    def total_seconds(self) -> float | None:
        """Seconds of all steps, without validation, checkpoints and waiting for data; ``None``: the number of steps is not known. Where
        ``global_batch_size`` has stages, a smaller step takes as much less time as it has fewer micro-batches."""
        if self.job.stages:
            return sum(stage.steps * self._stage_seconds(stage) for stage in self.job.stages)
        steps = self.job.total_steps
        return None if steps is None else steps * self.step_seconds

    def _stage_seconds(self, stage: BatchStage) -> float:
        """The seconds of a step in a stage."""
        return self.step_seconds * stage.window / self.job.window

    def _stages(self) -> list[dict[str, Any]]:
        """The stages of ``global_batch_size``: what a step is in each, and how long all of its steps take."""
        return [
            {
                "start": stage.start,
                "steps": stage.steps,
                "samples_per_step": self.samples_per_step * stage.window // self.job.window,
                "step_s": self._stage_seconds(stage),
                "seconds": stage.steps * self._stage_seconds(stage),
            }
            for stage in self.job.stages
        ]

    def _cost(self, seconds: float | None) -> float | None:
        return None if self.price is None or seconds is None else self.price * self.job.world_size * seconds / 3600

    @property
    def cost(self) -> float | None:
        """Cost of all steps; ``None`` without a price or a number of steps."""
        return self._cost(self.total_seconds)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: the whole model and its optimizer's state."""
        return self.job.parameter_bytes + self._optimizer_bytes

    @property
    def checkpoint_files(self) -> int:
        """The maximum number of files in a checkpoint: each rank writes its share of the model and of the optimizer's state, and its own state; a
        small checkpoint of one rank has a file of tensors and a manifest. Files for tensors in callbacks' states and for other weights are not
        counted."""
        ranks = self.job.world_size
        if ranks == 1 and self.checkpoint_bytes <= manifest.JOINED_BYTES:
            return 2
        shares = (self.job.parameter_bytes // ranks, self._optimizer_bytes // ranks)
        tensors = sum(file_count(share) for share in shares if share)
        return ranks * (tensors + 2) + 4

    @property
    def copy_bytes(self) -> int:
        """Bytes of a rank's share of a checkpoint, which an asynchronous save copies into the host's memory."""
        return -(-self.checkpoint_bytes // self.job.world_size)

    @cached_property
    def _optimizer_bytes(self) -> int:
        """Bytes of the whole optimizer state; if not known, in proportion to the parameters as on the traced ranks."""
        if self.job.optimizer_bytes is not None:
            return self.job.optimizer_bytes
        states = [trace.timeline[-1].memory if trace.timeline else trace.peak.memory for trace in self.traces]
        parameters = sum(state.parameters for state in states)
        total = self.job.parameter_bytes - self.job.buffer_bytes
        return round(sum(state.optimizer_state for state in states) / parameters * total) if parameters else 0

    @property
    def missing(self) -> tuple[str, ...]:
        """Sentences on what could not be traced, which the numbers leave out."""
        return tuple(dict.fromkeys(line for trace in self.traces for line in trace.missing))

    @property
    def computed(self) -> tuple[str, ...]:
        """Sentences on numbers that come from formulas rather than from the trace."""
        return tuple(dict.fromkeys(line for trace in self.traces for line in trace.computed))

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """Comparisons of traced numbers with published formulas; none if the model is not known to be a dense transformer."""
        return paper_formulas.checks(self.job, self.traces, self.worst, self.samples_per_step)

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences on everything that the estimates assume."""
        job, device = self.job, self.device
        sentences = [
            f"device: {device.source or 'given'}",
            *device.notes,
            *device_memory.assumptions(device, self.worst.collectives),
            *step_time.compute_assumptions(device, tf32=job.tf32, compiled=job.compiled),
        ]
        if job.nodes > 1:
            sentences.append(
                f"neighbouring ranks share a node: {plural(job.ranks_per_node, 'rank')} on each of {job.nodes}"
            )
        sentences += step_time.host_assumptions(self.worst, device)
        sentences += step_time.offload_assumptions(self.worst, device)
        if job.world_size > 1:
            sentences.append(
                "of the ranks that do the same one is traced; where shards do not divide evenly, one with the largest"
            )
            sentences += [*step_time.COLLECTIVE_ASSUMPTIONS, *step_time.overlap_assumptions(device)]
        if job.schedule is not None:
            sentences.append(
                f"pipeline: the bubble of {job.schedule} by {BUBBLE_FORMULAS[job.schedule]}; all stages as slow as the slowest"
            )
        sentences.append(
            "all steps are like the traced one; data is always ready; validation, logging and checkpoints take no time"
        )
        if self.storage is not None:
            sentences.append(
                "a checkpoint is written at the given bandwidth, which all ranks share; an asynchronous one overlaps with steps"
            )
        return tuple(sentences)

    # -- showing ----------------------------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """The plan as plain dicts, lists and values; its keys are documented in ``engine/planning/README.md``."""
        job, slowest = self.job, self.slowest
        return {
            "version": VERSION,
            "job": job.as_json(),
            "device": asdict(self.device),
            "fits": self.fits,
            "verdict": self.verdict,
            "memory": {"device_bytes": self.memory_bytes, "need_bytes": self.peak_bytes, **asdict(self.need)},
            "ranks": [self._rank(index) for index in range(len(self.traces))],
            "worst_rank": self.worst.rank,
            "time": {
                "step_s": self.step_seconds,
                "best_s": max(time.best_s for time in self.times),
                "worst_s": max(time.worst_s for time in self.times),
                "compute_s": slowest.compute.seconds,
                "communication_s": slowest.communication_s,
                "exposed_communication_s": slowest.exposed_s,
                "bubble_s": slowest.bubble_s,
                "host_s": slowest.host_s,
                "bubble_fraction": self.bubble,
                "mfu": self.mfu,
                "mfu_bound": self.mfu_bound,
                "samples_per_second": self.samples_per_second,
                "tokens_per_second": self.tokens_per_second,
            },
            "data": {
                "samples_per_rank_and_step": max(trace.samples for trace in self.traces),
                "samples_per_step": self.samples_per_step,
                "samples_per_epoch": job.samples_per_epoch,
                "steps_per_epoch": job.steps_per_epoch,
                "epochs": job.total_steps / job.steps_per_epoch if job.total_steps and job.steps_per_epoch else None,
                "steps": job.total_steps,
                "seconds": self.total_seconds,
                **({"stages": self._stages()} if job.stages else {}),
            },
            "checkpoint": {
                "bytes": self.checkpoint_bytes,
                "files": self.checkpoint_files,
                "copy_bytes": self.copy_bytes,
                "seconds": self.checkpoint_bytes / self.storage if self.storage else None,
            },
            "cost": {
                "price_per_device_hour": self.price,
                "per_1000_steps": self._cost(1000 * self.step_seconds),
                "total": self.cost,
            },
            "checks": [{**asdict(check), "differs": check.differs} for check in self.checks],
            "missing": list(self.missing),
            "computed": list(self.computed),
            "assumptions": list(self.assumptions),
        }

    def _rank(self, index: int) -> dict[str, Any]:
        """The values of one traced rank for :meth:`as_json`."""
        trace, time, needed = self.traces[index], self.times[index], self.needs[index]
        compute = time.compute
        return {
            "rank": trace.rank,
            "role": trace.role,
            "stands_for": trace.stands_for,
            "samples": trace.samples,
            "micro_batches": trace.micro_batches,
            "need": {**asdict(needed), "total": needed.total},
            "peak": _moment(trace.peak),
            "held_at_peak": dict(trace.held_at_peak),
            "timeline": [_moment(moment) for moment in _thinned(trace.timeline)],
            "compute": {
                "flops": compute.flops,
                "model_flops": model_flops(trace.operations),
                "bytes": compute.bytes,
                "arithmetic_intensity": compute.intensity,
                "seconds": compute.seconds,
                "arithmetic_s": compute.arithmetic_s,
                "memory_s": compute.memory_s,
                "dispatch_s": compute.dispatch_s,
            },
            "collectives": [
                {
                    **{key: value for key, value in asdict(sent.collective).items() if key != "ranks"},
                    "group_size": len(sent.collective.ranks),
                    "seconds": sent.seconds,
                    "overlaps": sent.overlaps,
                }
                for sent in time.sent
            ],
            "step_s": time.expected_s,
            **(
                {}
                if trace.offloaded is None
                else {"offloaded": {**asdict(trace.offloaded), "waiting_s": time.offload_s}}
            ),
        }

    def write_page(self, path: str | Path) -> Path:
        """Write one HTML page with a timeline of the memory to ``path``, and return it; the page opens without network."""
        path = Path(expanded(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        separate(path)
        path.write_text(page(self.as_json()), encoding="utf-8")
        return path

    def __str__(self) -> str:
        return as_text(self.as_json(), show_plan)


def _moment(moment: Moment) -> dict[str, Any]:
    memory = {category.name: getattr(moment.memory, category.name) for category in fields(moment.memory)}
    return {"phase": moment.phase, "module": moment.module, "memory": {**memory, "total": moment.memory.total}}


def _thinned(timeline: Sequence[Moment]) -> list[Moment]:
    """At most :data:`_MOMENTS` of the moments: of each group of neighbouring ones the one with the most memory."""
    width = -(-len(timeline) // _MOMENTS) or 1
    return [
        max(timeline[start : start + width], key=lambda moment: moment.memory.total)
        for start in range(0, len(timeline), width)
    ]
