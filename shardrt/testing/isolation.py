"""What one call may leave behind in a worker, put back before the next one."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardrt.testing.functions import resolve


@contextmanager
def isolated(*, seed: int, warning_filters: Sequence[str]) -> Iterator[None]:
    """Seed the generators, apply the warning filters, and afterwards restore all that tests tend to change.

    Example:
        >>> import os, torch
        >>> from shardrt.testing.isolation import isolated
        >>> with isolated(seed=1, warning_filters=["error"]):
        ...     os.environ["LEFT_BEHIND"] = "1"
        ...     torch.set_default_dtype(torch.float64)
        >>> "LEFT_BEHIND" in os.environ, torch.get_default_dtype()
        (False, torch.float32)
    """
    import torch

    environment = dict(os.environ)
    directory = os.getcwd()  # noqa: PTH109
    import_paths = list(sys.path)
    dtype = torch.get_default_dtype()
    gradients = torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            for text in warning_filters:
                _filter_warnings(text)
            random.seed(seed)
            torch.manual_seed(seed)
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        sys.path[:] = import_paths
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _filter_warnings(text: str) -> None:
    """One filter as pytest's ``filterwarnings`` setting spells it: ``action:message:category:module``."""
    action, message, category, module = ([part.strip() for part in text.split(":")] + [""] * 3)[:4]
    kind = resolve(category.rpartition(".")[0] + ":" + category.rpartition(".")[2]) if "." in category else None
    if kind is None:
        kind = resolve(f"builtins:{category or 'Warning'}")
    warnings.filterwarnings(action, message=message, category=kind, module=module)  # type: ignore[arg-type]
