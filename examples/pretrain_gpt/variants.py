# SPDX-License-Identifier: Apache-2.0
"""What the experiments compare: names, and the keys of optimizer.params in which each differs from its base."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import CONFIGS

#: The choices of a race at start, which may differ between two runs, and the scale that `lr` alone would choose.
FIXED = {"ns_dtype": "bf16", "ns_method": "standard", "adjust_lr_fn": "match_rms_adamw"}
#: A threshold that no logit reaches: the logits are recorded and nothing is scaled.
WATCH = 1e9


@dataclass(frozen=True)
class Variant:
    """An optimizer: a base (a key of CONFIGS) and what it changes. `tuned`: which numbers are searched for.

    `control`: with what it is compared beside plain Muon.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    base: str = "Muon"
    tuned: tuple[str, ...] = ("lr",)
    control: str = "Muon"

    def config(self, **params: Any) -> dict[str, Any]:
        """Return the DeepSpeed config, with `params` added to the optimizer's."""
        config = json.loads(CONFIGS[self.base].read_text())
        fixed = FIXED if self.base == "Muon" else {}
        config["optimizer"]["params"] |= fixed | self.params | params
        return config

    def start(self, key: str) -> float:
        """Return where the search for a tuned number starts."""
        return self.config()["optimizer"]["params"][key]


BASELINES = ("AdamW", "Muon")
DECAY = {"weight_decay": 0.1}
BOTH = ("lr", "weight_decay")

VARIANTS = {
    "AdamW": Variant(base="AdamW"),
    "Muon": Variant(),
    "AdamW, decay": Variant(DECAY, base="AdamW", tuned=BOTH, control="AdamW"),
    "Muon, decay": Variant(DECAY, tuned=BOTH),
    "cautious decay": Variant(DECAY | {"cautious_weight_decay": True}, tuned=BOTH, control="Muon, decay"),
    "normuon": Variant({"normuon": True}),
    "muon_eq rows": Variant({"muon_eq": "rows"}),
    "muon_plus columns_rows": Variant({"muon_plus": "columns_rows"}),
    "polar_express": Variant({"ns_coefficients": "polar_express"}),
    "deepseek_v4": Variant({"ns_coefficients": "deepseek_v4"}),
    "cubic5": Variant({"ns_coefficients": "cubic5"}),
    "per_head_muon": Variant({"per_head_muon": True}),
    "bf16 momentum": Variant({"momentum_dtype": "bf16"}),
}


def watched(tau: float) -> Variant:
    """Return Muon whose attention logits are recorded in every step, and held at `tau`."""
    return Variant({"qk_clip": {"tau": tau}, "monitor_interval": 1})


def monitored(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `config` with records written to CSV files under `folder`, where it asks for records."""
    if "monitor_interval" not in config["optimizer"]["params"]:
        return config
    return config | {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "monitor"}}
