# SPDX-License-Identifier: Apache-2.0
"""What the keys of ``optimizer.params`` tell besides their values."""

#: Stock's learning rates where the section sets none.
DEFAULT_MUON_LR, DEFAULT_ADAM_LR = 0.02, 3e-4
#: Keys that an AdamW section may hold as well. A section with only these was written for AdamW.
ADAMW_KEYS = frozenset({"lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam", "fp32_optimizer_states"})
#: Keys that say nothing about what the learning rate was tuned for: they are neither AdamW's nor stock Muon's.
NEUTRAL_KEYS = frozenset(
    {
        "adjust_lr_fn",
        "adam_weight_decay",
        "import_momentum",
        "momentum_dtype",
        "monitor_interval",
        "muon_conv",
        "muon_exclude",
        "muon_fused",
        "muon_include",
        "muon_lora",
        "tp_mode",
        "muon_split",
        "muon_weight_decay",
        "ns_coefficients",
        "ns_dtype",
        "kernels",
        "ns_steps",
        "ns_tuning",
    }
)
#: Keys that a parameter group may set for itself. A key on the left replaces the config's on the right.
GROUP_KEYS: dict[str, tuple[str, ...]] = {
    "lr": ("muon_lr", "adam_lr"),
    "muon_lr": (),
    "adam_lr": (),
    "momentum": (),
    "nesterov": (),
    "weight_decay": ("muon_weight_decay", "adam_weight_decay"),
    "muon_weight_decay": (),
    "adam_weight_decay": (),
    "ns_method": (),
    "adjust_lr_fn": (),
    "betas": (),
    "eps": (),
}
