# SPDX-License-Identifier: Apache-2.0
"""`--optimizer deepspeed` for ms-swift: the optimizer of the DeepSpeed config, whatever it names."""

from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map


class FromConfig(OptimizerCallback):
    """Keeps the placeholder that transformers has made for the optimizer of the config."""

    def create_optimizer(self, model: Any = None) -> Any:
        """The placeholder, with the attribute that ms-swift filters."""
        self.trainer.optimizer.param_groups = []
        return self.trainer.optimizer


optimizers_map["deepspeed"] = FromConfig
