# SPDX-License-Identifier: Apache-2.0
"""What is compared: the cases (ZeRO stage, offload), the variants (optimizers), and one launch as a job."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """A ZeRO configuration."""

    label: str
    stage: int
    offload: bool = False


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer. `is_ours` decides whether deepspeed-muon is active in the launch.

    `plain`: ours with the PyTorch twin of every kernel. `again`: the variant that this one repeats, to tell noise.
    """

    label: str
    optimizer: str
    params: dict
    is_ours: bool = False
    is_stock_muon: bool = False
    plain: bool = False
    again: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables the workers need."""
        return {} if self.is_ours else {"DS_MUON_AUTOLOAD": "0"}


MUON = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.01}
ADAMW = {"lr": 1e-3, "weight_decay": 0.01}
STANDARD = {"ns_method": "standard"}  # runs in bf16; the default, gram, in fp16 or fp32

PHASES = ("forward", "backward", "step")

CASES = {
    "1": Case("stage 1", 1),
    "2": Case("stage 2", 2),
    "3": Case("stage 3", 3),
    "2-offload": Case("stage 2, CPU offload", 2, offload=True),
    "3-offload": Case("stage 3, CPU offload", 3, offload=True),
}

VARIANTS = {
    "stock": Variant("stock Muon", "Muon", MUON, is_stock_muon=True),
    "stock-standard": Variant("stock Muon, standard", "Muon", MUON | STANDARD, is_stock_muon=True),
    "ours": Variant("deepspeed-muon", "Muon", MUON, is_ours=True),
    "ours-torch": Variant("deepspeed-muon, plain PyTorch", "Muon", MUON, is_ours=True, plain=True),
    "adamw": Variant("AdamW", "AdamW", ADAMW),
    "adamw-again": Variant("AdamW again", "AdamW", ADAMW, again="adamw"),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything a worker needs to know; travels to it as JSON."""

    case: str
    variant: str
    world: int = 2
    layers: int = 8
    hidden: int = 512
    batch: int = 8
    warmup: int = 4
    steps: int = 5

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Shapes of the model's weights."""
        return [
            (self.hidden, self.hidden),
            (4 * self.hidden, self.hidden),
            (self.hidden, 4 * self.hidden),
        ] * self.layers

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return sum(rows * cols for rows, cols in self.matrices)

    def ds_config(self, has_cpu_adam: bool) -> dict:
        """The ds_config.json of this job; AdamW is torch's unless offload lets DeepSpeedCPUAdam apply."""
        case, variant = CASES[self.case], VARIANTS[self.variant]
        zero: dict = {"stage": case.stage}
        params = dict(variant.params)
        config = {
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
            "optimizer": {"type": variant.optimizer, "params": params},
            "zero_optimization": zero,
        }
        if case.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if variant.is_stock_muon and case.stage == 3:
            zero["reduce_scatter"] = False  # stock's Muon raises without it
        if variant.optimizer == "AdamW" and not (case.offload and has_cpu_adam):
            params["torch_adam"] = True
        return config
