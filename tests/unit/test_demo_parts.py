"""The parts of the demo, the doctor and the step benchmark that need no ranks."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import shardrt.cli.doctor
import shardrt.launch
from shardrt.bench.step import MODELS, OPTIMIZERS, measure_steps
from shardrt.cli import main
from shardrt.demo import diagnosis
from shardrt.demo.model import CONTEXT, ByteTransformer
from shardrt.demo.rank import run_rank
from shardrt.demo.recipes import build_optimizers, check_settings, parts_of, plain
from shardrt.demo.report import DemoReport
from shardrt.demo.settings import RECIPES, DemoSettings
from shardrt.demo.text import read_corpus
from shardrt.demo.training import largest_difference
from shardrt.errors import BackendUnavailableError, ConfigError, UnknownPluginError, UnsupportedError
from shardrt.hearing import Listener, RankLog
from tests.unit.fake_site import FakeSite, make_site, offering


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(main, list(arguments), catch_exceptions=False)


# The text


def test_the_corpus_is_the_same_every_time_and_keeps_to_its_limit() -> None:
    one, other = (read_corpus(most_bytes=50_000) for _ in range(2))
    assert torch.equal(one.data, other.data)
    assert one.data.numel() == 50_000


def test_the_corpus_leaves_out_what_is_not_the_library(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "pkg").mkdir()
    for name, letter in {
        "z.py": "z",
        "a.py": "a",
        "notes.txt": "n",
        "site-packages/s.py": "s",
        "pkg/p.py": "p",
    }.items():
        (tmp_path / name).write_text(letter * 10)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    corpus = read_corpus(tmp_path, least_bytes=1)
    assert bytes(corpus.data.tolist()) == b"a" * 10 + b"z" * 10 + b"p" * 10
    assert corpus.files == 3


def test_a_python_without_sources_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    result = run("demo", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"].startswith("the demo learns from Python's own sources, but 0 readable")


def test_windows_differ_by_step_rank_and_seed_alone() -> None:
    corpus = read_corpus(most_bytes=50_000)

    def batch(**changes: int) -> torch.Tensor:
        return corpus.windows(**{"seed": 1, "step": 2, "rank": 0, "count": 3, "length": CONTEXT + 1, **changes})

    assert torch.equal(batch(), batch())
    assert all(not torch.equal(batch(), batch(**changes)) for changes in ({"seed": 2}, {"step": 3}, {"rank": 1}))


# The model and its optimizers


def test_the_model_ties_its_embedding_and_looks_only_back() -> None:
    model = ByteTransformer()
    assert model.head.weight is model.embedding.weight
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    window = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0))
    model(window)
    changed = window.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    model(changed)
    assert torch.equal(seen[0][:, :20], seen[1][:, :20])
    assert not torch.equal(seen[0][:, 20:], seen[1][:, 20:])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = ByteTransformer(width=16, layers=1, heads=2)
    before = {key: param.detach().clone() for key, param in model.named_parameters()}
    assert sum(len(params) for params, _, _ in parts_of(model, name)) == len(before)
    optimizers = build_optimizers(model, name, plain)
    window = torch.randint(256, (4, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        losses.append(model(window).item())
        model(window).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert not [key for key, param in model.named_parameters() if torch.equal(param, before[key])]


def test_what_cannot_work_is_refused_before_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardrt.cli.demo.launch_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(UnknownPluginError, match=r"unknown partitioner 'gredy'.*did you mean 'greedy'"):
        check_settings(DemoSettings(partitioner="gredy"))
    with pytest.raises(UnknownPluginError, match="unknown schedule 'sink'"):
        check_settings(DemoSettings(schedule="sink"))
    with pytest.raises(UnknownPluginError, match="unknown backend 'glo' for device type 'cpu'"):
        check_settings(DemoSettings(backend="glo"))
    with pytest.raises(UnsupportedError, match=r"Muon needs whole parameters.*use partitioner='greedy'"):
        check_settings(DemoSettings(partitioner="flat", optimizer="muon"))
    with pytest.raises(ConfigError, match="bucket_mb = -1"):
        check_settings(DemoSettings(bucket_mb=-1.0))
    with pytest.raises(ConfigError, match=r"unknown optimizer 'sdg'; the demo has: .*; did you mean 'sgd'"):
        DemoSettings(optimizer="sdg")
    for arguments, code in {("--ranks", "0"): 2, ("--steps", "0"): 2, ("--optimizer", "sdg"): 1}.items():
        assert run("demo", *arguments).exit_code == code


def test_an_unavailable_backend_is_refused_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for site in make_site(tmp_path, monkeypatch):
        probe = "lambda: shardrt.Availability.no('no wire', fix='plug one in')"
        site.install("shardrt-wire", {"wire": offering("backend", "wire", probe=probe)})
        site.install("shardrt-sync", {"sync": offering("schedule", "sync")})
        greedy = offering("partitioner", "greedy").replace("factory=object", "factory=type('P', (), {'name': 'g'})")
        site.install("shardrt-greedy", {"greedy": greedy})
        with pytest.raises(BackendUnavailableError, match="no wire; fix: plug one in"):
            check_settings(DemoSettings(backend="wire"))


# The report


def answer(**changes: Any) -> dict[str, Any]:
    run = {"losses": [3.0, 2.0], "step_seconds": [9.0, 0.5], "optimizer_bytes": 80, "sent": 0, "received": 0}
    sharded = run | {"optimizer_bytes": 40, "sent": 220, "owned_bytes": [60, 40], "backend": "g", "backend_reason": "?"}
    corpus = {"files": 1, "bytes": 2, "folder": "lib"}
    same = {"digest": "a", "largest_parameter_difference": 0.0, "parameters": 25, "parameter_bytes": 100}
    return {"sharded": sharded, "unsharded": run, "corpus": corpus, **same, **changes}


def test_the_report_puts_ranks_together() -> None:
    second = answer()
    second["sharded"] = second["sharded"] | {"optimizer_bytes": 50, "losses": [5.0, float("nan")], "sent": 200}
    report = DemoReport(settings=DemoSettings(steps=2), answers=[answer(), second], seconds=1.0)
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["sharded"]["losses"] == [4.0, None]
    assert document["optimizer_bytes_saved"] == 1 - 50 / 80
    assert document["imbalance"] == 1.2
    assert document["traffic"] == {"sent_per_step_mean": 105.0, "minimum_per_step": 100.0, "ratio": 1.05}
    assert document["sharded"]["ms_per_step"] == 500.0
    assert report.ranks_agree


def test_ranks_that_end_apart_fail_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardrt.cli.demo.launch_ranks", lambda *_, **__: [answer(), answer(digest="b")])
    result = run("demo")
    assert result.exit_code == 1
    assert "different parameters: this must never happen" in result.stdout


def test_a_difference_that_is_no_number_is_infinite() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    assert largest_difference(one, other) == 0.0
    with torch.no_grad():
        other.bias[1] = float("nan")
    assert largest_difference(one, other) == float("inf")


# The connection between a rank and its parent


@pytest.fixture
def listener(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    path = tmp_path_factory.mktemp("l") / "events"
    monkeypatch.setenv(shardrt.launch.SOCKET_VARIABLE, str(path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("sys.argv", ["worker", '{"x": 3}'])
    monkeypatch.setattr("shardrt.demo.rank._end_with_parent", lambda connection: None)
    with Listener(path, ranks=2) as made:
        yield made


def test_a_rank_tells_events_and_its_result(listener: Listener) -> None:
    run_rank(lambda settings, report: (report("on my way"), settings["x"] + 1)[1])
    assert listener.poll(1.0) == [(1, None), (1, "on my way"), (1, None)]
    assert (listener.ranks[1].finished, listener.ranks[1].result) == (True, 4)
    assert listener.ranks[0].last_words == "has not started"
    assert not listener.someone_failed


def test_errors_of_ours_come_as_they_are_and_others_with_where(listener: Listener) -> None:
    def fail(error: Exception) -> Any:
        def work(settings: Any, report: Any) -> None:
            raise error

        with pytest.raises(type(error)):
            run_rank(work)
        listener.poll(1.0)
        return listener.ranks[1].error

    assert fail(ConfigError("no")) == "ConfigError: no"
    assert "test_demo_parts.py" in fail(KeyError("k"))
    assert listener.someone_failed


def test_a_message_in_pieces_is_one_message(listener: Listener, tmp_path: Path) -> None:
    import os

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
        rank.connect(os.environ[shardrt.launch.SOCKET_VARIABLE])
        for piece in (b'{"hello": 0, "p', b'id": 5}\n{"event"', b": 7}\n"):
            rank.sendall(piece)
            heard = listener.poll(1.0)
        assert heard[-1] == (0, 7)
        assert listener.ranks[0].pid == 5
        assert not listener.someone_failed
    listener.poll(1.0)
    assert listener.someone_failed


def test_a_socket_name_that_is_too_long_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter folder"):
        Listener(Path("x" * 120), ranks=1)


def log(rank: int, ended_at: float, error: str | None = None, *, only_passes_on: bool = False) -> RankLog:
    return RankLog(rank=rank, pid=rank, ended_at=ended_at, error=error, only_passes_on=only_passes_on)


@pytest.mark.parametrize(
    ("logs", "cause"),
    [
        ([log(0, 1.0, "peer failed", only_passes_on=True), log(1, 2.0, "own fault")], 1),
        ([log(0, 2.0, "connection lost"), log(1, 1.0)], 1),  # it died, and the other one noticed
        ([log(0, 1.0, "own fault"), log(1, 2.0)], 0),  # torchrun ended the other one
        ([log(0, 1.0, "peer failed", only_passes_on=True), log(1, 2.0)], 0),
    ],
)
def test_the_cause_is_found(listener: Listener, logs: list[RankLog], cause: int) -> None:
    assert listener.cause() is None
    listener.ranks[:] = logs
    assert listener.cause() is logs[cause]


# The doctor


def test_doctor_without_the_smoke_test() -> None:
    result = run("doctor", "--no-smoke")
    assert result.exit_code == 0
    assert "auto chose shm for cpu with 2 ranks" in " ".join(result.stdout.replace("│", " ").split())
    assert "smoke test: left out" in result.stdout
    document = json.loads(run("doctor", "--no-smoke", "--json").stdout)
    assert (document["ok"], document["smoke"]) == (True, None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    yield from make_site(tmp_path, monkeypatch)


def test_doctor_survives_plugins_that_cannot_be_loaded_together(site: FakeSite) -> None:
    site.install("shardrt-a", {"a": offering("schedule", "x")})
    site.install("shardrt-b", {"b": offering("schedule", "x")})
    result = run("doctor", "--no-smoke", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert "two plugins register the schedule 'x'" in document["problem"]
    assert document["versions"]["torch"] == torch.__version__
    assert "problem: two plugins register" in run("doctor", "--no-smoke").stdout


def test_doctor_tells_why_auto_finds_nothing_and_what_failed(site: FakeSite) -> None:
    site.install("shardrt-odd", {"odd": offering("backend", "odd", probe="lambda: [][1]", priority="5")})
    site.install("shardrt-bad", {"bad": "import no_such_vendor"})
    document = json.loads(run("doctor", "--no-smoke", "--json").stdout)
    assert document["auto"][0]["backend"] is None
    assert "IndexError" in document["auto"][0]["reason"]
    assert "failed: plugin 'bad'" in run("doctor", "--no-smoke").stdout


def test_a_failed_smoke_test_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"digest": "a", "largest_parameter_difference": 0.25, "backend": "gloo", "seconds": 0.1}
    monkeypatch.setattr(diagnosis, "launch_ranks", lambda *_, **__: [same, same | {"digest": "b"}])
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["smoke"]["error"] == (
        "the ranks ended with different parameters; parameters differ by 0.25 from those of the unsharded twin"
    )

    def fail(*_: Any, **__: Any) -> Any:
        raise ConfigError("no [bold] luck")

    monkeypatch.setattr(diagnosis, "launch_ranks", fail)
    result = run("doctor")
    assert result.exit_code == 1
    assert "smoke test: failed after 0.0 s: no [bold] luck" in result.stdout


# The step benchmark


def test_bench_step_tells_times_and_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    result = run("bench", "step", "--rounds", "1", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert [(row["model"], row["optimizer"]) for row in document["times"]] == [
        (model, optimizer) for model in MODELS for optimizer in OPTIMIZERS
    ]
    assert all(row["ratio"] == row["shardrt_seconds"] / row["bare_seconds"] for row in document["times"])
    assert torch.get_num_threads() == threads
    assert "ratio" in run("bench", "step", "--rounds", "1").stdout
    with pytest.raises(ConfigError, match="rounds must be 1 or more"):
        measure_steps(rounds=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 is set"):
        measure_steps(rounds=1)
