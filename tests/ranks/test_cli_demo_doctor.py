"""``shardrt demo`` and ``shardrt doctor`` as users run them, and the launcher below them when ranks misbehave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardrt.errors import CommunicationError, PeerError
from shardrt.launch import launch_ranks
from tests.ranks.leftovers import MARK, hear_ctrl_c, marked, new_mark, wait_for
from tests.unit.fake_site import FakeSite

ROOT = Path(__file__).parents[2]
SECONDS = 180


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from shardrt.cli import main; main(prog_name='shardrt')", *arguments]


def environment(mark: str, *folders: Path) -> dict[str, str]:
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SHARDRT_")}
    return kept | {MARK: mark, "PYTHONPATH": path, "COLUMNS": "100"}


def run(*arguments: str, folders: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    mark = new_mark()
    done = subprocess.run(
        command(*arguments),
        env=environment(mark, *folders),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert wait_for(mark, "", 0, seconds=30) == []
    return done


def run_json(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_two_ranks_train_like_the_unsharded_run() -> None:
    document = run_json("demo", "--steps", "4", "--batch", "2")
    assert (document["ranks"], document["steps"], document["backend"]) == (2, 4, "shm")
    assert document["largest_parameter_difference"] == 0.0
    assert document["ranks_agree"] is True
    sharded, unsharded = document["sharded"], document["unsharded"]
    assert sharded["losses"] == unsharded["losses"]
    assert len(sharded["losses"]) == 4
    assert sharded["final_loss"] < sharded["first_loss"]
    assert sharded["optimizer_bytes"] < 0.52 * unsharded["optimizer_bytes"]
    assert document["optimizer_bytes_saved"] == 1 - sharded["optimizer_bytes"] / unsharded["optimizer_bytes"]
    least = document["parameter_bytes"]  # 2 (N - 1) / N of it, with two ranks
    assert document["traffic"]["minimum_per_step"] == least
    assert sum(rank["sent_per_step"] for rank in document["per_rank"]) / 2 == pytest.approx(least, rel=0.01)
    assert sum(rank["optimizer_bytes"] for rank in document["per_rank"]) == unsharded["optimizer_bytes"]
    assert sum(rank["owned_parameter_bytes"] for rank in document["per_rank"]) == document["parameter_bytes"]
    assert 1.0 <= document["imbalance"] < 1.05


@pytest.mark.long
def test_muon_and_adamw_share_a_model() -> None:
    done = run("demo", "--steps", "2", "--batch", "1", "--optimizer", "muon")
    assert done.returncode == 0, done.stderr
    assert "834,304 parameters, muon, 2 steps on 2 ranks: greedy, shm, sync" in done.stdout
    assert "The same training to the last bit, with 48% less optimizer state" in done.stdout


@pytest.mark.long
def test_one_rank_is_the_plain_optimizer() -> None:
    document = run_json(
        "demo", "--ranks", "1", "--steps", "2", "--batch", "1", "--partitioner", "flat", "--optimizer", "sgd"
    )
    assert document["largest_parameter_difference"] == 0.0
    assert document["optimizer_bytes_saved"] == 0.0
    assert document["traffic"] == {"sent_per_step_mean": 0.0, "minimum_per_step": 0.0, "ratio": None}


BROKEN = """
import os

class Broken:
    name = "broken"
    cuts_parameters = False

    def partition(self, request):
        import shardrt_greedy.partitioner
        if os.environ.get("RANK") == "1":
            raise ValueError("rank 1 has no idea")
        return shardrt_greedy.partitioner.GreedyPartitioner().partition(request)

@shardrt.hookimpl
def shardrt_partitioners():
    yield shardrt.PartitionerRecord(name="broken", summary="fails on rank 1", factory=Broken)
