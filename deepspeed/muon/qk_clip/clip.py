# SPDX-License-Identifier: Apache-2.0
"""QK-clip: after a step, scale down the query and key weights of heads whose attention logits exceeded a threshold."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed.muon.config.schema import ClipOptions
from deepspeed.muon.errors import UnsupportedError, logger
from deepspeed.muon.exchange.consensus import all_maxima
from deepspeed.muon.exchange.placed_params import Partition
from deepspeed.muon.exchange.plan import Plan
from deepspeed.muon.exchange.run import grid_view
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.layout import Piece
from deepspeed.muon.qk_clip.logits import Factors, clip_factors
from deepspeed.muon.qk_clip.query_keys import Attention, Role


class _HeadPart(NamedTuple):
    """Weights or biases of one head's queries or keys: a rectangle in a tensor that the optimizer updates.

    Under ZeRO the tensor is this rank's flat shard of several parameters. ``parameter``, ``layer``: names of the
    parameter and of the attention module. ``role``: what the weights compute, such as ``"query"``. ``head``: index of
    the query head, or of the key head. ``piece``: the rectangle; ``piece.element`` is an index in the tensor, not in
    the parameter.
    """

    parameter: str
    layer: str
    role: Role
    head: int
    piece: Piece


class QKClip:
    """QK-clip for one model: it watches attention logits, and scales down weights of heads whose logits are too large.

    It scales the weights and biases that compute queries and keys, whether Muon or AdamW updates them. It does not
    scale frozen parameters, nor matrices without a gradient in the step. The largest logit is taken over all
    micro-batches of all ranks that train the same layers, so every rank scales its part of a weight by the same factor.

    Args:
        options: the value of the config key ``qk_clip``.
        attentions: {attention module: its heads}, from :func:`deepspeed.muon.qk_clip.query_keys.attention_layers`.
        name_of: {parameter: its name}.
        steps_done: function that returns the number of steps done, which seeds sampling and stochastic rounding.
    """

    def __init__(
        self,
        options: ClipOptions,
        attentions: Mapping[nn.Module, Attention],
        name_of: Mapping[nn.Parameter, str],
        steps_done: Callable[[], int],
    ) -> None:
        self._options = options
        #: The attention layers, in the order of the model.
        self.layers = list(attentions.values())
        self._params = [param for layer in self.layers for param in layer.weights]
        self._weights = {
            name_of[param]: (layer.name, weights) for layer in self.layers for param, weights in layer.weights.items()
        }
        #: Names of the parameters that no rank trains in this step; equal on all ranks that train the same layers.
        self._frozen: set[str] = set()
        self._steps_done = steps_done
        # Imported here because torch's causal masks load its compiler, which takes a second.
        from deepspeed.muon.qk_clip.watch import AttentionWatch, remove_hooks

        self.watch = AttentionWatch(attentions, options.logits, steps_done)
        # It gets the handles only: the watch refers to the model, whose parameters may refer to this object.
        #: Removes the hooks from the model, at the latest when this object is gone.
        self.close = weakref.finalize(self, remove_hooks, self.watch.hooks)
        self._head_parts: dict[Tensor, list[_HeadPart]] = {}
        self._group: Any = None
        self._device = torch.device("cpu")
        self._factors: dict[str, Factors] = {}
        self._warned: set[str] = set()
        #: Whether any attention was seen since the start; equal on all ranks that train the same layers.
        self._was_seen = False
        #: Layer name -> the largest logit of the last step; infinite if a logit was NaN.
        self.largest: dict[str, float] = {}

    def __str__(self) -> str:
        return f"QK-clip of {len(self.layers)} attention layers at {self._options.tau:g} ({self._options.logits})"

    def bind(self, partitions: Iterable[Partition], group: Any, device: torch.device) -> None:
        """Find the heads' weights in the optimizer's tensors. Call it again when these tensors are replaced.

        ``partitions``: for each parameter group a :class:`Partition`, which says where in this rank's tensors each
        parameter is. ``group``: process group of the ranks that train the same layers; ``None``: all ranks. ``device``:
        the device on which :meth:`begin_step` calls its collective.
        """
        self._group, self._device = group, device
        self._head_parts.clear()
        for partition in partitions:
            for shard, start, stop, position in partition.pieces():
                parameter, at = shard.spec.name, position - start
                layer, weights = self._weights.get(parameter, ("", ()))
                self._head_parts.setdefault(partition.tensors[shard.tensor], []).extend(
                    _HeadPart(parameter, layer, role, head, piece._replace(element=at + piece.element))
                    for role, head, block in weights
                    for piece in block.pieces(start, stop)
                )

    def begin_step(self, is_logging: bool) -> None:
        """Compute each head's scaling factor from its largest logit since the last step. A collective.

        Call it on all ranks before each step. A layer that did not run, for example because the batch has another
        modality, is not scaled. ``is_logging``: whether this rank warns about layers that did not run.

        Raises:
            UnsupportedError: a layer ran but its logits could not be observed, or no layer was observed before the
                first step. It is raised on all ranks that train these layers.
        """
        count = sum(layer.query_heads for layer in self.layers)
        # One collective for all: 1 + index of a layer that cannot be observed, all heads' logits, what is trained.
        logits = torch.full((1 + count + len(self._params),), -math.inf, dtype=torch.float32, device="cpu")
        logits[0] = max((1 + i for i, layer in enumerate(self.layers) if layer.name in self.watch.missed), default=0)
        at, places, largest_of_layers = 1, [], []
        for layer in self.layers:
            if (of_heads := self.watch.largest.get(layer.name)) is not None:
                places += [at + head for head in layer.local_heads]
                largest_of_layers.append(of_heads)
            at += layer.query_heads
        if largest_of_layers:
            logits[places] = torch.cat(largest_of_layers).cpu()  # one copy to the host for all layers
        trained = [float(param.requires_grad) for param in self._params]
        logits[1 + count :] = torch.tensor(trained, dtype=torch.float32, device="cpu")
        # The maximum of a number and NaN differs between backends of the collective, so NaN becomes infinite.
        logits.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        missed, *flat = all_maxima(logits.to(self._device), self._group).tolist()
        self.watch.clear()
        if missed:
            raise UnsupportedError(
                f"optimizer.params.qk_clip: the logits of {self.layers[int(missed) - 1].name} cannot be observed, "
                "because its forward calls no known attention function; use scaled_dot_product_attention "
                "(attn_implementation: sdpa in transformers) or flash-attn 2"
            )
        self._frozen = {name for name, trained in zip(self._weights, flat[count:], strict=True) if not trained}
        values, self.largest = iter(flat), {}
        for layer in self.layers:
            heads = [next(values) for _ in range(layer.query_heads)]
            self._factors[layer.name] = clip_factors(heads, layer.key_heads, self._options.tau, self._options.alpha)
            if max(heads) > -math.inf:
                self.largest[layer.name] = max(heads)
        self._was_seen |= bool(self.largest)
        if self.layers and not self._was_seen:
            raise UnsupportedError(
                "optimizer.params.qk_clip: no attention layer ran in training mode and with gradients before this "
                "step; call model.train() and run a forward before each step, and do not compile the model, because "
                "compiled attention cannot be observed"
            )
        idle = {layer.name for layer in self.layers} - self.largest.keys() - self._warned
        if idle and is_logging:
            self._warned |= idle
            logger.warning(
                "deepspeed-muon: qk_clip saw no attention call in %d layer(s) (first: %s) in this step, so it did not "
                "scale their weights; ignore this if the model skips these layers; if they are compiled, exclude them "
                "from torch.compile, which hides their calls",
                len(idle),
                min(idle),
            )

    def apply(
        self, tensors: Sequence[Tensor], plan: Plan | None, absent: Set[str], *, kernels: KernelSet, work: Workspace
    ) -> None:
        """Scale the weights of heads whose logits are too large. Call it right after ``tensors`` have been updated.

        ``tensors``: the ``params`` of one parameter group; under ZeRO, this rank's flat shards. ``absent``: names of
        Muon's matrices without a gradient in this step, which are not scaled. ``plan``: says where in ``tensors`` these
        are; ``None`` if AdamW updates the group. ``kernels`` round bf16 weights stochastically. ``work`` allocates
        temporaries.
        """
        scaled = []
        for tensor in tensors:
            for part in self._head_parts.get(tensor, ()):
                factor = getattr(self._factors[part.layer], part.role)[part.head]
                if factor < 1 and part.parameter not in self._frozen:
                    scaled.append((tensor, part, factor))
        if not scaled:
            return
        # A head may lie in several matrices, some of them without a gradient; these must keep their bits.
        kept = [(view, view.clone()) for view in self._unchanged(tensors, plan, absent)]
        for tensor, part, factor in scaled:
            piece = part.piece
            whole = tensor.view(-1)[piece.element :]
            weights = torch.as_strided(whole, (piece.rows, piece.cols), (piece.stride, 1))
            if tensor.dtype == torch.bfloat16:
                key = key_of(f"{part.layer} {part.role} {part.head}", self._steps_done())
                wide, rounded = (weights.float() * factor).view(-1), torch.empty_like(weights).view(-1)
                kernels.copy_rounded(rounded, wide, key, 0, work)
                weights.copy_(rounded.view(weights.shape))
            else:
                weights.mul_(factor)
        for view, values in kept:
            view.copy_(values)

    def _unchanged(self, tensors: Sequence[Tensor], plan: Plan | None, absent: Set[str]) -> Iterator[Tensor]:
        """Yield views of the weights that must not be scaled, because their matrix has no gradient in this step.

        Each is a part of a matrix named in ``absent`` that this rank holds in ``tensors``. Matrices of parameters
        without weights of heads are left out.
        """
        for bucket in plan.buckets if plan and absent else ():
            for run in bucket.runs:
                if run.matrix in absent and run.parameter in self._weights:
                    yield grid_view(tensors[run.tensor], run.copy)
