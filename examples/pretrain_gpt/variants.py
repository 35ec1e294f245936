# SPDX-License-Identifier: Apache-2.0
"""What the experiments compare: names, and the keys of optimizer.params in which each differs from its base."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import CONFIGS

#: Length of a run, and of the schedules in it.
STEPS = 200
#: What a race at start would choose, perhaps otherwise in the next run.
RACE = {"ns_dtype": "bf16", "ns_method": "standard"}
#: What `auto` means in the section of the base, but no longer beside some keys of a variant.
SCALE = {"adjust_lr_fn": "match_rms_adamw"}
#: A threshold that no logit reaches: the logits are recorded and nothing is scaled.
WATCH = 1e9


@dataclass(frozen=True)
class Variant:
    """An optimizer: a base (a key of CONFIGS) and what it changes.

    `tuned`: the numbers that are searched for; a rate that is not is the best of the base. `control`: with what it is
    compared beside plain Muon. `lr`: where the search for the rate starts, if not at the base's. `adam_share`: the
    AdamW half has its own rate, this times Muon's.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    base: str = "Muon"
    tuned: tuple[str, ...] = ("lr",)
    control: str = "Muon"
    lr: float | None = None
    adam_share: float | None = None

    def config(self, lr: float | None = None, weight_decay: float | None = None) -> dict[str, Any]:
        """Return the DeepSpeed config at this rate and decay. A preset keeps its own decay and other values."""
        config = json.loads(CONFIGS[self.base].read_text())
        params, lr = config["optimizer"]["params"], lr or self.lr
        if "preset" in self.params:
            params = RACE | self.params
        else:
            params |= (RACE | SCALE if self.base == "Muon" else {}) | self.params
            params |= {} if weight_decay is None else {"weight_decay": weight_decay}
        if self.adam_share:
            lr = lr or params["lr"]
            params = {key: value for key, value in params.items() if key != "lr"}
            params |= {"muon_lr": lr, "adam_lr": lr * self.adam_share}
        elif lr:
            params["lr"] = lr
        config["optimizer"]["params"] = params
        return config

    def start(self, key: str) -> float:
        """Return where the search for a number starts."""
        params = self.config()["optimizer"]["params"]
        return params.get("muon_lr", params.get("lr")) if key == "lr" else params.get(key, 0.0)


BASELINES = ("AdamW", "Muon")
DECAY = {"weight_decay": 0.05}
DECAY_ONLY = ("weight_decay",)
WARMUP = {"momentum_start": 0.85, "momentum_warmup_steps": 3 * STEPS // 10}
FADE = {"muon_weight_decay_steps": STEPS}

VARIANTS = {
    "AdamW": Variant(base="AdamW"),
    "Muon": Variant(),
    "NorMuon": Variant({"normuon": True}),
    "MuonEq, rows": Variant({"muon_eq": "rows"}),
    "Muon+": Variant({"muon_plus": True}),
    "polar_express": Variant({"ns_coefficients": "polar_express"}),
    "deepseek_v4": Variant({"ns_coefficients": "deepseek_v4"}),
    "one matrix per head": Variant({"per_head_muon": True}),
    "bf16 momentum": Variant({"momentum_dtype": "bf16"}, tuned=()),
    "int8 momentum": Variant({"momentum_dtype": "int8"}, tuned=()),
    "momentum warm-up": Variant(WARMUP),
    "AdamW half at a fifth": Variant(adam_share=0.2),
    "preset nanochat": Variant(
        {"preset": "nanochat"} | WARMUP | FADE, control="AdamW half at a fifth", lr=0.02, adam_share=0.2
    ),
    "Muon, decay": Variant(DECAY, tuned=DECAY_ONLY),
    "cautious decay": Variant(DECAY | {"cautious_weight_decay": True}, tuned=DECAY_ONLY, control="Muon, decay"),
    "decay to zero": Variant(DECAY | FADE, tuned=DECAY_ONLY, control="Muon, decay"),
    "AdamW, decay": Variant(DECAY, base="AdamW", tuned=DECAY_ONLY, control="AdamW"),
}


def watched(tau: float) -> Variant:
    """Return Muon whose attention logits are recorded in every step, and held at `tau`."""
    return Variant({"qk_clip": {"tau": tau}})


def monitored(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `config` with the attention logits written to CSV files under `folder`, if it has `qk_clip`."""
    if "qk_clip" not in config["optimizer"]["params"]:
        return config
    return config | {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "monitor"}}
