"""torchrun as a process of ours: started on one host, ended with all its ranks. See Note [Launch protocol] in
:mod:`shardrt.launch`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs

SOCKET_VARIABLE = "SHARDRT_LAUNCH_SOCKET"
"""Where a rank finds the socket of whoever launched it."""

FAREWELL_SECONDS = 10.0
"""How long the other ranks and torchrun may take to end after the last result or the first failure."""

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEETING_PORT = 29_500
"""On the first of several hosts, which are namespaces of our own: nobody else listens there."""
_SHUTDOWN_SECONDS = 5
_SHOWN_CHARACTERS = 4_000


@attrs.frozen(kw_only=True)
class Host:
    """Where some of the ranks run, if not simply here: something of this machine with a network of its own.

    Example:
        >>> from shardrt.torchrun import Host
        >>> Host(prefix=("ip", "netns", "exec", "left"), address="10.0.0.1", device="veth0").address
        '10.0.0.1'
    """

    prefix: tuple[str, ...]
    """The start of a command line that runs the rest of it there."""
    address: str
    """What the other hosts call it."""
    device: str
    """The network device through which its ranks talk."""


class Torchrun:
    """One torchrun process for the ranks of one host, or for those of this machine."""

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        ranks: int,
        folder: Path,
        verbose: bool,
        hosts: Sequence[Host] = (),
        number: int = 0,
    ) -> None:
        """``ranks`` counts those of this host, the one of the given number."""
        self._ranks = range(number * ranks, (number + 1) * ranks)
        self._logs = folder / f"logs-{number}"
        self._output: IO[bytes] | None = None if verbose else (folder / f"torchrun-{number}.log").open("w+b")
        command = [
            *(hosts[number].prefix if hosts else ()),
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(ranks), "--max-restarts", "0"),
            *_meeting(hosts, number),
            *("--shutdown-timeout", str(_SHUTDOWN_SECONDS)),
            *(() if verbose else ("--log-dir", str(self._logs), "--redirects", "3")),
            *("-m", module, json.dumps(dict(settings))),
        ]
        told = 2 if self._output is None else self._output
        self._asked = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            env=_environment(folder / "events", hosts[number].device if hosts else None),
            start_new_session=True,  # Ctrl-C is ours: we end the ranks in order
        )

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    @property
    def failed(self) -> bool:
        """Whether it is gone, and not because all is done."""
        return self._process.poll() not in (None, 0)

    @property
    def status(self) -> int:
        """How it ended."""
        return self._process.wait()

    def ask_to_end(self) -> None:
        """Say that it should, once: a second signal would cut its cleaning up short. :meth:`end` sees to it."""
        if not self._asked:
            self._asked = True
            self._process.terminate()

    def end(self, rank_pids: Mapping[int, int]) -> None:
        """Ask, wait, insist. Ranks whose connection was hung up end by themselves meanwhile."""
        self.ask_to_end()
        if self._output is not None:
            self._output.close()
        try:
            self._process.wait(_SHUTDOWN_SECONDS + FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for rank in self._ranks:
                with contextlib.suppress(ProcessLookupError, KeyError):
                    os.kill(rank_pids[rank], signal.SIGKILL)

    def printed_by(self, rank: int) -> str:
        """The end of what a rank wrote to standard error; nothing if it is another host's."""
        local = rank - self._ranks.start
        return "".join(_tail(path) for path in sorted(self._logs.glob(f"*/attempt_0/{local}/stderr.log")))

    def printed(self) -> str:
        """The end of what torchrun itself wrote."""
        return "" if self._output is None else _tail(Path(self._output.name))


def _meeting(hosts: Sequence[Host], number: int) -> list[str]:
    if not hosts:
        # As --standalone does, but without looking up the host's name, which containers often cannot resolve.
        here = "127.0.0.1"
        return ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{here}:0", "--local-addr", here]
    return [
        *("--nnodes", str(len(hosts)), "--node-rank", str(number), "--local-addr", hosts[number].address),
        *("--master-addr", hosts[0].address, "--master-port", str(_MEETING_PORT)),
    ]


def _environment(events: Path, device: str | None) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
    }
    environment[SOCKET_VARIABLE] = str(events)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = "1"
    if device is not None:
        environment["GLOO_SOCKET_IFNAME"] = device
    elif "lo" in {name for _, name in socket.if_nameindex()}:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _tail(path: Path) -> str:
    return path.read_bytes()[-_SHOWN_CHARACTERS:].decode(errors="replace")
