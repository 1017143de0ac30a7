"""Prints what the tests assert, as tables: equality, handshake messages, traffic, state, errors.

Run it with ``python tasks.py accept``, or some sections of it, named after the task.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import shardrt
from shardrt.testing import RankPool
from tests import (
    acceptance_allocations,
    acceptance_damage,
    acceptance_elastic,
    acceptance_fsdp,
    acceptance_hang,
    acceptance_interchange,
    acceptance_join,
    acceptance_overlap,
    acceptance_sharding,
    acceptance_shm,
    acceptance_state,
    acceptance_strategies,
)
from tests.ranks import test_handshake, twins
from tests.ranks.test_optimizer_equals_twin import PARTITIONERS, train

console = Console(width=150)


class LargeEmbedding(torch.nn.Module):
    """A transformer half of whose parameters are the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16000, 128)
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.out = torch.nn.Linear(128, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.embed(tokens)))


def moved_and_kept(partitioner: str) -> dict[str, Any]:
    """Bytes per step and bytes of state on this rank, from three steps of AdamW."""
    torch.manual_seed(0)
    model = LargeEmbedding()
    with shardrt.Runtime(partitioner=partitioner, timeout=60) as rt:
        opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)
        before = rt.traffic.copy()
        for _ in range(3):
            model(torch.randint(0, 16000, (2, 16))).sum().backward()
            opt.step()
            opt.zero_grad()
        sizes = [param.numel() * param.element_size() for param in model.parameters()]
        return {
            "sent": (rt.traffic - before).sent / 3,
            "state": opt.state_bytes(),
            "params": sum(sizes),
            "largest": max(sizes),
        }


def equality(pool: RankPool) -> bool:
    table = Table(
        title="Largest difference of any parameter from the unsharded twin after 30 steps", title_justify="left"
    )
    for heading in ("optimizer", "partitioner", "1 rank", "2 ranks", "3 ranks", "4 ranks"):
        table.add_column(heading)
    good = True
    for optimizer in twins.OPTIMIZERS:
        for label, partitioner in PARTITIONERS.items():
            cells = []
            for world_size in (1, 2, 3, 4):
                outcomes = pool.outcomes(train, ranks=world_size, optimizer=optimizer, partitioner=partitioner)
                if all(outcome.ok for outcome in outcomes):
                    worst = max(outcome.value["difference"] for outcome in outcomes)
                    good &= worst <= (0.0 if world_size <= 2 else 2e-6)
                    cells.append("0, bit for bit" if worst == 0 else f"{worst:.1e}")
                else:
                    refused = {outcome.error_type for outcome in outcomes} == {"UnsupportedError"}
                    good &= refused and optimizer not in twins.ELEMENTWISE
                    cells.append("refused" if refused else outcomes[0].error_message[:60])
            table.add_row(optimizer, label, *cells)
    console.print(table)
    [outcome, _] = pool.outcomes(train, ranks=2, optimizer="muon", partitioner="flat")
    console.print("Muon with flat:", outcome.error_message, markup=False, highlight=False)
    return good


def handshake(pool: RankPool) -> bool:
    console.rule("One of three ranks deviates")
    good = True
    for difference in (*test_handshake.EXPECTED, "unknown plugin", "no parameters"):
        outcomes = pool.outcomes(test_handshake.build, ranks=3, timeout=30, difference=difference)
        slowest = max(outcome.seconds for outcome in outcomes)
        raised = not any(outcome.ok for outcome in outcomes)
        good &= raised and slowest < 10
        console.print(f"{difference}: all three raised: {raised}, slowest after {slowest:.2f} s", style="bold")
        for message in dict.fromkeys(f"  {outcome.error_type}: {outcome.error_message}" for outcome in outcomes):
            console.print(message, markup=False, highlight=False)
    return good


def traffic_and_state(pool: RankPool) -> bool:
    table = Table(title="Bytes on a transformer with a large embedding, AdamW", title_justify="left")
    for heading in (
        "ranks",
        "partitioner",
        "sent per step and rank (mean)",
        "of 2(N-1)/N",
        "state (fullest rank)",
        "of bound",
    ):
        table.add_column(heading)
    good = True
    for world_size in (2, 4):
        for partitioner in ("flat", "bucket", "greedy"):
            found = pool.run("tests.acceptance:moved_and_kept", ranks=world_size, partitioner=partitioner)
            params, largest = found[0]["params"], found[0]["largest"]
            sent = sum(one["sent"] for one in found) / world_size
            minimum = 2 * (world_size - 1) / world_size * params
            state = max(one["state"] for one in found)
            share = params / world_size if partitioner != "greedy" else max(params / world_size, largest)
            good &= abs(sent / minimum - 1) <= 0.01 and abs(state / (2 * share) - 1) <= 0.01
            table.add_row(
                str(world_size),
                partitioner,
                f"{sent:,.0f}",
                f"{sent / minimum:.4f}",
                f"{state:,}",
                f"{state / (2 * share):.4f}",
            )
    console.print(table)
    return good


SECTIONS = {
    "optimizer": (equality, handshake, traffic_and_state),
    "overlap": (acceptance_overlap.equality, acceptance_overlap.combinations, acceptance_overlap.lost_inside_backward),
    "storm": (acceptance_overlap.storms,),
    "reshard": (acceptance_state.reshard,),
    "roundtrip": (acceptance_state.torch_round_trips, acceptance_interchange.round_trips),
    "kills": (acceptance_damage.kills,),
    "damage": (acceptance_damage.damage, acceptance_damage.misuse, acceptance_damage.hostile),
    "elastic": (acceptance_elastic.elastic,),
    "uneven": (acceptance_join.uneven,),
    "stopped": (acceptance_hang.stopped,),
    "strategies": (acceptance_sharding.strategies,),
    "huggingface": (acceptance_sharding.huggingface,),
    "between": (acceptance_sharding.between,),
    "memory": (acceptance_strategies.memory,),
    "traffic": (acceptance_strategies.traffic,),
    "hybrid": (acceptance_strategies.hybrid,),
    "shm": (acceptance_shm.permissions, acceptance_shm.kills),
    "allocations": (acceptance_allocations.allocations,),
    "fsdp_api": (acceptance_fsdp.fsdp_api,),
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        console.print(f"no section {unknown[0]!r}; sections: {', '.join(SECTIONS)}")
        return 2
    with RankPool(5) as pool:
        good = [check(pool) for name in names or ["optimizer", "overlap"] for check in SECTIONS[name]]
    console.print("all as required" if all(good) else f"NOT as required: {good}", style="bold")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
