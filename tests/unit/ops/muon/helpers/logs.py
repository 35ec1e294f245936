# SPDX-License-Identifier: Apache-2.0
"""Capture what the package logs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.models import Mlp
from helpers.training import ds_config, make_engine


@contextmanager
def logged(level: int = logging.INFO, with_levels: bool = False) -> Iterator[list[Any]]:
    """Yield a list that collects messages of at least this level, on this rank, in the context; or (level, message)."""
    said: list[Any] = []
    handler, logger = logging.Handler(level), logging.getLogger("deepspeed.muon")
    before = logger.level

    def emit(record: logging.LogRecord) -> None:
        said.append((record.levelname, record.getMessage()) if with_levels else record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(min(before, level))
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def logged_at_start(groups: int = 1, **config: Any) -> list[tuple[str, str]]:
    """Build an engine for an MLP; return (level, message) of all that is logged meanwhile."""
    params = list((net := Mlp()).parameters())
    halves = [{"params": params[i::groups]} for i in range(groups)]
    with logged(with_levels=True) as said:
        make_engine(net, ds_config(**config), model_parameters=halves).destroy()
    return said
