# SPDX-License-Identifier: Apache-2.0
"""Facts about a stage of DeepSpeed's ``PipelineModule``: its number, and its parameters that AdamW should update.

Layers are named by number, so the output head is found by its place, not by its name.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def is_pipeline(model: Any) -> bool:
    """Return whether the model is one stage of a DeepSpeed pipeline (PipelineModule), possibly the only stage."""
    return callable(getattr(model, "num_pipeline_stages", None))


def stage_of(model: Any) -> int:
    """Return the index of the pipeline stage that the model is; 0 if the model is not part of a pipeline."""
    return model.stage_id if is_pipeline(model) else 0


def stages_of(model: Any) -> int:
    """Return the number of stages of the model's pipeline; 1 if the model is not part of a pipeline."""
    return model.num_pipeline_stages() if is_pipeline(model) else 1


def embeddings_and_heads(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return {parameter: reason} for a pipeline stage's embeddings and output head, which AdamW updates.

    These are the parameters of tied layers, and the matrix of the pipeline's last layer if it has only one.
    """
    if not is_pipeline(model):
        return {}
    tied: Any = model.tied_modules  # layers used in several places
    found = dict.fromkeys(tied.parameters(), "tied layer of a pipeline")
    if stage_of(model) == stages_of(model) - 1:
        layers = [layer for layer in model.forward_funcs if isinstance(layer, nn.Module)]  # type: ignore[union-attr]
        last = next((layer for layer in reversed(layers) if any(True for _ in layer.parameters())), nn.Identity())
        matrices = [param for param in last.parameters() if param.ndim == 2]
        if len(matrices) == 1:
            found.setdefault(matrices[0], "output head, the only matrix of the pipeline's last layer")
    return found


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the model's tied parameters that other pipeline stages also have. All copies must get equal updates."""
    ties = model.tied_comms.values() if is_pipeline(model) else ()  # type: ignore[union-attr,operator]
    return {param for tie in ties if len(tie["ranks"]) > 1 for param in tie["module"].parameters()}
