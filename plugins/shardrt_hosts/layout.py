"""Which ranks share a host, and which ranks of different hosts belong together.

Note [Two levels]: with H hosts of L ranks each there are H groups *inside*, of the ranks of one host, and L groups
*across*, each of the ranks that have the same place on their hosts. Rank ``(h, l)`` is in one of each. Ranks of a host
are consecutive, as launchers number them, so that the runs of one host are one range of an owner-ordered buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class HostLayout:
    """Ranks by host. See Note [Two levels].

    Example:
        >>> from shardrt_hosts.layout import HostLayout
        >>> layout = HostLayout.of(["a", "a", "b", "b"], rank=2)
        >>> layout.inside, layout.across
        (((0, 1), (2, 3)), ((0, 2), (1, 3)))
        >>> layout.host, layout.place
        (1, 0)
        >>> HostLayout.of(["a", "a", "b"], rank=0).problem
        'hosts have different numbers of ranks: 2 on a, 1 on b'
    """

    rank: int
    inside: tuple[tuple[int, ...], ...]
    """The ranks of each host; hosts are in the order of their first ranks."""
    problem: str = ""
    """Why two levels do not fit; empty where they do."""

    @classmethod
    def of(cls, names: Sequence[str], *, rank: int) -> HostLayout:
        """The layout of ranks on hosts of these names, in rank order."""
        found: dict[str, list[int]] = {}
        for one, name in enumerate(names):
            found.setdefault(name, []).append(one)
        return cls(rank=rank, inside=tuple(map(tuple, found.values())), problem=_problem(found))

    @property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each place on all hosts, in the order of the hosts."""
        return tuple(zip(*self.inside, strict=True))

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return next(number for number, ranks in enumerate(self.inside) if self.rank in ranks)

    @property
    def place(self) -> int:
        """The place of this rank on its host."""
        return self.inside[self.host].index(self.rank)


def _problem(found: dict[str, list[int]]) -> str:
    sizes = {name: len(ranks) for name, ranks in found.items()}
    if len(found) == 1:
        return f"all ranks share the host {next(iter(found))}"
    if set(sizes.values()) == {1}:
        return "every rank has a host to itself"
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} on {name}" for name, size in sizes.items())
        return f"hosts have different numbers of ranks: {listed}"
    for name, ranks in found.items():
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            return f"ranks of the host {name} are not consecutive: {', '.join(map(str, ranks))}"
    return ""
