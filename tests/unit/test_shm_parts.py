"""Parts of the shm backend alone: room, memory that forked children leave alone, counters that go round."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from shardrt_shm.area import SLOTS, Area, AreaLayout
from shardrt_shm.arena import Arena
from shardrt_shm.peers import Process, introduce, open_peer, suits
from shardrt_shm.pieces import Pieces
from shardrt_shm.room import SPARE_BYTES, room, why_no_room
from shardrt_shm.steps import Steps
from shardrt_shm.sums import Summing

from shardrt.errors import BackendUnavailableError, CommunicationError

MB = 2**20


def a_system(root: Path, *, available_mb: int, cgroup: str = "0::/\n", files: dict[str, str] | None = None) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_mb * 1024} kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def room_of(root: Path) -> tuple[int, str]:
    return room(root / "proc", root / "cgroup")


def test_room_is_what_the_system_says_where_nothing_limits(tmp_path: Path) -> None:
    assert room_of(a_system(tmp_path, available_mb=500)) == (500 * MB, "the system")


def test_room_is_limited_by_the_tightest_control_group_above(tmp_path: Path) -> None:
    files = {
        "pod/box/memory.max": "max\n",
        "pod/box/memory.current": f"{80 * MB}\n",
        "pod/memory.max": f"{200 * MB}\n",
        "pod/memory.current": f"{150 * MB}\n",
        "pod/memory.stat": f"anon 1\ninactive_file {30 * MB}\n",
    }
    found, who = room_of(a_system(tmp_path, available_mb=500, cgroup="0::/pod/box\n", files=files))
    assert found == 80 * MB and "pod" in who and "memory.max" in who


def test_room_knows_the_first_version_of_control_groups(tmp_path: Path) -> None:
    files = {"memory/box/memory.limit_in_bytes": f"{100 * MB}\n", "memory/box/memory.usage_in_bytes": f"{40 * MB}\n"}
    cgroup = "3:cpu,cpuacct:/\n2:memory:/box\n0::/\n"
    assert room_of(a_system(tmp_path, available_mb=500, cgroup=cgroup, files=files))[0] == 60 * MB


def test_some_memory_is_left_alone(tmp_path: Path) -> None:
    root = a_system(tmp_path, available_mb=100)
    places = {"proc": root / "proc", "cgroups": root / "cgroup"}
    assert why_no_room(100 * MB - SPARE_BYTES, **places) == ""
    told = why_no_room(100 * MB - SPARE_BYTES + 1, **places)
    assert told == "there is no room for 37 MB of shared memory: the system leaves 100 MB"


def test_a_forked_child_gives_back_nothing_of_its_parents() -> None:
    arena = Arena()
    tensor = arena.take(8192)
    tensor.fill_(5)
    child = os.fork()
    if child == 0:
        del tensor
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert tensor.eq(5).all() and arena.taken == 8192


def test_ranges_are_never_used_twice() -> None:
    arena = Arena()
    first = arena.take(100)
    place = arena.find(first)
    assert place is not None
    first.fill_(9)
    del first
    second = arena.take(100)
    again = arena.find(second)
    assert again is not None and again.offset > place.offset
    assert os.pread(arena.fd, 100, place.offset) == bytes(100)  # the memory is gone, the place is not


def test_the_memory_of_a_process_is_only_taken_with_its_token() -> None:
    told = introduce()
    assert open_peer(1, told).process.pid == os.getpid()
    with pytest.raises(BackendUnavailableError, match=r"rank 1 .* does not hold the token"):
        open_peer(1, {**told, "token": "00" * 32})
    with pytest.raises(BackendUnavailableError, match="cannot be opened: No such file"):
        open_peer(1, {**told, "token": "01" * 32, "file": 10**6})
    answer = suits([told, {**told, "token": "02" * 32, "started": "0"}])
    assert not answer.ok and answer.reason.endswith("has ended")


def test_ranges_beyond_the_file_are_refused() -> None:
    peer = open_peer(0, introduce())
    with pytest.raises(BackendUnavailableError, match="names bytes"):
        peer.read(0, 2**40)


def steps_of(areas: list[Area], rank: int) -> Steps:
    here = Process(pid=os.getpid(), started=introduce()["started"])
    peers = [(other, area, here) for other, area in enumerate(areas) if other != rank]
    return Steps(areas[rank], peers, rank=rank, timeout=0.05, progress=lambda: None)


def test_counters_go_round() -> None:
    layout = AreaLayout(world_size=2, slot_bytes=4096)
    areas = [Area(layout, torch.zeros(layout.nbytes, dtype=torch.uint8)) for _ in range(2)]
    steps = steps_of(areas, 0)
    steps._past = 2**32 - 2
    for area in areas:
        area.state.value = 1
        area.ready.value = area.done.value = 2**32 - 2
    areas[1].ready.value = areas[1].done.value = 3  # five steps on, beyond zero
    written = []
    steps.run(5, write=lambda step, at: written.append(at % SLOTS), read=None, meet=lambda: None)
    assert written == [2, 3, 0, 1, 2]
    assert (areas[0].ready.value, areas[0].done.value, steps._past) == (3, 3, 3)


def test_an_operation_begins_ahead_only_where_its_slot_is_free() -> None:
    layout = AreaLayout(world_size=2, slot_bytes=4096)
    areas = [Area(layout, torch.zeros(layout.nbytes, dtype=torch.uint8)) for _ in range(2)]
    for area in areas:
        area.state.value = 1
    steps = steps_of(areas, 0)
    steps._past = SLOTS
    written: list[int] = []

    def write(step: int, at: int) -> None:
        written.append(at)

    assert not steps.begin(1, write=write)
    assert written == [] and areas[0].ready.value == 0
    areas[1].done.value = 1  # the peer has read the first slot
    assert steps.begin(1, write=write)
    assert written == [SLOTS] and areas[0].ready.value == SLOTS + 1
    areas[1].ready.value = SLOTS + 1
    steps.run(1, write=write, read=None, meet=lambda: None, has_begun=True)
    assert written == [SLOTS] and areas[0].done.value == SLOTS + 1


def test_nobody_writes_what_a_peer_still_reads() -> None:
    layout = AreaLayout(world_size=2, slot_bytes=4096)
    areas = [Area(layout, torch.zeros(layout.nbytes, dtype=torch.uint8)) for _ in range(2)]
    for area in areas:
        area.state.value = 1
    areas[1].ready.value = 100
    steps = steps_of(areas, 0)
    steps.operation = "all_gather"
    written: list[int] = []
    with pytest.raises(CommunicationError, match=r"all_gather from rank 1 took longer than 0\.05 s"):
        steps.run(100, write=lambda step, at: written.append(step), read=None, meet=lambda: None)
    assert written == list(range(SLOTS))


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_run_that_is_the_result_is_read_before_it_is_written(at: int) -> None:
    runs = [torch.randn(50) for _ in range(4)]
    expected = runs[0] + runs[1] + runs[2] + runs[3]
    Summing().combine(runs, runs[at], "sum")
    assert runs[at].equal(expected)


def test_pieces_are_one_run() -> None:
    whole = torch.arange(20.0)
    pieces = Pieces([whole[:3].clone(), whole[3:3], whole[3:11].clone(), whole[11:].clone()])
    for start in range(20):
        for stop in range(start, 21):
            target = torch.full((stop - start,), -1.0)
            pieces.copy_to(target, start)
            assert target.equal(whole[start:stop])
