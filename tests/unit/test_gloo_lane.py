"""Messages over pairs of sockets, and who is let in when ranks connect."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardrt_gloo import addresses, connecting
from shardrt_gloo.lane import IncomingTensor, Lane, Part

from shardrt import Group
from shardrt.comm.control import LocalControl
from shardrt.errors import CommunicationError


def _group(rank: int, timeout: float = 20.0) -> Group:
    return Group(rank=rank, world_size=2, device_type="cpu", timeout=timeout, control=LocalControl(), number=3)


def _lanes(timeout: float = 20.0) -> tuple[Lane, Lane]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    made = [Lane(_group(rank, timeout), {1 - rank: end}, progress=lambda: None) for rank, end in enumerate(ends)]
    return made[0], made[1]


def _parts(tensor: torch.Tensor, sizes: list[int]) -> Iterator[Part]:
    for part in torch.split(tensor, sizes):
        yield part, lambda: None


@given(st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 90_000)), min_size=1, max_size=8), st.integers(1, 4))
def test_both_ends_get_what_the_other_sent(sizes: list[tuple[int, int]], cuts: int) -> None:
    lanes = _lanes()
    results: list[list[torch.Tensor]] = [[], []]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            waits = []
            for number, pair in enumerate(sizes):
                mine = torch.arange(pair[rank], dtype=torch.int32) + 1000 * rank + number
                theirs = torch.full((pair[1 - rank],), -1, dtype=torch.int32)
                results[rank].append(theirs)
                step = max(1, pair[rank] // cuts)
                lengths = [min(step, pair[rank] - at) for at in range(0, pair[rank], step)]
                is_done = lanes[rank].queue(
                    "all_gather",
                    number,
                    sends=[(1 - rank, mine.dtype, mine.nbytes, _parts(mine, lengths))],
                    receives=[(1 - rank, theirs.dtype, IncomingTensor(theirs))],
                )
                waits.append((number, is_done))
            for number, is_done in waits:
                lanes[rank].drive("all_gather", number, is_done)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for lane in lanes:
        lane.close()
    assert not errors
    for rank in range(2):
        for number, pair in enumerate(sizes):
            assert torch.equal(
                results[rank][number], torch.arange(pair[1 - rank], dtype=torch.int32) + 1000 * (1 - rank) + number
            )


def _receive(lane: Lane, peer: int, **more: Any) -> None:
    into = torch.zeros(4)
    is_done = lane.queue("all_gather", 1, sends=[], receives=[(peer, into.dtype, IncomingTensor(into))])
    lane.drive("all_gather", 1, is_done)


def test_a_peer_that_hangs_up_is_named() -> None:
    first, second = _lanes()
    second.close()
    with pytest.raises(
        CommunicationError, match=r"rank 0: all_gather \(number 1 of communicator 3\) with rank 1 failed"
    ):
        _receive(first, 1)
    first.close()


def test_a_peer_that_says_nothing_is_named_within_the_timeout() -> None:
    first, second = _lanes(timeout=0.3)
    with pytest.raises(CommunicationError, match=r"with rank 1 took longer than 0\.3 s; rank 1 is stuck") as caught:
        _receive(first, 1)
    assert caught.value.ranks == (1,)
    first.close()
    second.close()


def test_a_wait_that_is_given_up_ends() -> None:
    first, second = _lanes()
    threading.Timer(0.2, first.abort).start()
    with pytest.raises(CommunicationError, match="was given up"):
        _receive(first, 1)
    first.close()
    second.close()


def test_rubbish_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    lane = Lane(_group(0), {1: ours}, progress=lambda: None)
    theirs.sendall(b"GET / HTTP/1.1" + bytes(100))
    with pytest.raises(CommunicationError, match="found something that is no message of a rank"):
        _receive(lane, 1)
    lane.close()
    theirs.close()


def _hello(secret: bytes, number: int, lane: int, rank: int) -> bytes:
    caller = connecting._CALLER.pack(bytes(16), number, lane, rank)
    return caller + connecting.proof(secret.hex(), b"call", caller)


def test_strangers_are_hung_up_on_and_peers_answered() -> None:
    secret, theirs = bytes(range(16)), bytes(16)
    peers = [{"secret": secret.hex()}, {"secret": theirs.hex()}]
    listener = socket.create_server(("127.0.0.1", 0))
    deadline = connecting.time.monotonic() + 20
    answering = connecting._Answering(_group(0), [listener], secret, peers, deadline, lanes=1)
    thread = threading.Thread(target=answering.run)
    thread.start()
    place = listener.getsockname()
    silent = socket.create_connection(place, timeout=10)  # holds up nobody
    strangers = {
        "another secret": _hello(theirs, 3, 0, 1),
        "another communicator": _hello(secret, 4, 0, 1),
        "no such rank": _hello(secret, 3, 0, 2),
        "no such lane": _hello(secret, 3, 1, 1),
        "itself": _hello(secret, 3, 0, 0),
    }
    for hello in strangers.values():
        with socket.create_connection(place, timeout=10) as stranger:
            stranger.sendall(hello)
            assert stranger.recv(16) == b""
    assert not answering.answered
    with socket.create_connection(place, timeout=10) as peer:
        hello = _hello(secret, 3, 0, 1)
        peer.sendall(hello[:5])
        peer.sendall(hello[5:])
        assert peer.recv(32) == connecting.proof(theirs.hex(), b"answer", hello[: connecting._CALLER.size])
        thread.join(10)
        assert list(answering.answered) == [(0, 1)]
    answering.answered[0, 1].close()
    silent.close()
    listener.close()


def test_whoever_answers_must_know_the_callers_secret() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        caller, _ = listener.accept()
        with caller:
            caller.sendall(b"x" * 32)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(connecting._CannotConnectError, match=r"rank 0 cannot be reached: .* another program answers"):
        connecting._call(0, [listener.getsockname()], b"hello", bytes(32), connecting.time.monotonic() + 10)
    thread.join(10)
    listener.close()


def test_after_a_failure_nothing_is_sent_any_more() -> None:
    """What was to be sent may belong to somebody else by then."""
    first, second = _lanes(timeout=0.3)
    with pytest.raises(CommunicationError, match="took longer"):
        _receive(first, 1)
    later = torch.ones(4)
    is_done = first.queue("all_gather", 2, sends=[(1, later.dtype, later.nbytes, _parts(later, [4]))], receives=[])
    with pytest.raises(CommunicationError, match=r"was given up|hung up"):
        first.drive("all_gather", 2, is_done)
    with pytest.raises(CommunicationError, match="the connection was closed"):
        _receive(second, 0)
    first.close()
    second.close()


def test_a_part_that_cannot_be_made_breaks_the_message_off() -> None:
    first, second = _lanes()

    def parts() -> Iterator[Part]:
        yield torch.ones(4), lambda: None
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        first.queue("all_gather", 1, sends=[(1, torch.float32, 32, parts())], receives=[])
    with pytest.raises(CommunicationError, match="sending was broken off: MemoryError: no room"):
        first.drive("all_gather", 1, lambda: False)
    first.close()
    second.close()


def test_the_named_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such,lo")
    assert addresses.addresses_of_this_rank() == ["127.0.0.1"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert addresses.addresses_of_this_rank()[0] in ("127.0.0.1", "::1")
