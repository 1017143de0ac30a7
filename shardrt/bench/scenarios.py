"""The scenarios of ``shardrt bench all``: each a network, a number of ranks, a model, and who takes part.

Not everybody takes part in every scenario, or a full run would take hours: each scenario asks those that it is about,
and says who was not asked. See docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from shardrt.bench.contest import DDP, TORCH_ZERO, WARM_UP_STEPS, ContestSettings
from shardrt.bench.overlap import NO_LINK
from shardrt.bench.shapes import SHAPES, Shape
from shardrt.bench.ways import ALL_PEERS, DEFAULT_SCHEDULE, OUR_STRATEGIES, ZERO1, Way
from shardrt.errors import ConfigError
from shardrt.registry.nearness import did_you_mean

Ours = tuple[tuple[str, str], ...]
"""Strategies, each with a schedule."""

_SCHEDULES = ("sync", "bucket", "interleaved", "priority")
_ZERO1: Ours = tuple((ZERO1, schedule) for schedule in _SCHEDULES)
_SHARDED: Ours = tuple((name, DEFAULT_SCHEDULE) for name in ("shard_optim", "shard_grad_op", "full_shard"))
_MAIN: Ours = ((ZERO1, "priority"), ("full_shard", "bucket"))
_MAIN_PEERS = (DDP, TORCH_ZERO, "fsdp2_reshard", "deepspeed_1", "deepspeed_3")
_HOSTS: Ours = (*_MAIN, ("hybrid_shard", "bucket"))


@attrs.frozen(kw_only=True)
class Scenario:
    """Under which conditions the contestants meet."""

    name: str
    title: str
    about: str
    """One sentence: what is different here."""
    ranks: int = 2
    link: str = NO_LINK
    """The rate between two emulated hosts that have half of the ranks each."""
    bucket_mb: float | None = None
    model: str = ""
    """Which shape, see :data:`shardrt.bench.shapes.SHAPES`: in front of the size, or nothing for the transformer."""
    ours: Ours
    peers: tuple[str, ...]
    minutes: float
    """About how long it takes with the default options on two cores, without DeepSpeed."""

    def size(self, size: str) -> str:
        """The name of the shape for one of the two sizes."""
        return f"{self.model}-{size}" if self.model else size


_ALL = (
    Scenario(
        name="loopback-2",
        title="Loopback, 2 ranks",
        about="Two ranks of one machine; everybody takes part.",
        ours=(*_ZERO1, *_SHARDED, ("full_shard", "bucket")),
        peers=tuple(ALL_PEERS),
        minutes=3.7,
    ),
    Scenario(
        name="loopback-4",
        title="Loopback, 4 ranks",
        about="Four ranks of one machine, which must share its cores where it has fewer.",
        ranks=4,
        ours=_MAIN,
        peers=_MAIN_PEERS,
        minutes=2.7,
    ),
    Scenario(
        name="hosts-1gbit-2",
        title="Two hosts at 1 Gbit/s, 2 ranks",
        about="One rank on each of two emulated hosts with a slow network between them.",
        link="1gbit",
        ours=((ZERO1, "sync"), (ZERO1, "interleaved"), *_MAIN),
        peers=_MAIN_PEERS,
        minutes=3.0,
    ),
    Scenario(
        name="hosts-1gbit-4",
        title="Two hosts at 1 Gbit/s, 4 ranks",
        about="Two ranks on each of two emulated hosts; wire counts what crosses between them.",
        ranks=4,
        link="1gbit",
        ours=_HOSTS,
        peers=(DDP, TORCH_ZERO, "fsdp2_reshard"),
        minutes=4.6,
    ),
    Scenario(
        name="hosts-10gbit-2",
        title="Two hosts at 10 Gbit/s, 2 ranks",
        about="One rank on each of two emulated hosts with a fast network between them.",
        link="10gbit",
        ours=((ZERO1, "sync"), *_MAIN),
        peers=(DDP, TORCH_ZERO, "fsdp2_reshard"),
        minutes=1.7,
    ),
    Scenario(
        name="hosts-10gbit-4",
        title="Two hosts at 10 Gbit/s, 4 ranks",
        about="Two ranks on each of two emulated hosts with a fast network between them.",
        ranks=4,
        link="10gbit",
        ours=((ZERO1, "priority"), ("hybrid_shard", "bucket")),
        peers=(DDP, TORCH_ZERO),
        minutes=2.3,
    ),
    Scenario(
        name="small-buckets",
        title="Small buckets, 2 ranks",
        about="Loopback with buckets of 1 MB, for us and for DDP: many small collectives.",
        bucket_mb=1.0,
        ours=((ZERO1, "priority"),),
        peers=(DDP, TORCH_ZERO),
        minutes=0.9,
    ),
    Scenario(
        name="large-buckets",
        title="Large buckets, 2 ranks",
        about="Loopback with buckets of 100 MB, for us and for DDP: few large collectives.",
        bucket_mb=100.0,
        ours=((ZERO1, "priority"),),
        peers=(DDP, TORCH_ZERO),
        minutes=0.9,
    ),
    Scenario(
        name="many-small",
        title="10,000 small parameters, 2 ranks",
        about="Loopback; vectors of 64 elements and little to compute: what each parameter costs.",
        model="many",
        ours=(*_ZERO1, ("full_shard", DEFAULT_SCHEDULE)),
        peers=(DDP, TORCH_ZERO, "fsdp1_full_shard", "deepspeed_1"),  # FSDP2 takes seconds for each step of this
        minutes=1.0,
    ),
    Scenario(
        name="few-large",
        title="5 large parameters, 2 ranks",
        about="Loopback; matrices of 10 million elements and short texts: little to overlap with.",
        model="few",
        ours=((ZERO1, "sync"), *_MAIN),
        peers=(DDP, TORCH_ZERO, "fsdp2_reshard"),
        minutes=1.0,
    ),
)
SCENARIOS: Mapping[str, Scenario] = MappingProxyType({scenario.name: scenario for scenario in _ALL})
"""By name, in the order in which they run."""


def find_scenarios(names: Iterable[str] = ()) -> tuple[Scenario, ...]:
    """Those of the given names in their usual order; all, if none is given.

    Example:
        >>> from shardrt.bench.scenarios import find_scenarios
        >>> [one.name for one in find_scenarios(["many-small", "loopback-2"])]
        ['loopback-2', 'many-small']
        >>> find_scenarios(["loopback"])
        Traceback (most recent call last):
        shardrt.errors.ConfigError: unknown scenario 'loopback'; there are: loopback-2, loopback-4, ...
    """
    asked = set(names)
    for name in asked:
        if name not in SCENARIOS:
            raise ConfigError(
                f"unknown scenario {name!r}; there are: {', '.join(SCENARIOS)}{did_you_mean(name, SCENARIOS)}"
            )
    return tuple(scenario for scenario in _ALL if not asked or scenario.name in asked)


def ways_of(
    scenario: Scenario, backends: Iterable[str], *, only: Iterable[str] = (), everybody: bool = False
) -> tuple[Way, ...]:
    """Who is asked to take part: DDP + AdamW first, ours once for each backend.

    ``only`` chooses among them: names of peers, and ours by their strategy, or strategy and schedule.

    Example:
        >>> from shardrt.bench.scenarios import SCENARIOS, ways_of
        >>> [way.name for way in ways_of(SCENARIOS["small-buckets"], ["gloo"], only=["zero1/priority"])]
        ['ddp_adamw', 'zero1/priority/gloo']
    """
    whole = SCENARIOS["loopback-2"]
    ours = (*dict.fromkeys((*whole.ours, *scenario.ours)),) if everybody else scenario.ours
    peers = tuple(ALL_PEERS) if everybody else scenario.peers
    asked = [Way(strategy=name) for name in peers]
    asked += [Way(strategy=one, schedule=schedule, backend=name) for name in backends for one, schedule in ours]
    chosen = set(only)
    for name in chosen:
        if name.split("/")[0] not in (*ALL_PEERS, *OUR_STRATEGIES):
            Way.parse(name)  # which says what there is
    if not chosen:
        return tuple(asked)
    return tuple(way for way in asked if way.name == DDP or _is_chosen(way, chosen))


def _is_chosen(way: Way, chosen: set[str]) -> bool:
    parts = way.name.split("/")
    return any("/".join(parts[:count]) in chosen for count in range(1, len(parts) + 1))


def _tuple(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(given)  # they travel to the ranks as a list


@attrs.frozen(kw_only=True)
class ScenarioSettings(ContestSettings):
    """One scenario, as its ranks are told."""

    link: str = NO_LINK
    bucket_mb: float | None = None
    ways: tuple[str, ...] = attrs.field(converter=_tuple)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not self.ways or self.ways[0] != DDP:
            raise ConfigError(f"the first contestant must be {DDP!r}, which all are compared to, got {self.ways!r}")
        self.contestants  # noqa: B018  (raises for names that nobody has)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Also the extremes."""
        return SHAPES

    @property
    def contestants(self) -> Mapping[str, str]:
        """By name, DDP + AdamW first."""
        return {name: Way.parse(name).label for name in self.ways}

    @property
    def ranks_per_host(self) -> int:
        """With a link half of them are on each host."""
        return self.ranks if self.link == NO_LINK else self.ranks // 2

    @property
    def all_steps(self) -> int:
        """Also those that only compute."""
        return self.rounds * (len(self.ways) + 1) * (WARM_UP_STEPS + self.steps)
