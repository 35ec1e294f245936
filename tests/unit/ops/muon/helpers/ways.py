# SPDX-License-Identifier: Apache-2.0
"""Ways to train: under each kind of parallelism, how a rank makes an engine, takes a step and reads the weights."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers import engine_state, experts, megatron, nvme, pipelines, sequence_parallel, tensor_parallel
from helpers.experts import EP, EXPERTS, INNER, Mixtral, WithExperts, autoep, global_name, spread_model
from helpers.language_models import WIDTH
from helpers.models import GLOBAL_BATCH, MODELS, Absent, Fused, full_weights, fused_parts, halve, train_engine
from helpers.oracles import OracleConfig, Part, route
from helpers.training import ds_config, fp32_weights, make_engine, take

Case = dict[str, Any]
"""One training: `world`, the number of ranks, and arguments of a way's `build`, mostly those of `ds_config`."""
Parts = dict[str, list[Part]]
"""Parameter name -> the elements of each of its matrices."""


def index_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameter name -> the number of each element, in the parameter's shape."""
    return {name: torch.arange(param.numel()).view(param.shape) for name, param in model.named_parameters()}


class Way:
    """Training under ZeRO alone, of a `model` of `MODELS`, and what the other ways have in common."""

    #: Ends of the names of parameters that have others on a rank.
    renamed: tuple[str, ...] = ()
    #: A module without which the way is skipped.
    needs = "deepspeed"

    def whole(self, case: Case) -> Any:
        """Return the whole model, with the weights that training starts from."""
        return MODELS[case.get("model", "mlp")]()

    def to_adam(self, case: Case) -> tuple[str, ...]:
        """Return beginnings of the names of the matrices that AdamW updates."""
        return ("tokens", "positions", "lm_head") if case.get("model", "").startswith("gpt") else ()

    def parts(self, case: Case) -> Parts:
        """Return the matrices of each parameter that is several."""
        return fused_parts(self.whole(case))

    def special(self, case: Case, config: OracleConfig) -> dict[str, OracleConfig]:
        """Return parameter name -> the oracle's settings, where they are not `config`."""
        return {}

    def factor(self, case: Case) -> float:
        """Return how many times as large as the mean over all samples the gradient is."""
        return case["world"] if case.get("gradient_allreduce_op") == "sum" else 1.0

    def build(self, seed: int, model: str = "mlp", zero_init: bool = False, **config: Any) -> Any:
        """Return an engine, whose first weights are those of `whole` if `seed` is 0, otherwise others."""
        import deepspeed

        settings = ds_config(**config)
        with deepspeed.zero.Init(config_dict_or_path=settings) if zero_init else nullcontext():
            net = MODELS[model]()
        return make_engine(halve(net, seed), settings)

    @contextmanager
    def engine(self, case: Case, seed: int = 0, **more: Any) -> Iterator[Any]:
        """Yield the engine of a case, whose config `more` updates."""
        engine = self.build(seed, **{key: value for key, value in (case | more).items() if key != "world"})
        yield engine
        engine.destroy()

    def step(self, engine: Any, number: int) -> None:
        """Take a step on this rank's share of the global batch `number`."""
        train_engine(engine, 1, first_step=number)

    def take(self, engine: Any, number: int) -> None:
        """Take a step, again and again while the loss scale is too large for it."""
        take(engine, partial(self.step, engine, number))

    def weights(self, engine: Any) -> dict[str, Tensor]:
        """Return name -> whole master weight, of the parameters that this rank has."""
        return fp32_weights(engine)

    def on_rank(self, weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Return the weights of the whole model under the names, and in the parts, that `weights` has on a rank."""
        return weights

    def snapshot(self, engine: Any) -> dict[str, Tensor]:
        """Return copies of this rank's weights, master weights and optimizer state."""
        return engine_state.snapshot(engine)

    def states(self, engine: Any) -> dict[str, Tensor]:
        """Return "parameter.key" -> whole optimizer state, of the parameters that this rank has."""
        return engine_state.named_states(engine)

    def apart(self, engine: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return values under names that mean the same on all ranks."""
        return values

    def names(self, engine: Any) -> dict[str, nn.Parameter]:
        """Return name in the whole model -> parameter, of those that this rank has and trains."""
        return {spec.name: param for param, spec in engine.basic_optimizer.specs.items()}

    def has_no_gradient(self, name: str, number: int) -> bool:
        """Return whether a parameter that is trained has no gradient in a step."""
        return False

    def spoiled(self, engine: Any) -> list[list[nn.Parameter]]:
        """Return groups of parameters, each of which is to have bad gradients on one rank in one step."""
        found: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for param, spec in engine.basic_optimizer.specs.items():
            is_empty = getattr(param, "ds_numel", param.numel()) == 0
            if not is_empty and not self.is_copy(engine, param):
                found[spec.use_muon].append(param)
        muon, adam = found[True], found[False]
        return [params for params in (muon[:1], adam[:1], muon + adam) if params]

    def is_copy(self, engine: Any, param: nn.Parameter) -> bool:
        """Return whether all tensor-parallel ranks have a parameter, whose norm DeepSpeed takes only on the first."""
        if not hasattr(engine, "model_group") and engine.autotp_size() < 2:
            return False
        note = getattr(param, "ds_autotp_universal_checkpoint_meta", {"replicated": True})
        is_cut = hasattr(param, "partition_dim") or not note["replicated"]
        return getattr(param, "allreduce", True) and not is_cut


class ByScript(Way):
    """An optimizer that the script passes to `deepspeed.initialize`."""

    def build(self, seed: int, **config: Any) -> Any:
        from deepspeed.muon import MuonWithAuxAdam

        net, settings = halve(MODELS["mlp"](), seed), ds_config(**config)
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, **settings.pop("optimizer")["params"])
        return make_engine(net, settings, optimizer=optimizer)


class Split(Way):
    """Parameters that a config splits."""

    PARAMS = {
        "muon_conv": "flatten",
        "muon_split": {
            "qkv": [7, 5, 4],
            "c_attn": {"sizes": [5, 4, 3], "axis": 1},
            "grouped": {"sizes": [4, 2, 2], "groups": 3},
        },
    }

    def whole(self, case: Case) -> Any:
        return Fused()

    def to_adam(self, case: Case) -> tuple[str, ...]:
        return ("lm_head",)

    def parts(self, case: Case) -> Parts:
        index = index_of(Fused())
        grouped = index["grouped.weight"].view(3, 8, 12)
        return {
            "conv.weight": [index["conv.weight"].view(5, 18)],
            "qkv.weight": list(index["qkv.weight"].split([7, 5, 4])),
            "c_attn.weight": list(index["c_attn.weight"].split([5, 4, 3], dim=1)),
            "grouped.weight": [part.reshape(-1, 12) for part in grouped.split([4, 2, 2], dim=1)],
            "experts.down": list(index["experts.down"]),
        }

    def build(self, seed: int, **config: Any) -> Any:
        return super().build(seed, model="fused", **config)


class Gone(Way):
    """Matrices that have no gradient in some steps; `micros` ranks or micro-steps share some of them unequally."""

    def whole(self, case: Case) -> Any:
        return Absent(case.get("micros", case.get("accumulation", 1)))

    def to_adam(self, case: Case) -> tuple[str, ...]:
        return (
            ("layers.experts",) if "normuon" in case["optimizer"]["params"] else ()
        )  # where its outputs are is unknown

    def parts(self, case: Case) -> Parts:
        excluded = self.to_adam(case)
        return {
            f"{name}.weight": list(index_of(layer)["weight"].flatten(0, -2).split(layer.sizes.tolist(), layer.axis))
            for name, layer in Absent().named_modules()
            if name.endswith(("qkv", "columns", "experts")) and name not in excluded
        }

    def build(self, seed: int, accumulation: int = 1, micros: int = 0, **config: Any) -> Any:
        net = Absent(micros or accumulation)
        net.layers["experts"].weight.use_muon = "normuon" not in config["optimizer"]["params"]
        return make_engine(halve(net, seed), ds_config(accumulation=accumulation, **config))

    def has_no_gradient(self, name: str, number: int) -> bool:
        return number in Absent.ABSENT.get((name.split(".")[1], 0), ()) and name.split(".")[1] not in Absent.SPLIT


class AgainOrCompiled(Way):
    """Layers whose outputs are computed again in the backward pass, by torch or DeepSpeed; a compiled engine.

    Where DeepSpeed partitions what it saves over model-parallel ranks, these have the same data.
    """

    def build(self, seed: int, how: str, **config: Any) -> Any:
        import deepspeed

        net: Any = halve(MODELS["mlp"](), seed)
        net.is_whole = how == "partitioned"
        save: Any = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        if how in ("DeepSpeed", "partitioned"):
            group = dist.new_group(range(2)) if net.is_whole else None
            facts = {"rank": dist.get_rank(), "world_size": 2, "group": group}
            mpu = SimpleNamespace(**{f"get_model_parallel_{key}": lambda of=of: of for key, of in facts.items()})
            deepspeed.checkpointing.configure(mpu if net.is_whole else None, partition_activations=net.is_whole)
            save = deepspeed.checkpointing.checkpoint
        for layer in net.layers[1:] if how != "compile" else ():
            layer.forward = partial(save, layer.forward)
        engine = make_engine(net, ds_config(**config))
        if how == "compile":
            engine.compile(backend="eager")
        return engine

    def step(self, engine: Any, number: int) -> None:
        if not engine.module.is_whole:
            return super().step(engine, number)
        engine.backward(engine(*engine.module.batch(number)))
        engine.step()


class Heads(Way):
    """A matrix for each head of the queries, keys and values of TinyGpt: 6 rows each."""

    def parts(self, case: Case) -> Parts:
        return {name: list(index.split(6)) for name, index in index_of(self.whole(case)).items() if "qkv" in name}


class Layouts(Way):
    """Models whose weights are several matrices, in every layout that the package knows by itself."""

    def to_adam(self, case: Case) -> tuple[str, ...]:
        names = [name for name, _ in self.whole(case).named_parameters()]
        of_muon = {"B": ("lora_B",), "both": ("lora_A", "lora_B")}.get(case["optimizer"]["params"].get("muon_lora"), ())
        lora = [name for name in names if "lora" in name and not any(part in name for part in of_muon)]
        return (*lora, *(name for name in names if any(word in name for word in ("embed", "wte", "wpe", "head"))))

    def parts(self, case: Case) -> Parts:
        parts, index = {}, index_of(self.whole(case))
        if case["model"] == "deepseek_v3":  # of each head 4 + 2 rows of the queries, 4 of the keys, 3 of the values
            parts |= {name: list(numbers.split(6)) for name, numbers in index.items() if "q_b_proj" in name}
            parts |= {name: list(numbers.split([4, 3] * 3)) for name, numbers in index.items() if "kv_b" in name}
        if case["model"] == "adapters":
            a, b = "experts.lora_A.weight", "experts.lora_B.weight"
            packed = {a: list(index[a].split(2)), b: [index[b][:, expert::4] for expert in range(4)]}
            parts |= {name: found for name, found in packed.items() if name not in self.to_adam(case)}
        for name, numbers in index.items() if case["model"] == "layouts" else ():
            if "experts" not in name and case["optimizer"]["params"].get("muon_fused") == "whole":
                continue
            if "c_attn.weight" in name:
                parts[name] = list(numbers.chunk(3, dim=1))
            elif "query_key_value.weight" in name:
                parts[name] = [heads.reshape(-1, WIDTH) for heads in numbers.view(3, 3, 4, WIDTH).unbind(1)]
            elif "qkv_proj" in name:
                parts[name] = list(numbers.split([12, 4, 4]))
            elif "gate_up_proj.weight" in name:
                parts[name] = list(numbers.chunk(2))
            elif "in_proj_weight" in name:
                parts[name] = list(numbers.chunk(3))
            elif "experts" in name:
                is_fused = "gate_up" in name and case["optimizer"]["params"].get("muon_fused") != "whole"
                halves = numbers.chunk(2, dim=1 if "first" in name else 2) if is_fused else (numbers,)
                parts[name] = [matrix for half in halves for matrix in half]
        return parts

    def special(self, case: Case, config: OracleConfig) -> dict[str, OracleConfig]:
        turned = replace(config, output_axis=1)
        names = [name for name, _ in self.whole(case).named_parameters()] if case["model"] == "layouts" else []
        return {name: turned for name in names if "c_" in name or "second_experts" in name}


class UserGroups(Way):
    """Parameter groups that have settings and foreign keys: layer 4, layers 0 and 1, layers 2 and 3."""

    #: What scripts for AdamW put into groups.
    KEYS = {
        "lr_scale": 0.65,
        "layer_id": 3,
        "no_weight_decay": True,
        "weight_decay_mult": 1.0,
        "min_lr": 1e-6,
        "tags": {"a": torch.zeros(1)},
    }
    #: What torch's AdamW has in its own groups.
    ADAMWS = dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
    ADAMWS |= {"foreach": None, "fused": None, "decoupled_weight_decay": True}

    SECOND = {"lr": 0.005, "momentum": 0.5, "weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-6}
    THIRD = {"muon_lr": 0.01, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_method": "gram"}

    def special(self, case: Case, config: OracleConfig) -> dict[str, OracleConfig]:
        second = replace(config, **self.SECOND, adam_lr=0.005, adam_weight_decay=0.0)
        third = replace(config, lr=0.01, nesterov=False, scale="match_rms_adamw")
        by_layer = {"0": second, "1": second, "2": third, "3": third}
        names = [name for name, _ in self.whole(case).named_parameters()]
        return {name: by_layer[name[7]] for name in names if name[7] in by_layer}

    def build(self, seed: int, **config: Any) -> Any:
        net: Any = halve(MODELS["mlp"](), seed)
        first, second, third = (
            {"params": [param for layer in layers for param in layer.parameters()], **self.KEYS, **self.ADAMWS}
            for layers in (net.layers[4:], net.layers[:2], net.layers[2:4])
        )
        return make_engine(net, ds_config(**config), model_parameters=[first, second | self.SECOND, third | self.THIRD])


class TensorParallel(Way):
    """AutoTP on `tp` ranks of a `model` of `tensor_parallel.model`."""

    def whole(self, case: Case) -> Any:
        return tensor_parallel.model(case["model"])

    def to_adam(self, case: Case) -> tuple[str, ...]:
        return ("model.embed", "lm_head", "gpt_neox.embed", "embed_out")

    def parts(self, case: Case) -> Parts:
        found, params = {}, case["optimizer"]["params"]
        muon = route(self.whole(case), self.to_adam(case))
        for name, index in index_of(self.whole(case)).items():
            if params.get("per_head_muon") and any(f"{leaf}_proj" in name for leaf in "qkv"):
                found[name] = list(index.split(tensor_parallel.HEAD))
            if "muon_split" in params and "query_key_value.weight" in name:
                found[name] = [
                    part.reshape(-1, 24)
                    for part in index.view(6, 3 * tensor_parallel.HEAD, 24).split(tensor_parallel.HEAD, dim=1)
                ]
            if "muon_split" in params and "gate_up" in name:
                found[name] = list(index.split(17))
            if params.get("tp_mode") == "shard" and muon[name] == "muon":
                axis = int("o_proj" in name or "down_proj" in name)
                length = index.shape[axis]
                first = length // 3 * 2 if "self_attn" in name else length // 2
                found[name] = list(index.split([first, length - first], dim=axis))
        return found

    def build(self, seed: int, model: str, **config: Any) -> Any:
        return tensor_parallel.build(halve(tensor_parallel.model(model), seed), **config)

    def weights(self, engine: Any) -> dict[str, Tensor]:
        return tensor_parallel.whole_weights(engine)

    def states(self, engine: Any) -> dict[str, Tensor]:
        """Return nothing: states are sharded as the weights are, and show in the weights of later steps."""
        return {}


class Megatron(Way):
    """A model-parallel unit (mpu) of `size` ranks, in a pipeline if there are `stages`."""

    def whole(self, case: Case) -> Any:
        return megatron.Stack()

    def to_adam(self, case: Case) -> tuple[str, ...]:
        return ("3.lm_head",)

    def parts(self, case: Case) -> Parts:
        """Return gate and up, which are two matrices anyway, and with the case's params heads or shards."""
        found, params = {}, case["optimizer"]["params"]
        count = 2 if params.get("tp_mode") == "shard" else 1
        for name, index in index_of(megatron.Stack()).items():
            if "gate_up_proj.weight" in name:
                found[name] = [half for part in index.split(megatron.INNER) for half in part.chunk(count)]
            elif "_proj.weight" in name and count > 1:
                found[name] = list(index.chunk(count, dim=int("o_proj" in name or "down_proj" in name)))
            elif any(f"{leaf}_proj" in name for leaf in "qkv") and params.get("per_head_muon"):
                found[name] = list(index.chunk(megatron.HEADS))
        return found

    def build(self, seed: int, **config: Any) -> Any:
        return megatron.build(seed=seed, **config)

    def weights(self, engine: Any) -> dict[str, Tensor]:
        return tensor_parallel.whole_weights(engine)


class Pipeline(Way):
    """A pipeline of `stages` (2) and micro-batches."""

    def whole(self, case: Case) -> Any:
        return pipelines.Whole(case["model"])

    def to_adam(self, case: Case) -> tuple[str, ...]:
        return tuple(pipelines.ADAM[case["model"]])

    def parts(self, case: Case) -> Parts:
        """Return queries, keys and values, or matrices of 6 rows for each head; `muon_split` is of one block only."""
        found, params = super().parts(case), case["optimizer"]["params"]
        for name, index in index_of(self.whole(case)).items():
            if "qkv" in name and (params.get("per_head_muon") or ("muon_split" in params and name.startswith("4."))):
                found[name] = list(index.split(6))
        return found

    def build(self, seed: int, model: str, stages: int = 2, **config: Any) -> Any:
        net = halve(pipelines.make_pipeline(model, stages), seed)
        return make_engine(net, pipelines.pipeline_config(stages, **config))


class Experts(Way):
    """DeepSpeed's own MoE layer: experts on two ranks each; on a rank they have local numbers."""

    def whole(self, case: Case) -> Any:
        return WithExperts(spread=False, width=case.get("width", 11))

    def to_adam(self, case: Case) -> tuple[str, ...]:
        return ("lm_head", "layer.deepspeed_moe.gate")

    def build(self, seed: int, how: str = "one group", width: int = 11, **config: Any) -> Any:
        """Return an engine; `how` the script hands the parameters to it."""
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        from deepspeed.muon import MuonWithAuxAdam

        net, settings = halve(spread_model(width), seed), ds_config(**config)
        params: list[Any] = list(net.parameters())
        if how == "client":
            optimizer = MuonWithAuxAdam(params, model=net, **settings.pop("optimizer")["params"])
            return make_engine(net, settings, optimizer=optimizer)
        if how == "unnamed groups":
            params = [{"params": [p for p in params if (p.ndim > 1) is matrix]} for matrix in (True, False)]
        elif how == "stock's groups":
            params = split({"params": params, "name": "all"})
        return make_engine(net, settings, model_parameters=params)

    def weights(self, engine: Any) -> dict[str, Tensor]:
        return {global_name(name, dist.get_rank()): value for name, value in fp32_weights(engine).items()}

    def names(self, engine: Any) -> dict[str, nn.Parameter]:
        return {global_name(name, dist.get_rank()): param for name, param in super().names(engine).items()}

    def spoiled(self, engine: Any) -> list[list[nn.Parameter]]:
        """Return an expert's matrix first, which other ranks do not have."""
        specs = engine.basic_optimizer.specs
        experts = [param for param, spec in specs.items() if "experts" in spec.name and spec.use_muon]
        return [experts[:1], *super().spoiled(engine)]


class WithoutTokens(Experts):
    """The same; in the steps `EMPTY` the last expert gets no token."""

    EMPTY = (1, 2)
    now = 0
    """The step that is trained."""

    def close(self, logits: Tensor) -> Tensor:
        """Return logits of a gate that keeps tokens from the last expert."""
        closed = torch.zeros_like(logits)
        closed[..., -1] = -1e9 if self.now in self.EMPTY else 0.0
        return logits + closed

    def whole(self, case: Case) -> Any:
        net = super().whole(case)
        net.layer.deepspeed_moe.gate.wg.register_forward_hook(lambda gate, args, logits: self.close(logits))
        net.batch = self.batch
        return net

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the global batch of a step, which is now trained."""
        self.now = number
        return WithExperts.batch(number)

    def has_no_gradient(self, name: str, number: int) -> bool:
        return number in self.EMPTY and f"experts.{EXPERTS - 1}." in name and name.endswith("weight")

    @contextmanager
    def engine(self, case: Case, seed: int = 0, **more: Any) -> Iterator[Any]:
        from deepspeed.moe import sharded_moe

        gate = sharded_moe.top1gating
        with pytest.MonkeyPatch.context() as patch, super().engine(case, seed, **more) as engine:
            patch.setattr(sharded_moe, "top1gating", lambda logits, *args, **kw: gate(self.close(logits), *args, **kw))
            yield engine

    def step(self, engine: Any, number: int) -> None:
        self.now = number
        super().step(engine, number)


class AutoEp(Experts):
    """AutoEP of a Mixtral's experts over `ep` ranks, two of which AutoTP also uses if the case has `tp` 2."""

    renamed = ("experts.gate_up_proj", "experts.down_proj")

    def whole(self, case: Case) -> Any:
        return Mixtral(case.get("experts", 4), key_heads=case.get("tp", 1))

    def to_adam(self, case: Case) -> tuple[str, ...]:
        names = [name for name, _ in self.whole(case).named_parameters()]
        outer = ("embed_tokens", "norm", "mlp.gate.weight", "lm_head")
        return tuple(name for name in names if any(part in name for part in outer))

    def parts(self, case: Case) -> Parts:
        parts, shards = {}, 2 if case["optimizer"]["params"].get("tp_mode") == "shard" else 1
        for name, index in index_of(self.whole(case)).items():
            if "self_attn" in name and shards > 1:
                parts[name] = list(index.chunk(shards, dim=int("o_proj" in name)))
            if name.endswith("gate_up_proj"):
                parts[name] = [half for expert in index for half in expert.split(INNER)]
            elif name.endswith("down_proj"):
                parts[name] = list(index)
        return parts

    def build(self, seed: int, stage: int, experts: int = 4, tp: int = 1, ep: int = 2, **config: Any) -> Any:
        settings = autoep(stage, ep, **config)
        if tp > 1:
            settings["tensor_parallel"] = {"autotp_size": tp, "preset_model": "mixtral"}
            settings["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH * tp // dist.get_world_size()
        return make_engine(halve(Mixtral(experts, key_heads=tp), seed), settings)

    def weights(self, engine: Any) -> dict[str, Tensor]:
        return tensor_parallel.whole_weights(engine) if engine.autotp_size() > 1 else fp32_weights(engine)

    def on_rank(self, weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Return the weights as AutoEP lays them out on a rank."""
        found = {}
        for name, weight in weights.items():
            if ".experts." in name:
                prefix, leaf = name.rsplit(".", 1)
                mine = weight.chunk(2)[rank % 2]
                pairs = {"w2": mine} if leaf == "down_proj" else dict(zip(("w1", "w3"), mine.chunk(2, 1), strict=True))
                found |= {f"{prefix}.{key}": value for key, value in pairs.items()}
            else:
                found[name.replace("mlp.gate", "mlp.router.gate")] = weight
        return found

    def names(self, engine: Any) -> dict[str, nn.Parameter]:
        return Way.names(self, engine)

    def apart(self, engine: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return each expert of this rank's stacks by its number."""
        found = {}
        for name, value in values.items():
            if ".experts." not in name:
                found[name] = value
                continue
            ranks = engine.module.config.num_local_experts // len(value)
            first = dist.get_rank() % ranks * len(value)
            found |= {f"{name} {first + number}": expert for number, expert in enumerate(value)}
        return found


class ExpertsBeside(Experts):
    """DeepSpeed's MoE layers with an mpu of `size` ranks, in a pipeline of `stages`, or both."""

    def whole(self, case: Case) -> Any:
        return experts.Mixed()

    def to_adam(self, case: Case) -> tuple[str, ...]:
        return ("3.lm_head", "1.layer.deepspeed_moe.gate", "2.layer.deepspeed_moe.gate")

    def build(self, seed: int, **config: Any) -> Any:
        return experts.build_beside(seed=seed, **config)

    def weights(self, engine: Any) -> dict[str, Tensor]:
        return experts.whole_weights(engine)

    def names(self, engine: Any) -> dict[str, nn.Parameter]:
        return {global_name(name, dist.get_rank() % EP): param for name, param in Way.names(self, engine).items()}


class Nvme(Way):
    """Optimizer states on NVMe; `swap` is a folder."""

    def whole(self, case: Case) -> Any:
        return nvme.Wide()

    def to_adam(self, case: Case) -> tuple[str, ...]:
        return ("tokens",)

    def build(self, seed: int, swap: str, **config: Any) -> Any:
        return nvme.nvme_engine(seed, folder=f"{swap}/{seed}", **config)

    def snapshot(self, engine: Any) -> dict[str, Tensor]:
        return nvme.weights_of(engine) | engine_state.named_states(engine)


class Ulysses(Way):
    """Ranks of which each two share sequences, of a TinyGpt by DeepSpeed's `DistributedAttention`."""

    def whole(self, case: Case) -> Any:
        return MODELS["gpt"]()

    def to_adam(self, case: Case) -> tuple[str, ...]:
        return ("tokens", "positions", "lm_head", "model.embed")

    def parts(self, case: Case) -> Parts:
        """Return the heads, all of which are on every rank, whatever part of them its attention computes."""
        of_heads = case["optimizer"]["params"].get("per_head_muon")
        return Heads().parts(case | {"model": "gpt"}) if of_heads else super().parts(case)

    def factor(self, case: Case) -> float:
        """Return 1/2 at stage 3, where DeepSpeed takes the mean over a sequence's ranks, not the sum."""
        return 0.5 if case["stage"] == 3 else 1.0

    def build(self, seed: int, **config: Any) -> Any:
        return sequence_parallel.build(halve(sequence_parallel.SpreadGpt(), seed), **config)

    def step(self, engine: Any, number: int) -> None:
        sequence_parallel.train_step(engine, number)


class Alst(Ulysses):
    """The same of a Llama of transformers, by DeepSpeed's ALST."""

    needs = "einops"

    def whole(self, case: Case) -> Any:
        return sequence_parallel.Llama()

    def build(self, seed: int, **config: Any) -> Any:
        return sequence_parallel.build(halve(sequence_parallel.Llama(), seed), **config)

    @contextmanager
    def engine(self, case: Case, seed: int = 0, **more: Any) -> Iterator[Any]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        own: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
        try:
            with super().engine(case, seed, **more) as engine:
                yield engine
        finally:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = own


class Hybrid(Way):
    """DeepSpeed's hybrid engine. Before each step it writes what a model with its weights writes."""

    needs = "deepspeed.runtime.rollout"

    def whole(self, case: Case) -> Any:
        return tensor_parallel.model(case["model"])

    def to_adam(self, case: Case) -> tuple[str, ...]:
        return ("model.embed", "model.decoder.embed", "lm_head")

    def build(self, seed: int, model: str, **config: Any) -> Any:
        net = halve(tensor_parallel.model(model), seed)
        net.kind = model
        return make_engine(net, ds_config(hybrid_engine={"enabled": True}, **config))

    def step(self, engine: Any, number: int) -> None:
        prompts, weights = engine.module.batch(99)[0] % 31 + 1, full_weights(engine.module)  # none is padding
        other: Any = tensor_parallel.model(engine.module.kind).to(next(iter(weights.values())).dtype)
        other.load_state_dict(weights, strict=False)
        engine.eval()
        is_rollout = engine.module.kind == "qwen"
        found = self.roll_out(engine, prompts) if is_rollout else self.write(engine.module, prompts)
        assert found.equal(self.write(other.eval(), prompts))
        engine.train()
        super().step(engine, number)

    def write(self, net: Any, prompts: Tensor) -> Tensor:
        with torch.no_grad():
            return net.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False)

    def roll_out(self, engine: Any, prompts: Tensor) -> Tensor:
        from deepspeed.runtime.rollout import RolloutRequest, SamplingConfig, build_rollout

        tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
        rollout = build_rollout(SimpleNamespace(engine="hybrid_engine"), engine, tokenizer)
        request = RolloutRequest(prompts, torch.ones_like(prompts))
        return rollout.generate(request, SamplingConfig(max_new_tokens=4, temperature=0.0)).input_ids
