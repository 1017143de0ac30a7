"""A byte-level transformer, small enough to learn something within seconds on one core."""

from __future__ import annotations

import torch
from torch import nn

CONTEXT = 64
WIDTH = 128
LAYERS = 4
HEADS = 4


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch by time by width, in and out."""
        batch, time, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return x + added


class ByteTransformer(nn.Module):
    """Predicts the next byte. The embedding is also the output layer: one parameter with two uses.

    Example:
        >>> import torch
        >>> from shardrt.demo.model import ByteTransformer
        >>> model = ByteTransformer()
        >>> sum(param.numel() for param in model.parameters())
        834304
        >>> bool(model(torch.zeros(2, 65, dtype=torch.long)) > 0)
        True
    """

    def __init__(self, *, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, context: int = CONTEXT) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch of windows, which are one byte longer than the context."""
        inputs, targets = window[:, :-1], window[:, 1:]
        x = self.embedding(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
