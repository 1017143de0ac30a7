"""One rank of the demo: both runs, then what they were like. Started by :mod:`shardrt.launch`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shardrt.demo.rank import Report, run_rank


def work(settings: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Train sharded and unsharded; rank 0 reports its progress, every rank its result."""
    import torch

    from shardrt.demo.settings import DemoSettings
    from shardrt.demo.text import read_corpus
    from shardrt.demo.training import digest_of, largest_difference, train_sharded, train_unsharded

    asked = DemoSettings(**settings)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    corpus = read_corpus()

    def on_step(run: str, step: int, loss: float) -> None:
        # Every rank is heard, so that one that is stuck is missed by name; only rank 0's loss is shown.
        report({"run": run, "step": step, "loss": loss})

    sharded, model = train_sharded(asked, corpus, rank, lambda step, loss: on_step("sharded", step, loss))
    unsharded, twin = train_unsharded(asked, corpus, rank, lambda step, loss: on_step("unsharded", step, loss))
    return {
        "sharded": sharded.to_json(),
        "unsharded": unsharded.to_json(),
        "largest_parameter_difference": largest_difference(model, twin),
        "digest": digest_of(model),
        "parameters": sum(param.numel() for param in model.parameters()),
        "parameter_bytes": sum(param.nbytes for param in model.parameters()),
        "corpus": {"files": corpus.files, "bytes": corpus.data.numel(), "folder": corpus.folder},
    }


if __name__ == "__main__":
    run_rank(work)
