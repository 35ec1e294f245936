# SPDX-License-Identifier: Apache-2.0
"""Capture what is logged while an engine is built."""

import logging
from typing import Any

from helpers.models import Mlp
from helpers.training import ds_config, make_engine


def records(widths: tuple[int, ...] = (7, 15, 9, 13, 11, 5), groups: int = 1, tag: Any = None, **config: Any) -> Any:
    """Build an engine for an MLP; return (level, text) of all that is logged meanwhile."""
    seen: list[logging.LogRecord] = []
    handler, net = logging.Handler(), Mlp(widths)
    handler.emit, params = seen.append, list(net.parameters())
    for p in params if tag is not None else ():
        p.use_muon = tag
    halves = [{"params": params[i::groups]} for i in range(groups)]
    logging.getLogger("deepspeed.muon").addHandler(handler)
    try:
        make_engine(net, ds_config(**config), model_parameters=halves).destroy()
    finally:
        logging.getLogger("deepspeed.muon").removeHandler(handler)
    return [(record.levelname, record.getMessage()) for record in seen]
