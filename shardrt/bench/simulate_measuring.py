"""What a simulation is made from: settings, and what is measured for them on a few real ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from shardrt.bench.shapes import SIZES
from shardrt.bench.simulate_events import FULL_SHARD, SCHEDULES
from shardrt.bench.simulate_model import CostModel, Sample, fit, fit_error
from shardrt.errors import ConfigError
from shardrt.launch import OnEvent, launch_ranks

KINDS = (*SCHEDULES, FULL_SHARD)
"""What is simulated: schedules of ZeRO-1 and ZeRO-2, which move the same, and ZeRO-3."""
CHECKED = (2, 4)
"""Numbers of ranks on which real steps are measured beside simulated ones."""
_BUCKET_MB = {"small": 0.5, "40m": 8.0}
_BYTES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 16 * 2**20)


@attrs.frozen(kw_only=True)
class SimulateSettings:
    """What to simulate, and what to measure for it.

    Example:
        >>> from shardrt.bench.simulate import SimulateSettings
        >>> SimulateSettings(straggle=-1)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: straggle must be a number from 0 up, got -1
    """

    ranks: tuple[int, ...] = (1_000, 10_000)
    worlds: tuple[int, ...] = (2, 4, 8)
    """Numbers of real ranks on which collectives are measured."""
    size: str = "40m"
    bucket_mb: float | None = None
    """Of all schedules but ``sync``, which has one bucket; by default as fits the size."""
    straggle: float = 0.02
    """How late ranks are on average, as a share of forward and backward."""
    seed: int = 0
    repeats: int = 5
    backend: str = "gloo"
    nbytes: tuple[int, ...] = _BYTES

    def __attrs_post_init__(self) -> None:
        for name, sizes in {"ranks": self.ranks, "worlds": self.worlds}.items():
            if not sizes or any(type(size) is not int or size < 2 for size in sizes):
                raise ConfigError(f"{name} must be whole numbers from 2 up, got {list(sizes)}")
        if type(self.straggle) not in (int, float) or not 0 <= self.straggle < float("inf"):
            raise ConfigError(f"straggle must be a number from 0 up, got {self.straggle!r}")
        if self.size not in SIZES:
            raise ConfigError(f"there is no size {self.size!r}; choose among {', '.join(SIZES)}")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ConfigError(f"bucket_mb must be above 0, got {self.bucket_mb!r}")
        if type(self.repeats) is not int or self.repeats < 1:
            raise ConfigError(f"repeats must be a whole number from 1 up, got {self.repeats!r}")

    @property
    def checked(self) -> tuple[int, ...]:
        """Worlds in which real steps are measured."""
        return tuple(ranks for ranks in self.worlds if ranks in CHECKED) or self.worlds[:1]

    @property
    def bucket_bytes(self) -> int:
        """Of all schedules but ``sync``."""
        return int((self.bucket_mb or _BUCKET_MB[self.size]) * 2**20)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in attrs.asdict(self).items()}


@attrs.frozen(kw_only=True)
class Measured:
    """What a simulation is made from, measured here or read from an earlier run's document."""

    model: CostModel
    computation: Mapping[str, float]
    """Seconds of forward, backward and update of the whole model, on a rank with a processor of its own."""
    off: float | None = None
    """How far the model is off from what it was fitted to, the median."""
    samples: tuple[Sample, ...] = ()
    checks: tuple[Mapping[str, Any], ...] = ()
    """Real steps, by world: ``ranks``, ``sharing``, ``computation`` and ``steps`` by kind."""

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values."""
        return {
            "model": self.model.to_json(),
            "computation": dict(self.computation),
            "fit_error": self.off,
            "samples": [attrs.asdict(sample) for sample in self.samples],
        }

    @classmethod
    def read(cls, path: Path) -> Measured:
        """From the document of an earlier run."""
        try:
            found = json.loads(path.read_bytes())["measured"]
            model, computation = CostModel.from_json(found["model"]), found["computation"]
            parts = {name: float(computation[name]) for name in ("forward", "backward", "update")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{str(path)!r} is no document of `shardrt bench simulate --json`: {type(error).__name__}: {error}"
            ) from error
        return cls(model=model, computation=parts, off=found.get("fit_error"))


def measure(settings: SimulateSettings, on_event: OnEvent | None, patience: float) -> Measured:
    told = {
        "worlds": list(settings.worlds),
        "checked": list(settings.checked),
        "schedules": list(KINDS),
        "sizes": list(settings.nbytes),
        "size": settings.size,
        "bucket_mb": settings.bucket_bytes / 2**20,
        "repeats": settings.repeats,
        "backend": settings.backend,
        "patience": patience,
    }
    answers = launch_ranks(
        "shardrt.bench.simulate_rank", told, ranks=max(settings.worlds), on_event=on_event, patience=patience
    )
    samples: list[Sample] = []
    checks: list[Mapping[str, Any]] = []
    for number, ranks in enumerate(settings.worlds):
        found = [answer[number] for answer in answers if answer[number] is not None]
        sharing = max(1.0, ranks / len(os.sched_getaffinity(0)))
        for rows in zip(*(one["collectives"] for one in found), strict=True):
            operation, nbytes, _ = rows[0]
            slowest = max(row[2] for row in rows)
            samples.append(Sample(operation=operation, ranks=ranks, nbytes=nbytes, seconds=slowest, sharing=sharing))
        if "steps" in found[0]:
            slowest_parts = {part: max(one["computation"][part] for one in found) for part in found[0]["computation"]}
            steps = {kind: max(one["steps"][kind] for one in found) for kind in KINDS}
            checks.append({"ranks": ranks, "sharing": sharing, "computation": slowest_parts, "steps": steps})
    model = fit(samples, latency=max(answer[0]["latency"] for answer in answers[:2]))
    alone = checks[0]
    return Measured(
        model=model,
        computation={part: seconds / alone["sharing"] for part, seconds in alone["computation"].items()},
        off=fit_error(model, samples),
        samples=tuple(samples),
        checks=tuple(checks),
    )
