# SPDX-License-Identifier: Apache-2.0
"""Kernel launches of an optimizer step, counted on meta tensors: the step's own code on shapes without memory."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import report
from deepspeed.muon.cli.forecast import Layout, StepPart, group_specs, lay_out
from deepspeed.muon.config.schema import MuonConfig, parse
from deepspeed.muon.exchange.placed_params import Partition
from deepspeed.muon.exchange.run import Exchange
from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import KernelSet, RunKernels, Tiles, Workspace
from deepspeed.muon.math import adamw
from deepspeed.muon.saved_state import OwnerState, adamw_state
from deepspeed.muon.step import PartitionStep, StepContext, StepValues, bind_partition, without_gradient

META = torch.device("meta")
RANKS = 8
#: Model -> layers, hidden, of the MLP, of keys and values, vocabulary.
MODELS = {"8B": (32, 4096, 14336, 1024, 128256), "70B": (80, 8192, 28672, 1024, 128256)}
COLLECTIVES = ("all-to-all", "all-reduce", "reads")
PHASES = ("look", "prepare", "exchange", "newton_schulz", "apply", "adamw")
#: Launches of what launches more than once. PyTorch copies the addend of a baddbmm before the product.
LAUNCHES = {"baddbmm": 2}


def llama(layers: int, hidden: int, mlp: int, kv: int, vocab: int) -> nn.Module:
    """The parameters of a Llama on the meta device, in the order of the model."""

    def layer() -> nn.Module:
        shapes = {"q": (hidden, hidden), "k": (hidden, kv), "v": (hidden, kv), "o": (hidden, hidden)}
        shapes |= {"gate": (hidden, mlp), "up": (hidden, mlp), "down": (mlp, hidden)}
        linears = {name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()}
        return nn.ModuleDict(linears | {"norm1": nn.RMSNorm(hidden), "norm2": nn.RMSNorm(hidden)})

    with META:
        parts = {"embed": nn.Embedding(vocab, hidden), "layers": nn.ModuleList(layer() for _ in range(layers))}
        return nn.ModuleDict(parts | {"norm": nn.RMSNorm(hidden), "lm_head": nn.Linear(hidden, vocab, bias=False)})


class Count(TorchDispatchMode):
    """Counts the launches of operations on meta tensors, by phase. Views and allocations launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.by_operation: Counter[tuple[str, str]] = Counter()
        self._phase = "exchange"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def add(self, name: str, number: int = 1) -> None:
        """Count launches of the current phase."""
        self.found[self._phase] += number
        self.by_operation[self._phase, name] += number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        name = func.overloadpacket.__name__
        returns = [one.alias_info for one in func._schema.returns]
        is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
        is_empty = all(tensor.numel() == 0 for tensor in tensors)
        if any(t.device == META for t in tensors) and not (is_view or is_empty or "empty" in name or name == "detach"):
            self.add(name, LAUNCHES.get(name, 1))
        return result


def with_triton(count: Count) -> KernelSet:
    """The table of operations on a GPU with Triton, whose kernels count and compute nothing."""

    def launching(name: str, number: int = 1) -> Callable[..., None]:
        return lambda *args, **kwargs: count.add(name, number)

    def normalize(x: Tensor, out: Tensor, norm: float = 1.0) -> Tensor:
        count.add("normalize", 3)
        return out

    def tiles(runs: Any, device: torch.device) -> Tiles:
        return Tiles(torch.empty(0, 3, device=device), are_aligned=True)

    runs = RunKernels(lambda tensor: True, tiles, launching("advance_runs"), launching("apply_runs_"))
    kernels = {"advance": launching("advance"), "apply_": launching("apply_"), "normalize": normalize, "runs": runs}
    return dataclasses.replace(kernel_set.TORCH, name="triton", **kernels)


@dataclasses.dataclass(frozen=True, eq=False)
class Counted(Exchange):
    """An exchange whose collectives are counted and send nothing."""

    count: Count = dataclasses.field(kw_only=True)
    collectives: Counter[str] = dataclasses.field(kw_only=True)

    def largest(self, values: Tensor) -> None:
        self.collectives["all-reduce"] += 1

    def _start(self, buffers: Any, back: bool) -> None:
        self.collectives["all-to-all"] += buffers.bucket.travels


def flat(part: StepPart) -> Tensor:
    """A rank's fp32 tensor of this part, with a gradient."""
    tensor = torch.empty(part.numel, dtype=torch.float32, device=META)
    tensor.grad = torch.empty_like(tensor)
    return tensor


