"""Models of Hugging Face Transformers train sharded as they do unsharded, without a change to them."""

from __future__ import annotations

import importlib.util

import pytest

from shardrt.testing import RankPool
from tests.ranks.huggingface import compare_language_models

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers, of the extra 'dev'"
)
WAYS = {each: {"strategy": each} for each in ("shard_grad_op", "full_shard")}


@pytest.mark.parametrize("checkpointing", ["off", "use_reentrant=False"])
@pytest.mark.parametrize(("name", "tied"), [("Llama", False), ("GPT-2", True)])
def test_a_language_model_equals_its_twin(ranks: RankPool, name: str, tied: bool, checkpointing: str) -> None:
    """The rest is in ``python tasks.py accept huggingface``."""
    found = ranks.run(
        compare_language_models,
        ranks=2,
        timeout=120,  # the import alone takes a while
        name=name,
        tied=tied,
        checkpointing=checkpointing,
        ways=WAYS,
        steps=6,
    )
    for value in found:
        for each in WAYS:
            assert value[each]["moved"] > 1e-3
            assert value[each]["difference"] == value[each]["loss"] == 0.0, value
            assert value[each]["same_keys"], "names of parameters changed"
