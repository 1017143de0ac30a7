"""``shardrt bench overlap`` as users run it, on loopback and over a real emulated link."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardrt.bench.contest import DDP, TORCH_ZERO, combine
from shardrt.bench.link import EmulatedLink, namespaces_of_ours, require_tools
from shardrt.bench.overlap import OverlapReport, OverlapSettings, built_in_schedules
from shardrt.cli import main
from shardrt.cli.overlap import _show
from shardrt.errors import ConfigError, PeerError, UnknownPluginError, UnsupportedError
from shardrt.launch import launch_ranks
from shardrt.timeline.reading import read_timelines
from tests.ranks.commands import COMMAND, ROOT, answer_of
from tests.ranks.leftovers import MARK, hear_ctrl_c, new_mark, wait_for


def no_link_because() -> str:
    try:
        require_tools()
        with EmulatedLink():
            return ""
    except UnsupportedError as error:
        return str(error)


NO_LINK_BECAUSE = no_link_because()
needs_link = pytest.mark.skipif(bool(NO_LINK_BECAUSE), reason=NO_LINK_BECAUSE)


def measure(*arguments: str) -> dict[str, Any]:
    return answer_of("bench", "overlap", "--steps", "2", "--rounds", "1", *arguments)


def check_everybody_trained_alike(document: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in document["contestants"]}
    assert list(rows) == [DDP, TORCH_ZERO, *document["schedules"]]
    # With two ranks there is one order to add in, and halving is exact: the same bits, not only close.
    assert {row["largest_parameter_difference"] for row in rows.values()} == {0.0}
    assert all(row["ranks_agree"] for row in rows.values())
    assert rows[DDP]["times_ddp_adamw"] == rows[TORCH_ZERO]["times_torch_zero"] == 1.0


def test_every_schedule_trains_as_ddp_does_and_leaves_a_timeline(tmp_path: Path) -> None:
    document = measure("--timeline", str(tmp_path / "kept"))
    check_everybody_trained_alike(document)
    assert document["schedules"] == list(built_in_schedules())
    assert set(document["schedules"]) >= {"sync", "bucket", "interleaved"}
    assert document["wire_limit_ms_per_step"] is None
    assert document["hidden_share"].keys() == set(document["schedules"])
    assert all(0 <= share <= 1 for share in document["hidden_share"].values())
    assert document["hidden_share"]["sync"] == 0  # every operation begins and ends inside a step that waits for it
    for name in document["schedules"]:
        assert [one.rank for one in read_timelines([tmp_path / "kept" / name])] == [0, 1]


@pytest.mark.long
@needs_link
def test_over_a_link_the_bytes_travel_on_its_device_and_nothing_is_left() -> None:
    before = set(namespaces_of_ours())
    document = measure("--link", "400mbit", "--schedule", "bucket")
    assert set(namespaces_of_ours()) <= before
    check_everybody_trained_alike(document)
    wire = document["wire_limit_ms_per_step"]
    assert wire == pytest.approx(8 * document["parameter_bytes"] / 400e6 * 1e3)
    for row in document["contestants"]:
        # Nobody else uses the device, so its counter is exact up to the headers of TCP.
        factor = 1.5 if row["name"] == TORCH_ZERO else 1.0
        assert factor <= row["times_minimum_wire_bytes"] < 1.05 * factor
        # No timing of ours: bytes cannot be faster than the token bucket, whose burst is a sixteenth of them.
        assert row["ms_per_step_fastest"] > 0.8 * factor * wire


@needs_link
@pytest.mark.parametrize(
    ("doing", "told"),
    [
        ("raise", r"rank 1 failed: ValueError: the shelf \[bold\] fell down"),
        ("die", r"rank 1 ended without a word(.|\n)*a last gasp"),
    ],
)
def test_a_rank_that_fails_behind_a_link_is_named(doing: str, told: str) -> None:
    with EmulatedLink() as link, pytest.raises(PeerError, match=told):
        launch_ranks("tests.ranks.odd_ranks", {"doing": doing}, ranks=2, hosts=link.hosts)


@needs_link
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_ended_leaves_nothing(number: signal.Signals) -> None:
    mark = new_mark()
    before = set(namespaces_of_ours())
    with subprocess.Popen(
        [*COMMAND, "bench", "overlap", "--link", "1gbit", "--json"],
        env=os.environ | {MARK: mark},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=hear_ctrl_c,
    ) as process:
        try:
            assert len(wait_for(mark, "torch.distributed.run", 2)) == 2
            assert len(set(namespaces_of_ours()) - before) == 2
        finally:
            process.send_signal(number)
        process.communicate(timeout=120)
        assert process.returncode == {signal.SIGINT: 1, signal.SIGTERM: 143}[number]
    assert set(namespaces_of_ours()) <= before
    assert wait_for(mark, "", 0, seconds=30) == []


RUN = {"step_seconds": [12.3456], "optimizer_bytes": 8, "largest_difference": 0.0, "digest": "a1", "wire_bytes": 64}


def test_the_tables_fit_and_ranks_that_differ_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = OverlapSettings(steps=1, rounds=1, link="1gbit")
    odd = {"interleaved": {"digest": "b2"}}
    report = OverlapReport(
        settings=settings,
        results=tuple(combine(name, settings, [[RUN], [RUN | odd.get(name, {})]]) for name in settings.contestants),
        parameters=8,
        parameter_bytes=10**9,
        torch="2",
        seconds=1.0,
        hidden={"bucket": 0.725, "sync": None},
    )
    assert report.wire_seconds == 8.0
    assert report.ranks_agree is False
    monkeypatch.setenv("COLUMNS", "80")
    _show(report, Path("kept"))
    shown = capsys.readouterr().out
    assert "72.5%" in shown and "…" not in shown
    assert "take 8,000 ms on a link of 1gbit" in shown
    assert "different parameters under: shardrt, interleaved." in shown
    assert all(label in shown for label in settings.contestants.values())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"link": "fast"}, "rate must be like '1gbit', '250mbit' or '64kbit', got 'fast'"),
        ({"link": "1gbit", "ranks": 3}, "a link joins 2 hosts with one rank each, got 3 ranks"),
        ({"steps": 0}, "steps must be a whole number from 1 up, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        OverlapSettings(**arguments)


def test_names_that_are_not_installed_are_refused_before_ranks_start() -> None:
    with pytest.raises(UnknownPluginError, match="did you mean 'bucket'"):
        OverlapSettings(schedules=("buket",))
    done = CliRunner().invoke(main, ["bench", "overlap", "--partitioner", "flatt"])
    assert done.exit_code == 1 and "did you mean 'flat'" in done.stderr


def test_without_iproute2_a_link_is_refused_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    done = CliRunner().invoke(main, ["bench", "overlap", "--link", "1gbit"])
    assert done.exit_code == 1 and "install iproute2, or measure on loopback with --link none" in done.stderr
