"""What NCCL takes through torch.distributed; docs/backends.md says where each fact comes from."""

from __future__ import annotations

from shardrt.comm import Capabilities, OpSupport

REDUCED = frozenset({"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"})
MOVED = REDUCED | {"bool", "float8_e4m3fn", "float8_e5m2"}

CAPABILITIES = Capabilities(
    average=True,
    reduce_scatter=OpSupport(uneven=False, dtypes=REDUCED),
    all_gather=OpSupport(uneven=False, dtypes=MOVED),
    all_reduce=OpSupport(dtypes=REDUCED),
    all_to_all=OpSupport(dtypes=MOVED),
    broadcast=OpSupport(dtypes=MOVED),
    # Two communicators whose kernels do not fit the device together can wait for each other for ever.
    concurrent=False,
    needs_streams=True,
)
