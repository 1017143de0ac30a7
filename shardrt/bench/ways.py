"""Who takes part in ``shardrt bench all``: shardrt's strategies and schedules over every backend, and all peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from shardrt.bench.contest import DDP, PEERS, TORCH_ZERO
from shardrt.bench.shard import DEEPSPEED, FSDP1, FSDP2
from shardrt.errors import ConfigError
from shardrt.registry import load_registry
from shardrt.registry.nearness import did_you_mean
from shardrt.registry.probing import probe

ZERO1 = "zero1"
"""``rt.optimizer``: ZeRO-1 around a model that stays as it is."""
DEFAULT_SCHEDULE = "sync"
"""What a runtime takes if it is not told."""
LEVELS: Mapping[str, str] = MappingProxyType(
    {
        DDP: "replicated",
        TORCH_ZERO: "zero1",
        ZERO1: "zero1",
        "shard_optim": "zero1",
        "deepspeed_1": "zero1",
        "shard_grad_op": "zero2",
        "fsdp2_keep": "zero2",
        "fsdp1_shard_grad_op": "zero2",
        "deepspeed_2": "zero2",
        "full_shard": "zero3",
        "fsdp2_reshard": "zero3",
        "fsdp1_full_shard": "zero3",
        "deepspeed_3": "zero3",
        "hybrid_shard": "hybrid",
    }
)
"""How much each of them shards: ratios are between those of one level, and to DDP + AdamW."""
ALL_PEERS: Mapping[str, str] = MappingProxyType({**PEERS, **FSDP2, **FSDP1, **DEEPSPEED})
OUR_STRATEGIES = (ZERO1, "shard_optim", "shard_grad_op", "full_shard", "hybrid_shard")
NOT_FOR_TRAINING = ("null", "reference")
"""Backends that compare or do nothing."""
ONE_HOST = ("shm",)
"""Backends that need no network: two emulated hosts have one memory, and bytes would go past the link."""


@attrs.frozen(kw_only=True)
class Way:
    """One contestant.

    Example:
        >>> from shardrt.bench.ways import Way
        >>> way = Way.parse("zero1/priority/gloo")
        >>> way.label, way.level, way.is_ours
        ('shardrt ZeRO-1, priority, gloo', 'zero1', True)
        >>> Way.parse("fsdp2_reshard").label
        'FSDP2, reshard'
        >>> Way.parse("fsdp3")
        Traceback (most recent call last):
        shardrt.errors.ConfigError: unknown contestant 'fsdp3'; there are: ddp_adamw, ddp_torch_zero, ...
    """

    strategy: str
    """A strategy of ours, or the name of a peer."""
    schedule: str = ""
    backend: str = "gloo"

    @classmethod
    def parse(cls, name: str) -> Way:
        """From ``peer``, or ``strategy/schedule/backend`` for ours."""
        parts = name.split("/")
        if len(parts) == 3 and parts[0] in OUR_STRATEGIES:
            return cls(strategy=parts[0], schedule=parts[1], backend=parts[2])
        if name not in ALL_PEERS:
            known = (*ALL_PEERS, *(f"{strategy}/SCHEDULE/BACKEND" for strategy in OUR_STRATEGIES))
            raise ConfigError(
                f"unknown contestant {name!r}; there are: {', '.join(known)}{did_you_mean(name, list(ALL_PEERS))}"
            )
        return cls(strategy=name)

    @property
    def is_ours(self) -> bool:
        """Whether shardrt does it."""
        return self.strategy in OUR_STRATEGIES

    @property
    def name(self) -> str:
        """What documents call it."""
        return f"{self.strategy}/{self.schedule}/{self.backend}" if self.is_ours else self.strategy

    @property
    def label(self) -> str:
        """What tables call it."""
        if not self.is_ours:
            return ALL_PEERS[self.strategy]
        strategy = "ZeRO-1" if self.strategy == ZERO1 else self.strategy
        return f"shardrt {strategy}, {self.schedule}, {self.backend}"

    @property
    def level(self) -> str:
        """How much it shards."""
        return LEVELS[self.strategy]


def backends_here(asked: Iterable[str] = ()) -> tuple[tuple[str, ...], dict[str, str]]:
    """Backends for the CPU that can train here, and the others with the reason; ``asked`` limits both to some.

    Example:
        >>> from shardrt.bench.ways import backends_here
        >>> backends_here(["gloo"])
        (('gloo',), {})
        >>> backends_here(["glo"])
        Traceback (most recent call last):
        shardrt.errors.ConfigError: unknown backend 'glo'; for the CPU there are: gloo, ...
    """
    records = {entry.record.name: entry.record for entry in load_registry().backends if _trains(entry.record)}
    for name in asked:
        if name not in records:
            raise ConfigError(
                f"unknown backend {name!r}; for the CPU there are: {', '.join(records)}{did_you_mean(name, records)}"
            )
    wanted = [name for name in records if not asked or name in set(asked)]
    found = {name: probe(records[name]) for name in wanted}
    usable = tuple(sorted((name for name in wanted if found[name].ok), key=lambda name: (name != "gloo", name)))
    lacking = {name: f"{name}: {one.reason}" + (f" ({one.fix})" if one.fix else "") for name, one in found.items()}
    return usable, {name: reason for name, reason in lacking.items() if not found[name].ok}


def _trains(record: object) -> bool:
    return getattr(record, "device_type", "") == "cpu" and getattr(record, "name", "") not in NOT_FOR_TRAINING
