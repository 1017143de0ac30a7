"""A trainer as a user would write it for torchrun with restarts. It also runs alone.

Besides training it can lose a rank once (``--lose-at``), and it keeps a diary, so that tests can tell what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

import shardrt

GLOBAL_BATCH = 24
"""Divides evenly among 1 to 4 ranks: the average gradient is the same up to rounding."""
TIMEOUT_SECONDS = 20.0
LOST_RANK = 1


def batch(step: int, rank: int, world_size: int) -> torch.Tensor:
    """This rank's part of what a step trains on, whatever the number of ranks."""
    data = torch.randn(GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(step))
    return data.chunk(world_size)[rank]


def lose_this_rank_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--lose-at", type=int, default=-1)
    options = parser.parse_args()
    checkpoints = options.folder / "checkpoints"

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    with shardrt.Runtime(partitioner="flat", timeout=TIMEOUT_SECONDS) as rt:

        def note(what: str, **about: Any) -> None:
            if rt.rank == 0:
                with (options.folder / "diary.jsonl").open("a", encoding="utf-8") as diary:
                    diary.write(json.dumps({"what": what, "ranks": rt.world_size, **about}) + "\n")

        optimizer = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-2)
        found = rt.load(checkpoints, model=model, optimizer=optimizer, missing_ok=True)
        first = 0 if found is None else found["step"]
        note("began", step=first, restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        for step in range(first, options.until):
            if step == options.lose_at and rt.rank == LOST_RANK:
                lose_this_rank_once(options.folder / "lost")
            loss = model(batch(step, rt.rank, rt.world_size)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            if done % options.save_every == 0 or done == options.until:
                rt.save(checkpoints, model=model, optimizer=optimizer, extra={"step": done}, keep_last=2)
                note("committed", step=done)
        note("ended", step=options.until, parameters=[p.tolist() for p in model.state_dict().values()])


if __name__ == "__main__":
    main()