"""


def test_the_text_of_a_failing_rank_reaches_the_user(tmp_path: Path) -> None:
    FakeSite(tmp_path).install("shardrt-broken", {"broken": BROKEN})
    done = run("demo", "--partitioner", "broken", folders=(tmp_path,))
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: rank 1 failed: ValueError: rank 1 has no idea" in done.stderr
    assert "in partition" in done.stderr  # where it happened


def test_ctrl_c_ends_the_ranks() -> None:
    mark = new_mark()
    shell = subprocess.Popen(
        command("demo", "--steps", "100000"),
        env=environment(mark),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    )
    try:
        assert len(wait_for(mark, "shardrt.demo.worker\0{", 3)) == 3  # torchrun's command line has the name as well
        shell.send_signal(signal.SIGINT)
        told = shell.communicate(timeout=120)
    finally:
        shell.kill()  # its ranks end with it
    assert shell.returncode == 1, told
    assert "Aborted!" in told[1]
    assert wait_for(mark, "", 0, seconds=30) == []


def test_ranks_end_with_a_parent_that_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    mark = new_mark()
    # A parent that is killed cannot remove its folder.
    variables = environment(mark) | {"TMPDIR": str(tmp_path_factory.mktemp("t"))}
    with subprocess.Popen(command("demo", "--steps", "100000", "--json"), env=variables, cwd=ROOT) as shell:
        assert len(wait_for(mark, "shardrt.demo.worker\0{", 3)) == 3
        shell.kill()
    assert wait_for(mark, "", 0, seconds=60) == []


def test_doctor_finds_all_well() -> None:
    document = run_json("doctor")
    assert document["ok"] is True
    assert document["problem"] == ""
    smoke = document["smoke"]
    assert (smoke["ok"], smoke["ranks"], smoke["steps"], smoke["backend"]) == (True, 2, 3, "shm")
    assert smoke["largest_parameter_difference"] == 0.0
    chosen = {(one["device_type"], one["ranks"]): one["backend"] for one in document["auto"]}
    assert (chosen["cpu", 1], chosen["cpu", 2]) == ("null", "shm")
    backends = {(one["device_type"], one["name"]): one for one in document["backends"]}
    assert backends["cpu", "gloo"]["available"] is True
    assert all(one["fix"] for one in backends.values() if not one["available"])
    assert {"python", "torch", "torch build", "shardrt", "pluggy"} <= set(document["versions"])
    assert document["shared_memory"]["total"] >= document["shared_memory"]["free"] >= 0


def test_doctor_reports_a_failed_smoke_test(tmp_path: Path) -> None:
    failing = BROKEN.replace('name="broken"', 'name="loud"').replace(
        "yield", 'assert os.environ.get("RANK") != "1", "rank 1 is not welcome"\n    yield'
    )
    FakeSite(tmp_path).install("shardrt-loud", {"loud": failing})
    done = run("doctor", folders=(tmp_path,))
    assert done.returncode == 1, done.stdout
    assert "smoke test: failed" in done.stdout
    assert "plugins" in done.stdout[done.stdout.index("smoke test: failed") :]  # ranks differ in what is installed


def odd(doing: str, **more: Any) -> list[Any]:
    return launch_ranks("tests.ranks.odd_ranks", {"doing": doing}, ranks=2, **more)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    value = new_mark()
    monkeypatch.setenv(MARK, value)
    return value


def test_results_and_events_come_by_rank(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")  # of somebody else's launcher
    heard: list[tuple[int, Any]] = []
    answers = odd("answer", on_event=lambda rank, event: heard.append((rank, event)))
    assert answers == [{"rank": rank, "world_size": "2", "threads": "1"} for rank in range(2)]
    assert sorted(rank for rank, _ in heard) == [0, 1]
    assert marked(mark) == []


def test_the_cause_is_told_and_not_who_noticed_first(mark: str) -> None:
    with pytest.raises(PeerError, match=r"^rank 1 failed: ValueError: the shelf \[bold\] fell down\n"):
        odd("raise")
    assert marked(mark) == []


def test_a_rank_that_is_killed_is_named_with_its_last_output(mark: str) -> None:
    with pytest.raises(PeerError, match=r"(?s)^rank 1 ended without a word .*a last gasp"):
        odd("die")
    assert marked(mark) == []


def test_no_news_is_bad_news(mark: str) -> None:
    with pytest.raises(
        CommunicationError, match=r'no news from any rank for 1 s: .*rank 1 last said {"doing": "sleep"}'
    ):
        odd("sleep", patience=1.0)
    assert marked(mark) == []
