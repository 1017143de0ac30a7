"""Models of Hugging Face Transformers, small and built from a configuration, beside their unsharded twins."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

import shardrt
from tests.ranks.twins import average_backward, largest_difference, twins

MODELS = ("Llama", "GPT-2")
CHECKPOINTING: dict[str, bool | None] = {"off": None, "use_reentrant=False": False, "use_reentrant=True": True}
_WORDS = 61


def build(name: str, *, tied: bool, reentrant: bool | None) -> torch.nn.Module:
    """A language model with three blocks; ``reentrant`` is None for one that keeps its activations."""
    transformers = importlib.import_module("transformers")
    common = {"vocab_size": _WORDS, "tie_word_embeddings": tied, "use_cache": False, "bos_token_id": 0}
    if name == "Llama":
        config = transformers.LlamaConfig(
            **common,
            hidden_size=16,
            intermediate_size=29,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            eos_token_id=1,
            pad_token_id=None,
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            **common,
            n_embd=16,
            n_layer=3,
            n_head=2,
            n_positions=32,
            eos_token_id=1,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        model = transformers.GPT2LMHeadModel(config)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    assert isinstance(model, torch.nn.Module)
    return model


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """What a training loop computes from one batch of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(0, _WORDS, (2, 9), generator=generator)
    loss = model(input_ids=words, labels=words).loss
    assert isinstance(loss, torch.Tensor)
    return loss


def compare_language_models(
    name: str, ways: Mapping[str, Mapping[str, Any]], tied: bool = True, checkpointing: str = "off", steps: int = 30
) -> dict[str, dict[str, float]]:
    """Train one model in several ways (options of ``rt.shard``), and its twin; how far each is from it."""

    def made() -> torch.nn.Module:
        return build(name, tied=tied, reentrant=CHECKPOINTING[checkpointing])

    world_size = torch.distributed.get_world_size()
    trained: dict[int, tuple[torch.nn.Module, float]] = {}
    found = {}
    for way, options in ways.items():
        group_size = options.get("shard_size", world_size)
        if group_size not in trained:
            trained[group_size] = _train_twin(made, steps, world_size, group_size)
        twin, twins_loss = trained[group_size]
        model, fresh = twins(made)
        with shardrt.Runtime(timeout=30) as rt:
            model, opt = rt.shard(model, torch.optim.AdamW, lr=1e-2, **options)
            loss = torch.zeros(())
            for step in range(steps):
                loss = loss_of(model, step, rt.rank)
                loss.backward()
                opt.step()
                opt.zero_grad()
            with rt.summon_full_params(model):
                difference = largest_difference(model.parameters(), twin.parameters())
                same_keys = float(model.state_dict().keys() == twin.state_dict().keys())
            moved = largest_difference(twin.parameters(), fresh.parameters())
            off = abs(loss.item() - twins_loss) if rt.rank == world_size - 1 else 0.0
            found[way] = {"difference": difference, "moved": moved, "loss": off, "same_keys": same_keys}
    return found


def _train_twin(made: Any, steps: int, world_size: int, group_size: int) -> tuple[torch.nn.Module, float]:
    """The trained twin, and its last loss on the last rank's batch."""
    _, twin = twins(made)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    losses: list[float] = []

    def loss(rank: int) -> torch.Tensor:
        value = loss_of(twin, len(losses) // world_size, rank)
        losses.append(value.item())
        return value

    for _ in range(steps):
        average_backward(twin, loss, world_size, group_size)
        plain.step()
        plain.zero_grad()
    return twin, losses[-1]
