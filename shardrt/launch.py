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

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shardrt.errors import CommunicationError, ConfigError, PeerError
from shardrt.hearing import Listener, RankLog
from shardrt.torchrun import FAREWELL_SECONDS, SOCKET_VARIABLE, Host, Torchrun

_LOOK_SECONDS = 0.1
_START_SECONDS = 60.0
"""How long torchrun and the ranks may take to start, however little patience there is for what follows."""

OnEvent = Callable[[int, Any], None]


def launch_ranks(
    module: str,
    settings: Mapping[str, Any],
    *,
    ranks: int,
    on_event: OnEvent | None = None,
    patience: float = 120.0,
    verbose: bool = False,
    hosts: Sequence[Host] = (),
) -> list[Any]:
    """Run ``python -m module`` as ``ranks`` ranks of this machine, and return each rank's result, in rank order.

    The module calls :func:`shardrt.demo.rank.run_rank`, which hands it ``settings``. ``on_event(rank, event)`` is
    called for what ranks report meanwhile. A rank that fails raises :class:`~shardrt.errors.PeerError` with its text;
    ``patience`` seconds without any news raise :class:`~shardrt.errors.CommunicationError`. However this returns, no
    process is left. ``verbose`` lets everything that ranks print through to standard error. With ``hosts`` (network
    namespaces, say) the ranks are shared out among them evenly, the first ones on the first host.

    Example:
        >>> from shardrt.launch import launch_ranks
        >>> launch_ranks("no.such", {"steps": 1}, ranks=2)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: no module 'no.such' to start ranks with; it must be importable from here
    """
    if ranks < 1:
        raise ConfigError(f"ranks must be 1 or more, got {ranks}")
    _check_module(module)
    if hosts and ranks % len(hosts):
        raise ConfigError(f"{ranks} ranks cannot be shared out evenly among {len(hosts)} hosts; use a multiple of them")
    with (
        tempfile.TemporaryDirectory(prefix="shardrt-", ignore_cleanup_errors=True) as folder,
        Listener(Path(folder) / "events", ranks) as listener,
    ):
        with _running(module, settings, listener, hosts, folder=Path(folder), verbose=verbose) as torchruns:
            _listen(listener, torchruns, on_event, patience)
        if listener.all_finished:
            return [rank.result for rank in listener.ranks]
        raise _failure(listener.cause(), torchruns)


def _check_module(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # not even the package it would be in
        found = None
    if found is None:
        raise ConfigError(f"no module {module!r} to start ranks with; it must be importable from here")


@contextmanager
def _running(
    module: str, settings: Mapping[str, Any], listener: Listener, hosts: Sequence[Host], *, folder: Path, verbose: bool
) -> Iterator[list[Torchrun]]:
    """One torchrun, or one per host. All are asked to end before any is waited for."""

    def end(torchrun: Torchrun) -> None:
        torchrun.end({rank.rank: rank.pid for rank in listener.ranks if rank.pid is not None})

    torchruns: list[Torchrun] = []
    ranks = len(listener.ranks) // max(len(hosts), 1)
    with ExitStack() as cleanup:
        for number in range(max(len(hosts), 1)):
            torchrun = Torchrun(
                module, settings, ranks=ranks, folder=folder, verbose=verbose, hosts=hosts, number=number
            )
            cleanup.callback(end, torchrun)
            torchruns.append(torchrun)
        try:
            yield torchruns
        finally:
            listener.hang_up()
            for torchrun in torchruns:
                torchrun.ask_to_end()


def _listen(listener: Listener, torchruns: Sequence[Torchrun], on_event: OnEvent | None, patience: float) -> None:
    last_news = time.monotonic()
    over_at: float | None = None
    while not _over(torchruns):
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
        if over_at is not None and now > over_at + FAREWELL_SECONDS:
            return
        waited_long = patience if listener.all_started else max(patience, _START_SECONDS)
        if now > last_news + waited_long:
            raise _no_news(listener.ranks, torchruns, waited_long)
    for rank, event in listener.poll(0.0):
        if event is not None and on_event is not None:
            on_event(rank, event)


def _over(torchruns: Sequence[Torchrun]) -> bool:
    """Whether there is nothing to wait for: one host's ranks cannot go on when another's have failed."""
    return any(torchrun.failed for torchrun in torchruns) or all(torchrun.ended for torchrun in torchruns)


def _failure(cause: RankLog | None, torchruns: Sequence[Torchrun]) -> PeerError:
    if cause is not None and cause.error is not None:
        return PeerError(f"rank {cause.rank} failed: {cause.error}")
    status = f"(torchrun ended with status {', '.join(str(torchrun.status) for torchrun in torchruns)})"
    launcher = _quoted("the end of what torchrun wrote", "".join(torchrun.printed() for torchrun in torchruns))
    if cause is None:
        return PeerError(f"the ranks ended before they could say anything {status}{launcher}")
    return PeerError(f"rank {cause.rank} ended without a word {status}{_written_by(cause, torchruns)}{launcher}")


def _no_news(ranks: list[RankLog], torchruns: Sequence[Torchrun], patience: float) -> CommunicationError:
    last = "; ".join(f"rank {rank.rank} {rank.last_words}" for rank in ranks)
    written = "".join(_written_by(rank, torchruns) for rank in ranks)
    return CommunicationError(
        f"no news from any rank for {patience:g} s: {last}; the machine may be too busy: use fewer ranks, or wait "
        f"longer with more patience{written}"
    )


def _written_by(rank: RankLog, torchruns: Sequence[Torchrun]) -> str:
    written = "".join(torchrun.printed_by(rank.rank) for torchrun in torchruns)
    return _quoted(f"the end of what rank {rank.rank} wrote to standard error", written)


def _quoted(title: str, text: str) -> str:
    return f"\n{title}:\n{text.rstrip()}" if text.strip() else ""


__all__ = ["SOCKET_VARIABLE", "Host", "launch_ranks"]
