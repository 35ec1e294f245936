# SPDX-License-Identifier: Apache-2.0
"""Named bundles of keys: the published recipes of models that were trained with Muon."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from deepspeed.muon.config.types import REPLACES
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.math.rules import OPTIONS


class Preset(NamedTuple):
    """A published recipe: ``values`` for keys of ``optimizer.params``.

    ``source``: the publication and its date. ``routers``: what it does with the routers of experts. ``left_out``: how
    else a run with these values differs from it.
    """

    values: dict[str, Any]
    source: str
    routers: str
    left_out: str = ""


_ON_MUON = "on Muon there, with AdamW here; `muon_include` with the name of your routers follows the recipe"
# fmt: off
_MOONLIGHT = {
    "lr": 4.2e-4, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw",
    "ns_coefficients": "simple", "ns_steps": 5, "betas": (0.9, 0.95), "eps": 1e-8,
}
_KIMI_K2 = _MOONLIGHT | {"lr": 2e-4, "qk_clip": {"tau": 100, "alpha": 0.5}}
_DEEPSEEK_V4 = {key: value for key, value in _MOONLIGHT.items() if key != "ns_steps"} | {
    "lr": 2.7e-4, "rms_scale": 0.18, "ns_coefficients": "deepseek_v4", "eps": 1e-20,
}
_GLM5 = _MOONLIGHT | {"lr": 2.5e-4, "per_head_muon": True}
_NANOCHAT = {
    "muon_lr": 0.02, "adam_lr": 0.008, "muon_weight_decay": 0.28, "adam_weight_decay": 0.0,
    "cautious_weight_decay": True, "momentum": 0.97, "momentum_start": 0.85, "momentum_warmup_steps": 400,
    "nesterov": True, "normuon": True, "normuon_beta2": 0.9, "muon_eq": "rows", "muon_plus": True,
    "adjust_lr_fn": "original", "ns_coefficients": "polar_express", "betas": (0.8, 0.96), "eps": 1e-10,
}
# fmt: on
_V4 = "arXiv 2606.19348, sections 2.4 and 4.2.2, June 2026; the rate is that of V4-Flash"
_GLM = "arXiv 2602.15763 (Muon Split), February 2026; the other values are those of GLM-4.5, arXiv 2508.06471"
PRESETS = {
    "moonlight": Preset(_MOONLIGHT, "arXiv 2502.16982, sections 2 and 3, February 2025", _ON_MUON),
    "kimi_k2": Preset(_KIMI_K2, "arXiv 2507.20534, sections 2.1 and 2.5, July 2025", _ON_MUON),
    "deepseek_v4": Preset(_DEEPSEEK_V4, _V4, _ON_MUON),
    "glm5": Preset(_GLM5, _GLM, _ON_MUON),
    "nanochat": Preset(
        _NANOCHAT,
        "github.com/karpathy/nanochat, commit 92d63d4, 3 July 2026",
        "none: its model is dense",
        "There, weight decay falls to zero (here: set `muon_weight_decay_steps` to the length of the run), momentum "
        "falls to 0.90 at the end, AdamW has six rates, of which this is the output head's, and NorMuon's mean lies "
        "along the longer side, here along the outputs",
    ),
}

#: Key that a user sets -> keys whose values from the preset are then ignored.
_SUPERSEDED = REPLACES | OPTIONS | {"adjust_lr_fn": ("rms_scale",), "ns_coefficients": ("ns_steps",)}


def filled_in(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``params`` with the preset's values for other keys. Keys that ``params`` overrides are not added.

    For example, ``lr`` in ``params`` overrides the preset's ``muon_lr``. A null in ``params`` overrides, too.
    """
    name = params.get("preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        return dict(params)
    superseded = {key for general in params for key in _SUPERSEDED.get(general, ())}
    return {key: value for key, value in preset.values.items() if key not in superseded} | dict(params)


@contextmanager
def naming_preset_keys(preset: str, keys: Collection[str]) -> Iterator[None]:
    """Extend the message of a MuonConfigError from the ``with`` block: say which of the keys in it the preset has set.

    ``keys``: all keys that the preset has set.
    """
    try:
        yield
    except MuonConfigError as error:
        text = str(error)
        named = sorted(key for key in keys if re.search(rf"\b{key}\b", text))
        if not named:
            raise
        hint = f"preset {preset} has set {', '.join(named)}; set a key to null to remove it"
        raise MuonConfigError(f"{text} ({hint})") from None
