"""Start ranks on this machine with torchrun, hear from them, and leave none behind. See Note [Launch protocol].

Note [Launch protocol]
======================
The parent listens on a socket in a private directory and starts torchrun, which starts the ranks. Each rank connects
before it imports anything heavy and then sends JSON lines: first ``{"hello": rank, "pid": ...}``, any number of
``{"event": ...}``, and at last ``{"result": ...}`` or ``{"error": ..., "type": ...}``. Nothing is read from what
processes print; that is kept for error messages only. The connection also says who is alive: a rank whose parent is
gone ends itself, however stuck it is, and a rank that hangs up without a last word has died.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from shardrt.errors import CommunicationError, ConfigError, PeerError
from shardrt.hearing import Listener, RankLog

SOCKET_VARIABLE = "SHARDRT_LAUNCH_SOCKET"
"""Where a rank finds the socket of whoever launched it."""

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOK_SECONDS = 0.1
_FAREWELL_SECONDS = 10.0
"""How long the other ranks and torchrun may take to end after the last result or the first failure."""
_SHUTDOWN_SECONDS = 5
_START_SECONDS = 60.0
"""How long torchrun and the ranks may take to start, however little patience there is for what follows."""
_SHOWN_CHARACTERS = 4_000

OnEvent = Callable[[int, Any], None]


def launch_ranks(
    module: str,
    settings: Mapping[str, Any],
    *,
    ranks: int,
    on_event: OnEvent | None = None,
    patience: float = 120.0,
    verbose: bool = False,
) -> list[Any]:
    """Run ``python -m module`` as ``ranks`` ranks of this machine, and return each rank's result, in rank order.

    The module calls :func:`shardrt.demo.rank.run_rank`, which hands it ``settings``. ``on_event(rank, event)`` is
    called for what ranks report meanwhile. A rank that fails raises :class:`~shardrt.errors.PeerError` with its text;
    ``patience`` seconds without any news raise :class:`~shardrt.errors.CommunicationError`. However this returns, no
    process is left. ``verbose`` lets everything that ranks print through to standard error.

    Example:
        >>> from shardrt.launch import launch_ranks
        >>> launch_ranks("no.such", {"steps": 1}, ranks=2)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: no module 'no.such' to start ranks with; it must be importable from here
    """
    if ranks < 1:
        raise ConfigError(f"ranks must be 1 or more, got {ranks}")
    _check_module(module)
    with (
        tempfile.TemporaryDirectory(prefix="shardrt-", ignore_cleanup_errors=True) as folder,
        Listener(Path(folder) / "events", ranks) as listener,
    ):
        torchrun = _Torchrun(module, settings, ranks=ranks, folder=Path(folder), verbose=verbose)
        try:
            _listen(listener, torchrun, on_event, patience)
        finally:
            listener.hang_up()
            torchrun.end([rank.pid for rank in listener.ranks if rank.pid is not None])
        if listener.all_finished:
            return [rank.result for rank in listener.ranks]
        raise _failure(listener.cause(), torchrun)


def _check_module(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # not even the package it would be in
        found = None
    if found is None:
        raise ConfigError(f"no module {module!r} to start ranks with; it must be importable from here")


def _listen(listener: Listener, torchrun: _Torchrun, on_event: OnEvent | None, patience: float) -> None:
    last_news = time.monotonic()
    over_at: float | None = None
    while not torchrun.ended:
        for rank, event in listener.poll(_LOOK_SECONDS):
            last_news = time.monotonic()
            if event is not None and on_event is not None:
                on_event(rank, event)
        now = time.monotonic()
        cause = listener.cause()
        if cause is not None and cause.error is not None and not cause.only_passes_on:
            return
        if over_at is None and (cause is not None or listener.all_finished):
            over_at = now
        if over_at is not None and now > over_at + _FAREWELL_SECONDS:
            return
        waited_long = patience if listener.all_started else max(patience, _START_SECONDS)
        if now > last_news + waited_long:
            raise _no_news(listener.ranks, torchrun, waited_long)
    for rank, event in listener.poll(0.0):
        if event is not None and on_event is not None:
            on_event(rank, event)


class _Torchrun:
    """The torchrun process: started here, ended here."""

    def __init__(self, module: str, settings: Mapping[str, Any], *, ranks: int, folder: Path, verbose: bool) -> None:
        self._logs = folder / "logs"
        self._output: IO[bytes] | None = None if verbose else (folder / "torchrun.log").open("w+b")
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", "0"),
            # As --standalone does, but without looking up the host's name, which containers often cannot resolve.
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
            *("--shutdown-timeout", str(_SHUTDOWN_SECONDS)),
            *(() if verbose else ("--log-dir", str(self._logs), "--redirects", "3")),
            *("-m", module, json.dumps(dict(settings))),
        ]
        told = 2 if self._output is None else self._output
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            env=_environment(folder / "events"),
            start_new_session=True,  # Ctrl-C is ours: we end the ranks in order
        )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def status(self) -> int:
        return self._process.wait()

    def end(self, rank_pids: list[int]) -> None:
        """Ask, wait, insist. Ranks whose connection was hung up end by themselves meanwhile."""
        self._process.terminate()
        if self._output is not None:
            self._output.close()
        try:
            self._process.wait(_SHUTDOWN_SECONDS + _FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for pid in rank_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def printed_by(self, rank: int) -> str:
        """The end of what a rank wrote to standard error."""
        return "".join(_tail(path) for path in sorted(self._logs.glob(f"*/attempt_0/{rank}/stderr.log")))

    def printed(self) -> str:
        """The end of what torchrun itself wrote."""
        return "" if self._output is None else _tail(Path(self._output.name))


def _environment(events: Path) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
    }
    environment[SOCKET_VARIABLE] = str(events)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = "1"
    if "lo" in {name for _, name in socket.if_nameindex()}:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _failure(cause: RankLog | None, torchrun: _Torchrun) -> PeerError:
    if cause is not None and cause.error is not None:
        return PeerError(f"rank {cause.rank} failed: {cause.error}")
    status = f"(torchrun ended with status {torchrun.status})"
    launcher = _quoted("the end of what torchrun wrote", torchrun.printed())
    if cause is None:
        return PeerError(f"the ranks ended before they could say anything {status}{launcher}")
    written = torchrun.printed_by(cause.rank)
    return PeerError(
        f"rank {cause.rank} ended without a word {status}"
        + _quoted(f"the end of what rank {cause.rank} wrote to standard error", written)
        + launcher
    )


def _no_news(ranks: list[RankLog], torchrun: _Torchrun, patience: float) -> CommunicationError:
    last = "; ".join(f"rank {rank.rank} {rank.last_words}" for rank in ranks)
    written = "".join(
        _quoted(f"the end of what rank {rank.rank} wrote to standard error", torchrun.printed_by(rank.rank))
        for rank in ranks
    )
    return CommunicationError(
        f"no news from any rank for {patience:g} s: {last}; the machine may be too busy: use fewer ranks, or wait "
        f"longer with more patience{written}"
    )


def _quoted(title: str, text: str) -> str:
    return f"\n{title}:\n{text.rstrip()}" if text.strip() else ""


def _tail(path: Path) -> str:
    return path.read_bytes()[-_SHOWN_CHARACTERS:].decode(errors="replace")


__all__ = ["SOCKET_VARIABLE", "launch_ranks"]
