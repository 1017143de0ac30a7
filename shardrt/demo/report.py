"""What all ranks brought home, put side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import attrs

from shardrt.demo.settings import DemoSettings


@attrs.frozen(kw_only=True)
class DemoReport:
    """The results of the ranks and what follows from them.

    ``answers`` are what :mod:`shardrt.demo.worker` returns, in rank order.
    """

    settings: DemoSettings
    answers: Sequence[dict[str, Any]]
    seconds: float

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks ended with the same bits."""
        return len({answer["digest"] for answer in self.answers}) == 1

    @property
    def largest_difference(self) -> float:
        """The largest difference of any parameter on any rank from the unsharded run."""
        return max(float(answer["largest_parameter_difference"]) for answer in self.answers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the model."""
        return int(self.answers[0]["parameter_bytes"])

    @property
    def least_bytes_per_step(self) -> float:
        """What a rank must send on average: everyone else's share of the gradients, and its own of the parameters."""
        ranks = self.settings.ranks
        return 2 * (ranks - 1) / ranks * self.parameter_bytes

    @property
    def sent_per_step(self) -> list[float]:
        """Bytes that each rank really sent."""
        return [answer["sharded"]["sent"] / self.settings.steps for answer in self.answers]

    @property
    def traffic_ratio(self) -> float | None:
        """The mean of what ranks sent over the least possible; None where nothing has to travel."""
        least = self.least_bytes_per_step
        return statistics.fmean(self.sent_per_step) / least if least else None

    @property
    def imbalance(self) -> float:
        """The fullest rank's share of the parameters over the mean: 1.0 is perfect."""
        owned = self.answers[0]["sharded"]["owned_bytes"]
        return float(max(owned) / statistics.fmean(owned))

    def optimizer_bytes(self, run: str) -> int:
        """Optimizer state of the rank that has most."""
        return max(int(answer[run]["optimizer_bytes"]) for answer in self.answers)

    @property
    def saving(self) -> float:
        """The part of the optimizer's bytes that the fullest rank no longer keeps."""
        whole = self.optimizer_bytes("unsharded")
        return 1 - self.optimizer_bytes("sharded") / whole if whole else 0.0

    def losses(self, run: str) -> list[float]:
        """The mean over ranks, for each step."""
        return [
            statistics.fmean(step) for step in zip(*(answer[run]["losses"] for answer in self.answers), strict=True)
        ]

    def step_ms(self, run: str) -> float:
        """Median milliseconds per step of the slowest rank, without the first step if there are more: it warms up."""
        return max(_median_ms(answer[run]["step_seconds"]) for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain JSON values; a number that is not finite becomes null."""
        first = self.answers[0]
        document = {
            **self.settings.to_json(),
            "backend": first["sharded"]["backend"],
            "backend_reason": first["sharded"]["backend_reason"],
            "parameters": first["parameters"],
            "parameter_bytes": self.parameter_bytes,
            "corpus": first["corpus"],
            "sharded": self._run("sharded"),
            "unsharded": self._run("unsharded"),
            "largest_parameter_difference": self.largest_difference,
            "ranks_agree": self.ranks_agree,
            "optimizer_bytes_saved": self.saving,
            "imbalance": self.imbalance,
            "traffic": {
                "sent_per_step_mean": statistics.fmean(self.sent_per_step),
                "minimum_per_step": self.least_bytes_per_step,
                "ratio": self.traffic_ratio,
            },
            "per_rank": [
                {
                    "rank": rank,
                    "owned_parameter_bytes": first["sharded"]["owned_bytes"][rank],
                    "optimizer_bytes": answer["sharded"]["optimizer_bytes"],
                    "optimizer_bytes_unsharded": answer["unsharded"]["optimizer_bytes"],
                    "sent_per_step": answer["sharded"]["sent"] / self.settings.steps,
                    "received_per_step": answer["sharded"]["received"] / self.settings.steps,
                    "ms_per_step": _median_ms(answer["sharded"]["step_seconds"]),
                    "ms_per_step_unsharded": _median_ms(answer["unsharded"]["step_seconds"]),
                    "largest_parameter_difference": answer["largest_parameter_difference"],
                    "parameter_digest": answer["digest"],
                }
                for rank, answer in enumerate(self.answers)
            ],
            "seconds": self.seconds,
        }
        finite: dict[str, Any] = _finite(document)
        return finite

    def _run(self, run: str) -> dict[str, Any]:
        losses = self.losses(run)
        return {
            "first_loss": losses[0],
            "final_loss": losses[-1],
            "losses": losses,
            "optimizer_bytes": self.optimizer_bytes(run),
            "ms_per_step": self.step_ms(run),
        }


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds[1:] or seconds)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
