"""Where ranks meet: one store that the parent hosts for all calls, and each worker's lasting connection to it.

Note [One store for all calls]: connecting to a store looks up host names, which takes seconds now and then where a
name server is slow. So the parent hosts one store on a port of the system's choice, workers connect to it once, and
each call gets a prefix of its own. Code under test that connects by itself, as ``init_process_group`` does with the
launcher's variables, uses no prefix: all keys are deleted after each call.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

CALL_VARIABLE = "SHARDRT_TESTING_CALL"
"""The number of the call under way."""

_connections: dict[str, Any] = {}


def host_store() -> Any:
    """For the parent: a store on a free port."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def forget_keys(store: Any) -> None:
    """For the parent: the next call finds nothing of this one."""
    for key in store.list_keys():
        store.delete_key(key)


def rank_store(timeout: float = 60.0) -> Any:
    """For code on a worker: a ``torch.distributed`` store that the ranks of this call share, and nobody else."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    endpoint = f"{address}:{port}"
    if endpoint not in _connections:
        _connections[endpoint] = dist.TCPStore(address, int(port), is_master=False)  # type: ignore[attr-defined]
    prefix = f"call-{os.environ[CALL_VARIABLE]}"
    store = dist.PrefixStore(prefix, _connections[endpoint])  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout))
    return store
