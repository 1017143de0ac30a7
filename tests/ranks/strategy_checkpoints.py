"""Checkpoints that one strategy saves and another loads, compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import shardrt
from tests.doubles.states import same
from tests.ranks.sharded_twins import model_for
from tests.ranks.twins import OPTIMIZERS, batch


def save_under(path: str, name: str, optimizer: str, options: Mapping[str, Any], steps: int = 3) -> bool:
    """Train and save; the first rank leaves the whole state beside it. Whether saving changed nothing."""
    build, units = model_for(name, optimizer)
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    with shardrt.Runtime(timeout=30) as rt:
        torch.manual_seed(7)
        model, opt = rt.shard(build(), optimizer_class, units=units, **options, **defaults)
        for step in range(steps):
            model(batch(step, rt.rank)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        before = {"model": rt.full_state_dict(model), "optimizer": rt.full_state_dict(opt)}
        rt.save(Path(path) / "saved", model=model, optimizer=opt)
        if rt.rank == 0:
            torch.save(before, Path(path) / "whole.pt")
        return same({"model": rt.full_state_dict(model), "optimizer": rt.full_state_dict(opt)}, before)


def load_under(path: str, name: str, optimizer: str, ways: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Load what is there under each of some strategies: what differs from the whole state then, or nothing."""
    build, units = model_for(name, optimizer)
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    expected = torch.load(Path(path) / "whole.pt", weights_only=True)
    found = {}
    for way, options in ways.items():
        with shardrt.Runtime(timeout=30) as rt:
            torch.manual_seed(8)
            other = {**defaults, "lr": 0.5}
            model, opt = rt.shard(build(), optimizer_class, units=units, **options, **other)
            if same(rt.full_state_dict(model), expected["model"]):
                found[way] = "the same before anything was loaded"
                continue
            rt.load(Path(path) / "saved", model=model, optimizer=opt)
            differs = [
                what
                for what, state in (("model", rt.full_state_dict(model)), ("optimizer", rt.full_state_dict(opt)))
                if not same(dict(state), dict(expected[what]))
            ]
            found[way] = " and ".join(differs)
    return found
