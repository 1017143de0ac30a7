"""Models that are hard to shard, each for a reason of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.ranks.twins import Odd


class TiedTransformer(torch.nn.Module):
    """Embeddings that the output layer uses too, and repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(31, 16)
        self.place = torch.nn.Parameter(torch.randn(8, 16) * 0.1)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(16, 2, 29, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 1000).long() % 31
        hidden = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class ConvNet(torch.nn.Module):
    """Convolutions in channels-last order, BatchNorm and its buffers, in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = torch.nn.Sequential(
            *(
                torch.nn.Sequential(
                    torch.nn.Conv2d(wide, 5, 3, padding=1, bias=False),
                    torch.nn.BatchNorm2d(5),
                    torch.nn.ReLU(inplace=True),
                )
                for wide in (1, 5, 5)
            )
        ).to(memory_format=torch.channels_last)
        self.out = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = torch.nn.functional.pad(x, (0, 2)).reshape(-1, 1, 3, 3)
        return self.out(self.stages(images).mean((2, 3)))


class MixedDtypes(torch.nn.Module):
    """Parameters of three dtypes in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(self._block() for _ in range(2))

    def _block(self) -> torch.nn.Module:
        return torch.nn.ModuleDict(
            {
                "fp32": torch.nn.Linear(7, 7),
                "fp64": torch.nn.Linear(7, 7, dtype=torch.float64),
                "bf16": torch.nn.Linear(7, 7, bias=False, dtype=torch.bfloat16),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            assert isinstance(block, torch.nn.ModuleDict)
            x = torch.tanh(block["fp32"](x))
            x = torch.tanh(block["fp64"](x.double())).float()
            x = x + block["bf16"](x.bfloat16()).float()
        return x


class Adapted(torch.nn.Module):
    """A frozen base with small layers that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Adapter() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Adapter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(7, 7).requires_grad_(False)
        self.down = torch.nn.Linear(7, 2, bias=False)
        self.up = torch.nn.Linear(2, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class CalledTwice(torch.nn.Module):
    """One block that is used two times, and one that is used on odd calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 7)
        self.again = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Tanh(), torch.nn.Linear(11, 7))
        self.seldom = torch.nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.tanh(self.again(self.first(x))))
        return self.seldom(x) if bool(x.detach().sum() != x.detach().sum()) else x


class Scalars(torch.nn.Module):
    """Parameters of one element, without a dim and with one, in units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(_Scaled() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.1))
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale + self.shift)


class Matrices(torch.nn.Module):
    """Matrices only, which is what Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


ZOO: dict[str, tuple[Callable[[], torch.nn.Module], Any]] = {
    "tied transformer": (TiedTransformer, None),
    "convolutions": (ConvNet, torch.nn.Sequential),
    "mixed dtypes": (MixedDtypes, torch.nn.ModuleDict),
    "adapters": (Adapted, None),
    "called twice": (CalledTwice, (torch.nn.Linear, torch.nn.Sequential)),
    "scalars": (Scalars, None),
    "odd": (Odd, torch.nn.Linear),
    "matrices": (Matrices, torch.nn.Linear),
}
"""By name: how to build it, and its units."""
