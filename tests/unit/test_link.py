"""The emulated link: what it refuses, which commands it runs, and that nothing is left when one of them fails."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

import shardrt.bench.link
from shardrt.bench.interrupts import terminating_in_order, undisturbed
from shardrt.bench.link import EmulatedLink, bits_per_second, require_tools
from shardrt.cli import main
from shardrt.errors import ConfigError, UnsupportedError
from shardrt.launch import Host, launch_ranks


class System:
    """Stands in for ``ip`` and ``tc``: keeps the namespaces, and fails where it is told to."""

    def __init__(self) -> None:
        self.namespaces: list[str] = []
        self.ran: list[tuple[str, ...]] = []
        self.fails_at: tuple[str, ...] = ()
        self.rate = 0

    def run(self, command: Sequence[str]) -> str:
        self.ran.append(tuple(command))
        if self.fails_at and set(self.fails_at) <= set(command):
            raise UnsupportedError("as told")
        match command:
            case ("ip", "netns", "list"):
                # Newer ones have a number behind the name.
                return "".join(f"{name} (id: {number})\n" for number, name in enumerate(self.namespaces))
            case ("ip", "netns", "add", name):
                self.namespaces.append(name)
            case ("ip", "netns", "del", name):
                self.namespaces.remove(name)
            case ("tc", "-n", _, "-json", *_):
                return f'[{{"kind": "tbf", "options": {{"rate": {self.rate // 8}}}}}]'
            case ("tc", "-n", _, "qdisc", "add", *_):
                self.rate = bits_per_second(command[command.index("rate") + 1])
            case _:
                pass
        return ""


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    made = System()
    monkeypatch.setattr(shardrt.bench.link, "_run", made.run)
    monkeypatch.setattr(shardrt.bench.link, "require_tools", lambda: None)
    return made


@pytest.mark.parametrize(
    "rate",
    ["", "1", "1gb", "0gbit", "-1gbit", "1 gbit", "1gbit burst 1", "1gbit\n", "1Gbit", "99999gbit", "\u0661gbit"],
)
def test_a_rate_is_a_number_and_a_unit_and_nothing_else(rate: str) -> None:
    with pytest.raises(ConfigError, match="rate must be like '1gbit'"):
        EmulatedLink(rate)


def test_the_link_is_made_inside_its_namespaces_with_a_bucket_on_each_end() -> None:
    link = EmulatedLink("250mbit", name="n")
    told = [" ".join(command) for command in link.commands()]
    assert told[:3] == [
        "ip netns add n-0",
        "ip netns add n-1",
        "ip -n n-0 link add link0 type veth peer name link0 netns n-1",
    ]
    for name, host in zip(("n-0", "n-1"), link.hosts, strict=True):
        assert f"tc -n {name} qdisc add dev link0 root tbf rate 250mbit burst 256kb latency 20ms" in told
        assert f"ip -n {name} addr add {host.address}/30 dev link0" in told
        assert {f"ip -n {name} link set {device} up" for device in ("lo", "link0")} <= set(told)
        assert host == Host(prefix=("ip", "netns", "exec", name), address=host.address, device="link0")
    # Every command but the making of a namespace acts in one: the machine's own network is never touched.
    assert all(command[1] == "-n" for command in link.commands()[2:])


def test_two_links_have_names_of_their_own(system: System) -> None:
    with EmulatedLink() as one, EmulatedLink() as other:
        assert not set(one.namespaces) & set(other.namespaces)
        assert sorted(system.namespaces) == sorted((*one.namespaces, *other.namespaces))
    assert system.namespaces == []


@pytest.mark.parametrize("failing", [("netns", "add", "n-1"), ("veth",), ("tc", "n-1")])
def test_a_link_that_comes_up_halfway_is_taken_down(system: System, failing: tuple[str, ...]) -> None:
    system.fails_at = failing
    with pytest.raises(UnsupportedError, match="as told"), EmulatedLink(name="n"):
        pytest.fail("it never was up")
    assert system.namespaces == []
    assert ("ip", "netns", "del", "n-0") in system.ran


def test_an_error_inside_takes_it_down(system: System) -> None:
    with pytest.raises(KeyboardInterrupt), EmulatedLink():
        assert len(system.namespaces) == 2
        raise KeyboardInterrupt
    assert system.namespaces == []


def test_sigterm_takes_it_down(system: System) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, EmulatedLink():
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal was not noticed")
    assert (left.value.code, system.namespaces, signal.getsignal(signal.SIGTERM)) == (143, [], before)


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Shells let what they start in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_a_second_signal_does_not_stop_the_taking_down() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with undisturbed():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all of it")
        pytest.fail("the signal was lost")
    assert done == ["all of it"]


def test_a_program_that_handles_sigterm_keeps_its_handler() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with terminating_in_order():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


def test_somebody_elses_link_of_that_name_is_left_alone(system: System) -> None:
    system.namespaces.append("n-1")
    with pytest.raises(ConfigError, match=r"there is a link 'n' already \(n-1\)"), EmulatedLink(name="n"):
        pytest.fail("it took what was not its own")
    assert system.namespaces == ["n-1"]


def test_the_first_namespace_that_cannot_be_deleted_does_not_keep_the_second(system: System) -> None:
    link = EmulatedLink(name="n")
    link.up()
    system.fails_at = ("del", "n-1")
    with pytest.raises(UnsupportedError):
        link.down()
    assert system.namespaces == ["n-1"]


def say(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["bench", "link", *arguments])
    return done.exit_code, done.output


def test_the_command_says_what_is_up(system: System) -> None:
    assert say("status") == (0, "not up\n")
    assert say("down") == (0, "it was not up\n")
    code, told = say("up", "--rate", "250mbit")
    assert code == 0 and told.startswith("up: 250mbit each way") and "ip netns exec shardrt-link-0" in told
    assert say("up", "--rate", "250mbit") == (0, "the link is up already, at 250mbit\n")
    code, told = say("up")
    assert code == 1 and "up already, at 250mbit; take it down first: shardrt bench link down" in told
    system.namespaces.append("shardrt-0123-0")
    code, told = say("status")
    assert told.startswith("up: 250mbit each way between shardrt-link-0 and shardrt-link-1\n")
    assert "ip netns del shardrt-0123-0" in told
    assert say("down") == (0, "down\n")
    assert system.namespaces == ["shardrt-0123-0"]


def test_the_command_brings_up_again_what_was_left_half_way(system: System) -> None:
    system.namespaces.append("shardrt-link-1")
    assert say("status") == (0, "partly up: take it down first: shardrt bench link down\n")
    assert say("up")[0] == 0
    assert sorted(system.namespaces) == ["shardrt-link-0", "shardrt-link-1"]


# Without a stand-in: what is not there, and what fails


def put_tools(folder: Path, script: str, *names: str) -> None:
    for name in names:
        tool = folder / name
        tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_without_iproute2_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="the PATH has no ip and no tc; install iproute2"):
        EmulatedLink().up()
    put_tools(tmp_path, "true", "ip")
    with pytest.raises(UnsupportedError, match="has no tc; install"):
        EmulatedLink().up()


def test_without_root_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tools(tmp_path, "true", "ip", "tc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        UnsupportedError, match=r"needs root, and this is user 1000; run it with sudo, or .* --link none"
    ):
        require_tools()
    code, told = say("up")
    assert code == 1 and told.startswith("error: an emulated link needs root")


def test_a_command_that_fails_is_shown_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tools(tmp_path, '[ "$2" = list ] || { echo no such right >&2; exit 3; }', "ip", "tc")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(
        UnsupportedError, match=r"`ip netns add n-0` ended with status 3: no such right; .*--privileged"
    ):
        EmulatedLink(name="n").up()


def test_ranks_are_shared_out_evenly_or_not_at_all() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot be shared out evenly among 2 hosts"):
        launch_ranks("shardrt.bench.overlap_rank", {}, ranks=3, hosts=EmulatedLink(name="n").hosts)
