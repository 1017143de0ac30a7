"""Log events with the rank bound once.

An application that has configured structlog gets our events through its own configuration. Otherwise they go to
standard error, from the level in ``SHARDRT_LOG`` (``debug``, ``info``, ``warning`` by default, ``error``) upwards,
as lines for people or, with ``SHARDRT_LOG_FORMAT=json``, as JSON.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import structlog

from shardrt.errors import ConfigError

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def rank_logger(rank: int, world_size: int) -> Any:
    """A logger that adds the rank to every event.

    Example:
        >>> from shardrt.log import rank_logger
        >>> log = rank_logger(0, 2)
        >>> log.debug("plan.built", imbalance=1.02)
    """
    if structlog.is_configured():
        return structlog.get_logger("shardrt").bind(rank=rank, world_size=world_size)
    level = _choice("SHARDRT_LOG", "warning", tuple(_LEVELS))
    as_json = _choice("SHARDRT_LOG_FORMAT", "pretty", ("pretty", "json")) == "json"
    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False)
    logger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
    )
    return logger.bind(rank=rank, world_size=world_size)


def _choice(variable: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(variable, default).strip().lower()
    if value not in allowed:
        raise ConfigError(f"{variable}={value!r} is not possible; choose one of {', '.join(allowed)}")
    return value
