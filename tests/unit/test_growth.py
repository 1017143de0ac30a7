"""What grows with the number of ranks is counted, not timed; and how exponents and verdicts come about."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from shardrt.bench.growth import GrowthCase, GrowthSettings, _curves
from shardrt.bench.growth_counting import CountingStore
from shardrt.bench.growth_fit import Curve, slope
from shardrt.checkpoint.merging import merge
from shardrt.comm.bounded import BoundedStore
from shardrt.comm.control import StoreControl
from shardrt.comm.meeting import meet
from shardrt.errors import ConfigError, HandshakeError
from shardrt.handshake import Field, agreement

VALUE = "0123456789abcdef" * 16


def on_ranks(count: int, run: Callable[[CountingStore, int], Any]) -> tuple[list[Any], list[CountingStore]]:
    """Ranks as threads on one store, each with counters of its own."""
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(count)]
    answers: list[Any] = [None] * count

    def work(rank: int) -> None:
        try:
            answers[rank] = run(stores[rank], rank)
        except Exception as error:
            answers[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return answers, stores


def exchanging(count: int, value_of: Callable[[int], Any], *, to_all: bool = True) -> list[CountingStore]:
    """Counts of one exchange among so many ranks, which must all get all values."""

    def run(store: CountingStore, rank: int) -> list[Any]:
        control = StoreControl(store, rank=rank, world_size=count, timeout=60)  # type: ignore[arg-type]
        control.exchange("everybody is there", None)
        store.operations = store.nbytes = 0
        return control.exchange("growth", value_of(rank), to_all=to_all)

    answers, stores = on_ranks(count, run)
    everything = [value_of(rank) for rank in range(count)]
    nothing = [None] * count
    assert answers == [everything if to_all or rank == 0 else nothing for rank in range(count)]
    return stores


@pytest.mark.parametrize("to_all", [True, False])
def test_an_exchange_of_equal_values_carries_each_value_once_to_each_rank(to_all: bool) -> None:
    """What everybody reads does not grow with the number of ranks, so all of it grows with n, not with n * n."""
    carried = {}
    for count in (4, 32):
        stores = exchanging(count, (lambda rank: VALUE) if to_all else (lambda rank: f"{rank:0256d}"), to_all=to_all)
        carried[count] = max(store.nbytes for store in stores[1:])
        assert max(store.operations for store in stores[1:]) == 3  # its own value, the answer, and tidying up
        assert stores[0].operations <= 6  # all values are fetched at once
        assert stores[0].nbytes < (count + 3) * (len(VALUE) + 100)
    assert carried[32] < carried[4] + 20


def test_different_values_that_all_want_are_carried_to_all() -> None:
    stores = exchanging(16, lambda rank: [rank, VALUE if rank % 2 else None])
    assert min(store.nbytes for store in stores) > 8 * len(VALUE)


def test_runs_of_ranks_that_say_the_same_are_told_apart() -> None:
    exchanging(9, lambda rank: {"host": rank // 4, "of": [rank == 5, None, 1.5, "é"]})


def test_a_handshake_costs_each_rank_the_same_in_any_world() -> None:
    def compare(store: CountingStore, rank: int, count: int) -> int:
        control = StoreControl(store, rank=rank, world_size=count, timeout=60)  # type: ignore[arg-type]
        control.exchange("everybody is there", None)
        before = store.nbytes
        with agreement(control, "growth") as fields:
            fields["a field"] = Field(value=[1, 2], fix="no need")
        return store.nbytes - before

    small, large = (max(on_ranks(n, lambda s, r, n=n: compare(s, r, n))[0][1:]) for n in (4, 32))
    assert large < small + 20


def test_values_larger_than_the_store_takes_are_exchanged_and_leave_nothing() -> None:
    """Torch's store hangs up on whoever writes more than 8 MB at once."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    large = ["é" * 2_000_000, 1]

    def run(store: CountingStore, rank: int) -> list[Any]:
        own = dist.TCPStore("127.0.0.1", host.port, is_master=False)  # type: ignore[attr-defined]
        control = StoreControl(own, rank=rank, world_size=3, timeout=60)
        found = control.exchange("large", {"value": large, "rank": rank // 2})
        assert control.exchange("small", rank) == [0, 1, 2]
        return found

    answers, _ = on_ranks(3, run)
    assert answers == [[{"value": large, "rank": rank // 2} for rank in range(3)]] * 3
    kept = host.num_keys()
    answers, _ = on_ranks(3, run)
    assert host.num_keys() <= kept + 8, "the keys of a meeting, and no pieces"


def test_ranks_that_differ_are_still_named() -> None:
    def compare(store: CountingStore, rank: int) -> None:
        control = StoreControl(store, rank=rank, world_size=9, timeout=60)  # type: ignore[arg-type]
        with agreement(control, "growth") as fields:
            fields["a field"] = Field(value=rank == 6, fix="mend it")

    answers, _ = on_ranks(9, compare)
    assert {type(answer) for answer in answers} == {HandshakeError}
    assert {str(answer) for answer in answers} == {
        "ranks disagree at 'growth' on a field: rank 6 has True, rank 0 has False; fix: mend it"
    }


def test_a_meeting_carries_a_word_to_each_rank() -> None:
    most = {}
    for count in (4, 32):

        def run(store: CountingStore, rank: int, count: int = count) -> int:
            bounded = BoundedStore(store, rank=rank, timeout=60)  # type: ignore[arg-type]
            return meet(bounded, rank=rank, world_size=count, timeout=60, topic="Runtime")

        numbers, stores = on_ranks(count, run)
        assert set(numbers) == {1}
        # A rank that waits reads its proposal again and again, and may do so more often in a larger world.
        writes = [store.operations for store in stores]
        most[count] = stores[0].nbytes / count
        assert writes[0] <= 8 * count
    assert most[32] < 1.5 * most[4]


def test_merging_looks_at_what_ranks_have_and_not_for_what_they_have_not() -> None:
    class Rows(dict[str, Any]):
        asked = 0

        def get(self, *arguments: Any) -> Any:
            Rows.asked += 1
            return super().get(*arguments)

    count = 50
    ranks = [Rows({f"p{rank}": [["stored", 0, 4]]}) for rank in range(count)]
    common = {
        "models": {
            "model": {
                "tensors": {f"p{rank}": ["float32", [4]] for rank in range(count)},
                "buffers": [],
                "aliases": {},
                "values": {},
            }
        },
        "optimizers": {},
        "extra": {},
    }
    manifest = merge(
        id="x",
        step=1,
        files=[None] * count,  # type: ignore[list-item]
        pieces=[{"models": {"model": rank}} for rank in ranks],
        random=[None] * count,
        common=common,
        state_format="safetensors",
        block_bytes=1,
        software={},
        runtime={},
    )
    assert [spread.pieces[0].file for spread in manifest.models["model"].tensors.values()] == list(range(count))
    assert Rows.asked <= count


@pytest.mark.parametrize("power", [0.0, 1.0, 1.7])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    assert slope([4, 8, 16], [0.3 * size**power for size in (4, 8, 16)]) == pytest.approx(power)
    assert slope([4], [1.0]) is None


@pytest.mark.parametrize(
    ("cost", "within"),
    [
        (lambda n: 5.0, True),
        (lambda n: 1e3 + n, True),
        (lambda n: n * math.log2(n), True),
        (lambda n: n**1.5, False),
        (lambda n: 50 + n**2, False),
    ],
)
def test_the_verdict_compares_with_n_log_n_where_it_grows(cost: Callable[[int], float], within: bool) -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    curve = Curve(axis="ranks", what="it", sizes=sizes, seconds=tuple(cost(max(size, 2)) for size in sizes))
    assert curve.within is within
    assert curve.verdict == ("yes" if within else "NO")
    assert attrs_changed(curve).verdict == ("yes" if within else "by nature: because")


def attrs_changed(curve: Curve) -> Curve:
    import attrs

    return attrs.evolve(curve, by_nature="because")


def test_ranks_are_put_together_by_their_slowest_and_rounds_by_their_best() -> None:
    cases = [GrowthCase(axis="ranks", size=size) for size in (2, 4)] * 2
    first = [{"step": {"seconds": 3.0, "cpu": 1.0}}, {"step": {"seconds": 8.0, "cpu": 2.0}}]
    again = [{"step": {"seconds": 2.0, "cpu": 4.0}}, {"step": {"seconds": 9.0, "cpu": 1.0}}]
    other = [{"step": {"seconds": 1.0, "cpu": 5.0}}, {"step": {"seconds": 7.0, "cpu": 0.5}}]
    [curve] = _curves("ranks", cases, [[*first, *again], [*first, *other]])
    assert curve.sizes == (2, 4) and curve.seconds == (2.0, 8.0) and curve.cpu == (1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": ("moons",)}, "there is no axis 'moons'"),
        ({"ranks": (4, 2)}, "whole numbers from 1 up, growing"),
        ({"rounds": 0}, "rounds must be"),
        ({"params": ()}, "whole numbers from 1 up"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GrowthSettings(**options)
