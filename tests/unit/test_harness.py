"""The rank harness and the conformance kit: what they promise, and that the kit catches what it is there for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardrt.errors import ConfigError
from shardrt.plan import Partition, Shard
from shardrt.testing import (
    BackendConformance,
    Outcome,
    PartitionerConformance,
    RankFailure,
    RankPool,
    ScheduleConformance,
)
from shardrt.testing.rendezvous import rank_store


def add_up(value: float) -> list[float]:
    tensor = torch.full((2,), value + dist.get_rank())
    dist.all_reduce(tensor)
    return tensor.tolist()


def environment(names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def start_own_group() -> list[int]:
    dist.init_process_group("gloo")
    return [dist.get_rank(), dist.get_world_size()]


def group_is_there() -> bool:
    return dist.is_initialized()


def random_numbers() -> list[float]:
    return torch.rand(3).tolist()


def leave_a_mess() -> None:
    os.environ["LEFT_BEHIND"] = "yes"
    os.environ.pop("OMP_NUM_THREADS", None)
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    sys.path.insert(0, "/nowhere")
    dist.init_process_group("gloo")


def find_a_mess() -> list[Any]:
    return [
        os.environ.get("LEFT_BEHIND"),
        os.environ.get("OMP_NUM_THREADS"),
        str(Path.cwd()),
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        "/nowhere" in sys.path,
        dist.is_initialized(),
    ]


def fail_alike() -> None:
    sys.stderr.write("a last word\n")
    raise ValueError("all ranks dislike this")


def fail_on(rank: int) -> str:
    if int(os.environ["RANK"]) == rank:
        raise KeyError(f"rank {rank}")
    return "fine"


def fail_while_peers_wait() -> None:
    if dist.get_rank() == 0:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def sleep_on(rank: int, seconds: float) -> int:
    if int(os.environ["RANK"]) == rank:
        fall_asleep(seconds)
    return rank


def fall_asleep(seconds: float) -> None:
    time.sleep(seconds)


def die_on(rank: int, how: str) -> str:
    if int(os.environ["RANK"]) == rank:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def die_and_leave_peers_stuck() -> None:
    if int(os.environ["RANK"]) == 1:
        os._exit(1)
    time.sleep(60)


def give_a_tensor() -> torch.Tensor:
    return torch.ones(1)


def own_pid() -> int:
    return os.getpid()


def warn() -> None:
    import warnings

    warnings.warn("beware", UserWarning, stacklevel=1)


def meet_in_the_store() -> str:
    store = rank_store()
    store.set(os.environ["RANK"], "here")
    return store.get(str(1 - int(os.environ["RANK"]))).decode()


class TestCalls:
    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_results_in_rank_order(self, ranks: RankPool, world: int) -> None:
        total = float(sum(2 + rank for rank in range(world)))
        assert ranks.run(add_up, ranks=world, value=2) == [[total, total]] * world

    def test_function_by_name(self, ranks: RankPool) -> None:
        assert ranks.run("os:getenv", ranks=2, init=None, key="LOCAL_RANK") == ["0", "1"]

    def test_launcher_variables(self, ranks: RankPool) -> None:
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
        found = ranks.run(environment, ranks=2, init=None, names=names)
        assert [list(variables.values()) for variables in found] == [
            ["0", "2", "0", "2", "127.0.0.1"],
            ["1", "2", "1", "2", "127.0.0.1"],
        ]

    def test_no_launcher(self, ranks: RankPool) -> None:
        names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
        [found] = ranks.run(environment, ranks=1, init=None, launcher=False, names=names)
        assert set(found.values()) == {None}

    def test_more_variables(self, ranks: RankPool) -> None:
        found = ranks.run(environment, ranks=1, env={"FLAVOUR": "sour"}, names=["FLAVOUR"])
        assert found == [{"FLAVOUR": "sour"}]
        assert ranks.run(environment, ranks=1, names=["FLAVOUR"]) == [{"FLAVOUR": None}]

    @pytest.mark.parametrize("again", range(3))
    def test_function_starts_the_group(self, ranks: RankPool, again: int) -> None:
        assert ranks.run(start_own_group, ranks=2, init=None) == [[0, 2], [1, 2]]
        assert ranks.run(group_is_there, ranks=2, init=None) == [False, False]

    def test_seeds(self, ranks: RankPool) -> None:
        first, second = ranks.run(random_numbers, ranks=2, init=None)
        assert first == second == ranks.run(random_numbers, ranks=1, init=None)[0]
        assert ranks.run(random_numbers, ranks=1, init=None, seed=5)[0] != first

    def test_nothing_is_left_behind(self, ranks: RankPool) -> None:
        before = ranks.run(find_a_mess, ranks=2, init=None)
        ranks.run(leave_a_mess, ranks=2, init=None)
        assert ranks.run(find_a_mess, ranks=2, init=None) == before
        assert before[0][6:] == [1, False, False]

    def test_store_of_the_call(self, ranks: RankPool) -> None:
        assert ranks.run(meet_in_the_store, ranks=2, init=None) == ["here", "here"]

    def test_workers_are_reused(self, ranks: RankPool) -> None:
        first = ranks.run(own_pid, ranks=2, init=None)
        started = time.monotonic()
        for _ in range(10):
            assert ranks.run(own_pid, ranks=2, init=None) == first
        assert time.monotonic() - started < 5

    def test_large_values(self, ranks: RankPool) -> None:
        [found] = ranks.run("builtins:dict", ranks=1, init=None, text="é" * 500_000)
        assert found == {"text": "é" * 500_000}


class TestFailures:
    def test_identical_tracebacks_are_folded(self, ranks: RankPool) -> None:
        with pytest.raises(RankFailure) as caught:
            ranks.run(fail_alike, ranks=2, init=None)
        text = str(caught.value)
        assert text.count("Traceback") == 1
        assert "ranks 0, 1: ValueError" in text
        assert "in fail_alike" in text
        assert "a last word" in text

    def test_every_rank_is_told(self, ranks: RankPool) -> None:
        with pytest.raises(RankFailure, match="rank 1: KeyError") as caught:
            ranks.run(fail_on, ranks=3, init=None, rank=1)
        assert "ranks 0, 2 returned" in str(caught.value)

    def test_outcomes_do_not_raise(self, ranks: RankPool) -> None:
        fine, failed = ranks.outcomes(fail_on, ranks=2, init=None, rank=1)
        assert (fine.ok, fine.value) == (True, "fine")
        assert failed.error_type == "KeyError"
        assert failed.is_a(LookupError)
        assert not failed.is_a(ValueError)
        assert "rank 1" in failed.error_message
        assert "fail_on" in failed.traceback
        assert failed.seconds >= 0

    def test_peers_of_a_failed_rank_do_not_wait_for_ever(self, ranks: RankPool) -> None:
        started = time.monotonic()
        first, second = ranks.outcomes(fail_while_peers_wait, ranks=2, timeout=50)
        assert first.error_type == "ValueError"
        assert not second.ok
        assert time.monotonic() - started < 20

    def test_warnings_count_as_in_the_session(self, ranks: RankPool) -> None:
        [outcome] = ranks.outcomes(warn, ranks=1, init=None)
        assert outcome.error_type == "UserWarning"

    def test_result_that_is_not_json(self, ranks: RankPool) -> None:
        [outcome] = ranks.outcomes(give_a_tensor, ranks=1, init=None)
        assert outcome.error_type == "ConfigError"
        assert "tolist" in outcome.error_message

    def test_bad_requests(self, ranks: RankPool) -> None:
        with pytest.raises(ConfigError, match="1 to 4"):
            ranks.run(own_pid, ranks=9)
        with pytest.raises(ConfigError, match="lambda or a local"):
            ranks.run(lambda: 1)
        with pytest.raises(ConfigError, match="JSON"):
            ranks.run(add_up, value=object())
        with pytest.raises(ConfigError, match="init=None"):
            ranks.run(own_pid, launcher=False)
        with pytest.raises(ConfigError, match="module:qualname"):
            ranks.run("no_colon")
        with pytest.raises(ConfigError, match="at least one"):
            RankPool(0)


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        pool.run(fail_on, ranks=2, init=None, rank=9)  # so that what is measured is not how long imports take
        yield pool


class TestLostWorkers:
    """On a pool of its own, whose workers may be lost."""

    def test_timeout_tells_where_ranks_are(self, own_pool: RankPool) -> None:
        started = time.monotonic()
        with pytest.raises(RankFailure) as caught:
            own_pool.run(sleep_on, ranks=2, init=None, timeout=1.0, rank=1, seconds=60)
        text = str(caught.value)
        assert "in fall_asleep" in text
        assert "no answer within 1 s" in text
        assert "rank 0 returned" in text
        assert [outcome.error_type for outcome in caught.value.outcomes] == [None, "WorkerStuck"]
        assert time.monotonic() - started < 30
        assert own_pool.run(fail_on, ranks=2, init=None, rank=9) == ["fine", "fine"]

    @pytest.mark.parametrize(("how", "told"), [("exit", "exited with status 7"), ("kill", "ended by SIGKILL")])
    def test_death_is_reported(self, own_pool: RankPool, how: str, told: str) -> None:
        alive, dead = own_pool.outcomes(die_on, ranks=2, init=None, rank=1, how=how)
        assert alive.value == "alive"
        assert (dead.error_type, dead.error_message) == ("WorkerDied", told)
        assert told in str(RankFailure("die_on", [alive, dead]))

    def test_peers_of_a_dead_rank_get_a_grace(self, own_pool: RankPool) -> None:
        stuck, dead = own_pool.outcomes(die_and_leave_peers_stuck, ranks=2, init=None, grace=0.5)
        assert dead.error_type == "WorkerDied"
        assert stuck.error_type == "WorkerStuck"
        assert "die_and_leave_peers_stuck" in stuck.traceback
        assert own_pool.run(fail_on, ranks=1, init=None, rank=9) == ["fine"]

    def test_interrupt_ends_the_workers(self, own_pool: RankPool) -> None:
        [before] = own_pool.run(own_pid, ranks=1, init=None)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            own_pool.run(sleep_on, ranks=1, init=None, rank=0, seconds=60)
        assert not _is_running(before)

    def test_workers_end_with_their_parent(self) -> None:
        code = (
            "import os; from shardrt.testing import RankPool; pool = RankPool(1);"
            "print(pool.run('os:getpid', ranks=1, init=None, launcher=False)[0], flush=True); os._exit(0)"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        worker = int(done.stdout)
        deadline = time.monotonic() + 10
        while _is_running(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _is_running(worker)

    def test_closed_pool(self) -> None:
        pool = RankPool(1)
        pool.close()
        pool.close()
        with pytest.raises(ConfigError, match="closed"):
            pool.run(own_pid, ranks=1)


def _is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class ForgetsLast:
    """A partitioner that loses the last parameter."""

    name = "forgets-last"
    cuts_parameters = False

    def partition(self, request: Any) -> Partition:
        shards = tuple(Shard(spec.name, 0, spec.numel, 0) for spec in request.params[:-1])
        return Partition(world_size=request.world_size, shards=shards)


class ForgetsLastKit(PartitionerConformance):
    @classmethod
    def make(cls) -> Any:
        return ForgetsLast()


class Careful:
    """A schedule that waits for everything it has started, whatever happens."""

    name = "careful"
    bucket_mb: float | None = None

    def step(self, engine: Any) -> None:
        self._all(engine, engine.reduce)
        engine.update()
        self._all(engine, engine.gather)

    def _all(self, engine: Any, start: Any) -> None:
        works: list[Any] = []
        try:
            works.extend(start(bucket) for bucket in range(engine.bucket_count))
        finally:
            errors = [error for error in map(_error_of, works) if error is not None]
        if errors:
            raise errors[0]


def _error_of(work: Any) -> Exception | None:
    try:
        work.wait()
    except Exception as error:
        return error
    return None


class Forgetful(Careful):
    """A schedule that does not wait for its gathers."""

    def step(self, engine: Any) -> None:
        self._all(engine, engine.reduce)
        engine.update()
        for bucket in range(engine.bucket_count):
            engine.gather(bucket)


class TestCarefulSchedule(ScheduleConformance):
    @classmethod
    def make(cls) -> Any:
        return Careful()


class ForgetfulKit(ScheduleConformance):
    @classmethod
    def make(cls) -> Any:
        return Forgetful()


class LosesAverageKit(BackendConformance):
    """The reference backend, except that it never divides."""

    name = "loses-average"

    @classmethod
    def make(cls, group: Any) -> Any:
        import shardrt_reference

        made = shardrt_reference.make(group)
        whole = made.reduce_scatter
        made.reduce_scatter = lambda buffer, splits, *, output=None, average=False: whole(  # type: ignore[method-assign]
            buffer, splits, output=output
        )
        return made


class TestKitCatches:
    """A kit that passes everything is worth nothing."""

    def test_partition_with_a_gap(self) -> None:
        with pytest.raises(Exception, match="has no owner"):
            ForgetsLastKit().test_covers_every_element_once("thousand", world_size=3)

    def test_gathers_that_nobody_waits_for(self) -> None:
        with pytest.raises(AssertionError):
            ForgetfulKit().test_complete_step(buckets=2)

    def test_sum_instead_of_average(self, ranks: RankPool) -> None:
        kit = LosesAverageKit()
        with pytest.raises(RankFailure, match="average=True"):
            kit.test_reduce_scatter_runs(ranks, world_size=2, via="direct", kind="uneven")
        kit.test_reduce_scatter_dtypes(ranks, world_size=2, via="direct", dtype="float32", average=False)

    def test_factory_is_demanded(self) -> None:
        with pytest.raises(NotImplementedError, match="override make"):
            PartitionerConformance().test_is_a_partitioner()


def test_outcome_describes_itself() -> None:
    assert Outcome(rank=0, value=1).describe() == "returned"
