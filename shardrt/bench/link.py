"""A slow network between two hosts, made of one machine: two network namespaces, and between them a pair of virtual
devices, each with a token bucket that lets bytes out at the chosen rate. See Note [What is emulated].

Note [What is emulated]
=======================
Only the rate: ``tc``'s token bucket filter on each end, with a queue of 20 ms. The delay of a real network is not. Both
devices are made inside the namespaces, so neither they nor their addresses are ever seen by the machine's own network.
Needs root and iproute2 (``ip`` and ``tc``).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from shardrt.bench.interrupts import terminating_in_order, undisturbed
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.torchrun import Host

if TYPE_CHECKING:
    from typing_extensions import Self

STANDING = "shardrt-link"
"""The name of the link that ``shardrt bench link up`` leaves standing; its hosts are this and ``-0`` or ``-1``."""
DEVICE = "link0"
"""The network device in either namespace."""

_ADDRESSES = ("10.213.0.1", "10.213.0.2")
_MASK = 30
_RATE = re.compile(r"([1-9][0-9]{0,3})(kbit|mbit|gbit)")
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_BURST = ("burst", "256kb", "latency", "20ms")
_COMMAND_SECONDS = 20.0


def bits_per_second(rate: str) -> int:
    """What a rate means, in the way ``tc`` reads it.

    Example:
        >>> from shardrt.bench.link import bits_per_second
        >>> bits_per_second("1gbit"), bits_per_second("250mbit")
        (1000000000, 250000000)
        >>> bits_per_second("1gbit; reboot")
        Traceback (most recent call last):
        shardrt.errors.ConfigError: rate must be like '1gbit', '250mbit' or '64kbit', got '1gbit; reboot'
    """
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if found is None:
        raise ConfigError(f"rate must be like '1gbit', '250mbit' or '64kbit', got {rate!r}")
    return int(found[1]) * _UNITS[found[2]]


class EmulatedLink:
    """Two hosts with a network of the given rate between them, for the length of a ``with`` block.

    However the block ends, by an exception, Ctrl-C or SIGTERM, nothing is left of them.

    Example:
        >>> from shardrt.bench.link import EmulatedLink
        >>> link = EmulatedLink("100mbit", name="office")
        >>> link.namespaces, link.hosts[1].address
        (('office-0', 'office-1'), '10.213.0.2')
        >>> link.commands()[-1][-8:]
        ('root', 'tbf', 'rate', '100mbit', 'burst', '256kb', 'latency', '20ms')
    """

    def __init__(self, rate: str = "1gbit", *, name: str | None = None) -> None:
        self.bits_per_second = bits_per_second(rate)
        self.rate = rate
        # One that nobody else on the machine can have: several benchmarks may run at once.
        self.name = f"shardrt-{secrets.token_hex(4)}" if name is None else name
        self.namespaces = (f"{self.name}-0", f"{self.name}-1")
        self._cleanup = ExitStack()

    @property
    def hosts(self) -> tuple[Host, Host]:
        """Where to start ranks, see :func:`shardrt.launch.launch_ranks`."""
        left, right = (
            Host(prefix=("ip", "netns", "exec", namespace), address=address, device=DEVICE)
            for namespace, address in zip(self.namespaces, _ADDRESSES, strict=True)
        )
        return left, right

    def commands(self) -> list[tuple[str, ...]]:
        """What brings the link up, in order."""
        left, right = self.namespaces
        made: list[tuple[str, ...]] = [
            ("ip", "netns", "add", left),
            ("ip", "netns", "add", right),
            ("ip", "-n", left, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", right),
        ]
        for namespace, address in zip(self.namespaces, _ADDRESSES, strict=True):
            inside = ("ip", "-n", namespace)
            made += [
                (*inside, "addr", "add", f"{address}/{_MASK}", "dev", DEVICE),
                (*inside, "link", "set", "lo", "up"),
                (*inside, "link", "set", DEVICE, "up"),
                ("tc", "-n", namespace, "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", self.rate, *_BURST),
            ]
        return made

    def up(self) -> None:
        """Bring it up, whole or not at all."""
        require_tools()
        if found := _standing(self.namespaces):
            raise ConfigError(f"there is a link {self.name!r} already ({', '.join(found)}); take it down first")
        try:
            for command in self.commands():
                _run(command)
        except BaseException:
            self.down()
            raise

    def down(self) -> bool:
        """Take it down; False if there was nothing of it."""
        require_tools()
        with undisturbed():
            there = _standing(self.namespaces)
            with ExitStack() as each:  # the second one also if the first one fails
                for namespace in there:
                    each.callback(_run, ("ip", "netns", "del", namespace))
        return bool(there)

    def rate_found(self) -> int | None:
        """The rate, in bits per second, at which both ends really send now; None if it is not wholly up."""
        require_tools()
        if _standing(self.namespaces) != list(self.namespaces):
            return None
        rates = set()
        for namespace in self.namespaces:
            shown = json.loads(_run(("tc", "-n", namespace, "-json", "qdisc", "show", "dev", DEVICE)) or "[]")
            rates |= {8 * one["options"]["rate"] for one in shown if one["kind"] == "tbf"} or {0}
        return rates.pop() if len(rates) == 1 else None

    def __enter__(self) -> Self:
        with ExitStack() as started:
            started.enter_context(terminating_in_order())
            self.up()
            started.callback(self.down)
            self._cleanup = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cleanup.close()


def namespaces_of_ours() -> list[str]:
    """The network namespaces of links that are up: the standing one, and those of benchmarks under way (or killed)."""
    require_tools()
    return [name for name in _all_namespaces() if name.startswith("shardrt-")]


def require_tools() -> None:
    """Raise where an emulated link cannot be made, saying what would make it possible."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UnsupportedError(
            f"an emulated link needs iproute2, but the PATH has no {' and no '.join(missing)}; install iproute2, "
            "or measure on loopback with --link none"
        )
    if os.geteuid() != 0:
        raise UnsupportedError(
            f"an emulated link needs root, and this is user {os.geteuid()}; run it with sudo, or measure on loopback "
            "with --link none"
        )


def _all_namespaces() -> list[str]:
    return [line.split()[0] for line in _run(("ip", "netns", "list")).splitlines() if line.strip()]


def _standing(namespaces: Sequence[str]) -> list[str]:
    there = set(_all_namespaces())
    return [namespace for namespace in namespaces if namespace in there]


def _run(command: Sequence[str]) -> str:
    told = " ".join(command)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
            start_new_session=True,  # a Ctrl-C for us is none for a command that cleans up
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"`{told}` could not be run: {error}") from error
    if done.returncode != 0:
        raise UnsupportedError(
            f"`{told}` ended with status {done.returncode}: {done.stderr.strip() or 'no message'}; an emulated link "
            "needs the right to make network namespaces (in a container: --privileged) and the kernel's tbf queue; "
            "without, measure on loopback with --link none"
        )
    return done.stdout