def bound(index: int, part: StepPart, config: MuonConfig, kernels: KernelSet, **counters: Any) -> PartitionStep:
    """The planned step of rank 0."""
    wire = torch.bfloat16
    exchange = Counted("simulated", wire, META, Workspace(), **counters)
    return bind_partition(
        Partition(index, (flat(part),), part.shards, exchange.group, 0, part.world_size),
        {"ns_method": part.group.ns_method, "adjust_lr_fn": part.group.adjust_lr_fn},
        config=config,
        dtype="fp16",
        context=StepContext(kernels=kernels, dtype="fp16"),
        exchange=exchange,
        momentum_blocks={},
        owner_state=OwnerState(()),
    )


def counted(model: nn.Module, stage: int, triton: bool, ranks: int = RANKS) -> tuple[Count, Counter[str], int]:
    """The launches of rank 0's optimizer step, its collectives, and the number of buckets."""
    config, count, collectives = parse({"lr": 0.02}), Count(), Counter[str]()
    kernels = with_triton(count) if triton else kernel_set.TORCH
    groups = group_specs(model, config, "fp16", "cuda")
    parts = lay_out(groups, Layout(stage, ranks))
    muon = [part for part in parts if part.group.use_muon]
    steps = [bound(i, part, config, kernels, count=count, collectives=collectives) for i, part in enumerate(muon)]
    gradients = [[[tensor.grad] for tensor in step.partition.tensors] for step in steps]

    def read(flags: Tensor) -> list[int]:
        collectives["reads"] += 1
        return [1] * flags.numel()

    probes = [step.gradient_probe for step in steps]
    without_gradient(probes, gradients, read)  # the first step also makes the indices of its probes
    collectives.clear()
    of_adam = [(tensor, adamw_state(tensor)) for tensor in (flat(p) for p in parts if not p.group.use_muon)]
    settings = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1}
    for_adam = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    with count:
        with count.phase("look"):
            without_gradient(probes, gradients, read)
        for step in steps:
            tensor = step.partition.tensors[0]
            states = {tensor: {"step": torch.zeros(()), "momentum_buffer": torch.empty_like(tensor)}}
            group = settings | {"params": [tensor]}
            absent: frozenset[str] = frozenset()
            step.run(StepValues(group=group, state_of=states, without_gradient=absent, phase=count.phase, stats=None))
        with count.phase("adamw"):
            for tensor, state in of_adam:
                adamw.step([tensor], [state], for_adam, decoupled=True)
    return count, collectives, sum(len(step.plan.buckets) for step in steps)


def launches(ranks: int = RANKS) -> str:
    """Kernel launches of an optimizer step for Llama's shapes at stages 1 to 3; writes benchmarks/results/launches.md.

    Needs no GPU and little memory: rank 0 runs the code of a step on meta tensors, with the plan of a run on GPUs.

    Args:
        ranks: number of ranks
    """
    rows, most = [], {}
    for name, shapes in MODELS.items():
        model = llama(*shapes)
        for stage in (1, 2, 3):
            for triton in (True, False):
                count, collectives, buckets = counted(model, stage, triton, ranks)
                row = {"model": name, "stage": stage, "elementwise": "Triton" if triton else "PyTorch"}
                row |= {"launches": sum(count.found.values())}
                row |= {phase.replace("_", "-"): count.found[phase] for phase in PHASES}
                rows.append(row | {"buckets": buckets, **{kind: collectives[kind] for kind in COLLECTIVES}})
                if triton:
                    most[f"{name}, stage {stage}"] = count.by_operation.most_common(4)
    parts = [f"- {of}: {', '.join(f'{number} {name}' for (_, name), number in found)}" for of, found in most.items()]
    text = f"""# Kernel launches of a step

`python -m benchmarks launches` writes this file. {report.one_line()}.

The optimizer's step of rank 0 of {ranks}, for the shapes of Llama 3, in fp16 with the settings that a run on GPUs has
by default. The step's own code runs on meta tensors, and every operation that is not a view counts as one launch. A
`baddbmm` counts as two, because PyTorch copies the addend first. Products are the vendor's. *Triton*: the elementwise
passes are our Triton kernels, one launch for all pieces of a bucket in each pass, and three to normalize. What
DeepSpeed does before and after the optimizer's step is not counted; it is the same with AdamW. A fused AdamW counts as
one launch, though PyTorch divides a large tensor among several.

- **look**: whether the gradient is finite, which matrices have none; **exchange**: copies from and to the receive
  buffer;
- **all-to-all**, **all-reduce**: collectives, which are not launches in this count; **reads**: waits of the host.

{report.table(rows)}

With Triton, most launches are those of products:

{chr(10).join(parts)}
"""
    report.RESULTS.mkdir(exist_ok=True)
    (report.RESULTS / "launches.md").write_text(text)
    return text
