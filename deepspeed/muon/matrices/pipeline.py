# SPDX-License-Identifier: Apache-2.0
"""What a model of DeepSpeed's ``PipelineModule`` tells of itself: which stage it is, and which layers are outer ones.

Its layers are named by their numbers, so no name tells the output head; their order does.
"""

from __future__ import annotations

from typing import Any

from torch import nn

#: Where a pipeline keeps the layers that several places of it share.
TIED = "tied_modules"


def is_pipeline(model: Any) -> bool:
    """Whether the model is a stage of a pipeline, which may have no other."""
    return callable(getattr(model, "num_pipeline_stages", None))


def stage_of(model: Any) -> int:
    """The number of the stage that the model is; 0 outside of pipelines."""
    return model.stage_id if is_pipeline(model) else 0


def stages_of(model: Any) -> int:
    """How many stages there are; 1 outside of pipelines."""
    return model.num_pipeline_stages() if is_pipeline(model) else 1


def outer_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """Matrices of a pipeline that are none of its hidden ones, each with the reason.

    Layers that are tied, as an embedding to the output head, and the only matrix of the layer that comes last.
    """
    if not is_pipeline(model):
        return {}
    found = dict.fromkeys(getattr(model, TIED).parameters(), "tied layer of a pipeline")
    if stage_of(model) == stages_of(model) - 1:
        layers = [layer for layer in model.forward_funcs if isinstance(layer, nn.Module)]  # type: ignore[union-attr]
        last = next((layer for layer in reversed(layers) if any(True for _ in layer.parameters())), nn.Identity())
        matrices = [param for param in last.parameters() if param.ndim == 2]
        if len(matrices) == 1:
            found.setdefault(matrices[0], "output head, the only matrix of the pipeline's last layer")
    return found


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of which another stage has a copy too, kept equal by equal updates."""
    ties = model.tied_comms.values() if is_pipeline(model) else ()  # type: ignore[union-attr,operator]
    return {param for tie in ties if len(tie["ranks"]) > 1 for param in tie["module"].parameters()}
