# SPDX-License-Identifier: Apache-2.0
"""The commands ds_muon plan and report: the numbers that they print, and what is refused."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from torch import nn

from deepspeed.muon.cli import report
from deepspeed.muon.cli.build_model import build
from deepspeed.muon.errors import ModelError
from deepspeed.muon.zero import patches
from deepspeed.muon.zero.read_config import read_settings
from deepspeed.muon.zero.wrappers.adapter import Seam
from helpers.logs import logged
from helpers.models import TinyGpt
from helpers.paths import ROOT

EXAMPLES = ROOT / "examples" / "plan"
OPTIMIZER = {"type": "Muon", "params": {"lr": 1e-3, "weight_decay": 0.1}}
MODEL = """
from torch import nn
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.lm_head = nn.Linear(64, 1000)
def model():
    print("a model talks")
    return Model()
def frozen():
    found = Model()
    found.tokens.requires_grad_(False)
    return found
def broken():
    raise RuntimeError("no luck\\nsecond line")
def nothing():
    return None
"""


Command = Callable[..., Any]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ds_muon: Command) -> Command:
    """Plans for 4 ranks, in a folder with a model of 6 layers; each call may have flags and sections of the config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("small.py").write_text(MODEL)

    def call(*flags: str, model: str = "small.py:model", **config: Any) -> Any:
        Path("ds.json").write_text(json.dumps({"optimizer": OPTIMIZER, "zero_optimization": {"stage": 3}} | config))
        return ds_muon("plan", "--config", "ds.json", "--model", model, "--world-size", 4, *flags)

    return call


# ---- plan: what it prints -------------------------------------------------------------------------------


def test_repeated_layers_are_folded(plan: Command) -> None:
    status, out, err = plan()
    assert status == 0 and err == "a model talks\n"
    (line,) = [line for line in out.splitlines() if ".up.weight" in line]
    assert line.split()[:7] == ["layers.{0..5}.up.weight", "x6", "256", "x", "64", "Muon", "1"]
    assert "196,608 parameters in 12 tensors, 12 matrices" in out
    scale_squared = 256 / 64
    norm = (6 * scale_squared * 64 + 6 * 64) ** 0.5
    stocks = {"type": "Muon", "params": {"muon_lr": 1e-3, "momentum": 0.95}}
    assert f"divided its updates by about {norm:.0f}\n" in plan(optimizer=stocks).out


def test_folding_keeps_unlike_parameters_apart(plan: Command) -> None:
    Path("uneven.py").write_text(
        "from torch import nn\ndef model():\n"
        "    return nn.ModuleList([nn.Linear(8, 16 if i == 2 else 8, bias=i > 4) for i in (0, 1, 2, 3, 5)])\n"
    )
    rows = plan("--json", model="uneven.py:model").facts["parameters"]
    assert [row["name"] for row in rows] == ["{0..1,3..4}.weight", "2.weight", "4.bias"]


KEYS = {
    "": "version model config stage world_size scale beyond_muon ns_dtype wire_dtype device offload parameters totals "
    "per_rank memory share planning_seconds stock_tuning stock_clipping assumptions notes",
    "per_rank": "state_bytes sent_bytes newton_schulz_gflop imbalance parts buckets collectives scratch_bytes "
    "nccl_bytes",
    "memory": "rows needed_bytes limit_bytes fits left_for_activations_bytes",
    "share": "newton_schulz_gflop communication_gflop gflop_per_token by_tokens",
    "stock_clipping": "gradient_clipping update_norm divided_by",
}
ROW_KEYS = "name count shape rule reason blocks scales methods cost owners on_each"


def test_json_is_one_object_with_stable_keys(plan: Command) -> None:
    facts = plan("--json").facts
    assert {path: " ".join(facts[path] if path else facts) for path in KEYS} == KEYS
    assert {" ".join(row) for row in facts["parameters"]} == {ROW_KEYS}
    assert facts["totals"]["muon"] == {"tensors": 12, "parameters": 12 * 64 * 256, "matrices": 12}
    assert facts["per_rank"]["sent_bytes"]["least_mean"] == 4 * 12 * 64 * 256 * 3 / 16
    assert facts["per_rank"]["imbalance"] == 1.0, "12 matrices of equal cost over 4 ranks"
    assert [row["cost"] for row in facts["parameters"] if row["rule"] == "Muon"] == [0.5, 0.5], "6 + 6 of one shape"
    rows = plan("--json", "--all").facts["parameters"]
    assert [row["count"] for row in rows] == [1] * 27
    assert [len(row["owners"]) for row in rows if row["rule"] == "Muon"] == [1] * 12


#: KernelSet of Newton-Schulz for one matrix of 256 x 64 by `gram`: in fp32, with the C++ kernels and plain PyTorch's;
#: on an accelerator in fp16, where libraries compute products whole.
TRIANGLE, WHOLE, ACCELERATOR = (64**3 * (4 * wide + small) for wide, small in ((6, 14), (8, 28), (8, 28)))
#: Parameters of embedding, head and layers.
NUMEL = 1000 * 64, 1000 * 64 + 1000, 6 * (2 * 64 * 256 + 256 + 64)


@pytest.mark.parametrize(
    ("flags", "kernels", "operations"),
    [("--device cpu", "auto", TRIANGLE), ("--device cpu", "torch", WHOLE), ("", "auto", ACCELERATOR)],
)
def test_share_of_one_rank_is_counted(flags: str, kernels: str, operations: int, plan: Command) -> None:
    """Of 12 equal matrices, beside 6 operations per parameter and token, or 4 where a parameter is frozen."""
    muon = 12 * operations
    optimizer = OPTIMIZER | {"params": {"kernels": kernels}}
    share = plan("--json", "--world-size", 1, *flags.split(), optimizer=optimizer).facts["share"]
    assert (share["newton_schulz_gflop"], share["communication_gflop"]) == (muon / 1e9, 0.0)
    assert share["gflop_per_token"] == 6 * sum(NUMEL) / 1e9
    expected = {tokens: muon / (muon + 6 * sum(NUMEL) * tokens) for tokens in (1024, 4096, 16384, 65536)}
    assert {row["tokens"]: row["counted"] for row in share["by_tokens"]} == pytest.approx(expected)
    frozen = plan("--json", "--active-parameters", NUMEL[2], model="small.py:frozen").facts["share"]
    assert frozen["gflop_per_token"] * 1e9 == pytest.approx((6 * sum(NUMEL) - 2 * NUMEL[0]) * NUMEL[2] / sum(NUMEL))


def test_share_of_four_ranks_has_the_exchange(plan: Command) -> None:
    """Three matrices on each rank in one bucket, so that nothing hides; 200 operations a byte on gloo, 5e7 a call."""
    facts = plan("--json", "--device", "cpu").facts
    share, sent = facts["share"], 2 * 2 * 3 * 64 * 256 * 3 / 4
    assert facts["per_rank"]["sent_bytes"]["max"] == sent and facts["per_rank"]["collectives"] == 2
    communication = 200 * sent + 2 * 5e7
    assert share["newton_schulz_gflop"] == 3 * TRIANGLE / 1e9
    assert share["communication_gflop"] == pytest.approx(communication / 1e9)
    muon, training = 3 * TRIANGLE + communication, 6 * sum(NUMEL) * 4096
    assert share["by_tokens"][1]["counted"] == pytest.approx(muon / (muon + training))


@pytest.mark.parametrize(
    ("flags", "nbytes"), [("", 3.28e9 * 3 / 7), ("--world-size 64", 3.28e9), ("--device cpu", 0.0), ("--stage 0", 0.0)]
)
def test_the_memory_of_nccl_is_counted_where_ranks_exchange_over_it(flags: str, nbytes: float, plan: Command) -> None:
    assert plan("--json", *flags.split()).facts["per_rank"]["nccl_bytes"] == pytest.approx(nbytes)
    assert ("NCCL_MAX_P2P_NCHANNELS" in plan(*flags.split()).out) == (nbytes > 0)


@pytest.mark.parametrize(("gigabytes", "fits"), [("10", True), ("1", False), (None, None)])
def test_the_first_answer_is_whether_it_fits(gigabytes: str | None, fits: bool | None, plan: Command) -> None:
    flags = ("--memory", gigabytes) if gigabytes else ()
    zero = {"stage": 3, "reduce_bucket_size": 1000}
    assert plan("--json", *flags, zero_optimization=zero).facts["memory"]["fits"] is fits
    out = plan(*flags, zero_optimization=zero).out
    assert out.splitlines()[2].startswith({True: "fits: ", False: "does not fit: ", None: "memory: "}[fits])


@pytest.mark.parametrize("stage", [2, 3])
def test_adamws_memory_is_counted_as_deepspeed_counts_it(stage: int, plan: Command) -> None:
    numel, zero = sum(NUMEL), {"stage": stage, "reduce_bucket_size": 1, "overlap_comm": False}
    memory = plan("--json", zero_optimization=zero, bf16={"enabled": True}).facts["memory"]
    rows = {row: nbytes for row, nbytes in memory["rows"]["adamw"].items() if row != "gathered_weights"}
    if stage == 2:
        _, expected = estimate_zero2_model_states_mem_needs(numel, num_gpus_per_node=4, cpu_offload=False)
    else:
        flags = {"cpu_offload": False, "cpu_offload_params": False}
        _, expected, _ = estimate_zero3_model_states_mem_needs(numel, 0, num_gpus_per_node=4, **flags)
        expected += 2 * numel / 4  # it leaves out the gradients in bf16
    assert sum(rows.values()) - rows["gradient_buckets"] == pytest.approx(expected)
    muon = memory["rows"]["muon"]["optimizer_state"]
    assert muon == pytest.approx((8 * numel - 4 * 12 * 64 * 256) / 4, rel=0.01), "Muon keeps half of AdamW's state"


def test_what_is_offloaded_needs_no_memory_of_a_device(plan: Command) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    rows = plan("--json", zero_optimization=zero).facts["memory"]["rows"]["muon"]
    assert {row for row, nbytes in rows.items() if not nbytes} == {
        *("weights", "gradients", "fp32_weights", "fp32_gradients", "optimizer_state")
    }


def test_flags_win_over_the_config(plan: Command) -> None:
    facts = plan("--json", "--stage", "0").facts
    assert facts["stage"] == 0
    assert all(row["owners"] == [0, 1, 2, 3] for row in facts["parameters"] if row["rule"] == "Muon")
    assert plan("--stage", "0", "--why").status == plan("--world-size", "1").status == 0


def test_the_config_is_read_as_the_engine_reads_it(plan: Command) -> None:
    zero = {"stage": 3, "sub_group_size": 9000, "offload_optimizer": {"device": "cpu"}}
    facts = plan("--json", zero_optimization=zero, gradient_clipping=0.0).facts
    assert facts["per_rank"]["parts"] == 4, "a rank has 4,096 elements of each of 12 matrices, 3 fill a sub-group"
    assert facts["offload"] is True
    assert facts["stock_clipping"]["divided_by"] == 1.0
    fp32 = plan("--json", optimizer=OPTIMIZER | {"params": {"ns_dtype": "fp32"}}).facts
    assert (fp32["ns_dtype"], fp32["scale"]) == ("fp32", "original")


def test_auto_of_hugging_face_counts_as_filled_in_later(plan: Command) -> None:
    keys = "train_batch_size", "gradient_accumulation_steps", "gradient_clipping"
    facts = plan(
        "--json",
        optimizer=OPTIMIZER | {"params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        zero_optimization={"stage": 2, "reduce_bucket_size": "auto"},
        bf16={"enabled": "auto"},
        **dict.fromkeys(keys, "auto"),
    ).facts
    assert facts["scale"] == "match_rms_adamw", "a learning rate will be there"
    assert facts["stock_clipping"]["gradient_clipping"] == 1.0


# ---- models ---------------------------------------------------------------------------------------------


def test_a_model_is_built_without_data_and_init_works_again(plan: Command) -> None:
    """From the current folder too, where a command's path does not lead."""
    Path("small_module.py").write_text(MODEL)
    assert plan("--json", model="small_module:model").facts["totals"]["muon"]["tensors"] == 12
    assert {param.device.type for param in build("helpers.models:TinyGpt").parameters()} == {"meta"}
    with pytest.raises(ModelError, match="the function raised TypeError"):
        build("helpers.models:Block")
    assert TinyGpt().tokens.weight.device.type == "cpu" and nn.Linear(4, 4).weight.abs().sum() > 0


def test_hugging_face_configs(tmp_path: Path) -> None:
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    for kind, built in (("llama", "LlamaForCausalLM"), ("vit", "ViTModel")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **tiny}))
        assert {type(build(str(path))).__name__ for path in (tmp_path, tmp_path / "config.json")} == {built}
    assert sum(param.numel() for param in build("llama").parameters()) > 6e9, "the default configuration"


# ---- refusals -------------------------------------------------------------------------------------------

MUON = {"type": "Muon"}
#: A model or sections of the ds_config, and words of the message.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "nope.py:model"}, "nope.py"),
    ({"model": "nope.mod:model"}, "ModuleNotFoundError"),
    ({"model": "small.py"}, "a Python file needs a function"),
    ({"model": "small.py:modl"}, "'modl'"),
    ({"model": "small.py:broken"}, "RuntimeError: no luck\n"),
    ({"model": "small.py:nothing"}, "NoneType"),
    ({"model": "lama"}, "llama"),
    ({"model": "nope.json"}, "no such file or folder"),
    ({"optimizer": {"type": "AdamW"}}, "optimizer.type: got 'AdamW'"),
    ({"optimizer": MUON | {"params": {"momentm": 1}}}, "params.momentm"),
    ({"optimizer": MUON | {"params": {"muon_include": "nope"}}}, "muon_include"),
    ({"zero_optimization": {"stage": 5}}, "stage: got 5"),
    ({"zero_optimization": {"zenflow": {}}}, "zero_optimization.zenflow"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "cannot be simultaneously enabled"),
    ({"fp16": {"loss_scal": 0}}, "loss_scal: got 0"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=str)
def test_mistakes_are_named_as_they_are_written(given: dict[str, Any], words: str, plan: Command) -> None:
    found = plan(**given)
    found.must_refuse("plan", words, lines=1 if given.keys() <= {"model", "optimizer"} else None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--wrld-size", "4"], "--wrld-size"),
        (["--world-size", "0"], "--world-size: got '0'"),
        (["--tokens", "0"], "--tokens: got '0'"),
        (["--active-parameters", "999999999"], "--active-parameters: got 999,999,999"),
        (["--stage", "4"], "--stage: invalid choice: 4"),
        (["--config", "nope.json"], "nope.json: No such file or directory\n"),
    ],
    ids=" ".join,
)
def test_wrong_flags(flags: list[str], words: str, plan: Command) -> None:
    plan(*flags).must_refuse("plan", words)


def test_gradient_clipping_wins_over_max_grad_norm() -> None:
    section = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}, "gradient_clipping": 0.5}
    with logged(logging.WARNING) as said:
        assert read_settings("ds.json", section, world_size=1).gradient_clipping == 0.5
    assert ["max_grad_norm" in text for text in said] == [True]


# ---- report ---------------------------------------------------------------------------------------------


def test_report(ds_muon: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ds_muon("report", "--json").facts
    assert (facts["ok"], facts["problems"]) == (True, [])
    assert len(facts["seams"]) == len(patches.SEAMS) and set(facts["seams"].values()) == {"in use", "ready"}
    assert facts["versions"]["deepspeed-muon"] and facts["tested_deepspeed"]["includes_installed"] is True
    assert facts["activation"]["entry_point_registered"] is True
    assert ds_muon("report", "--all").status == 0
    for name, value in (("DS_MUON_AUTOLOAD", "0"), ("TORCH_DEVICE_BACKEND_AUTOLOAD", "off")):
        monkeypatch.setenv(name, value)
        facts = ds_muon("report", "--json").facts
        assert facts["activation"]["automatic"] is False and facts["activation"]["switches"][name] == value
        monkeypatch.delenv(name)


def test_report_fails_where_something_is_missing(ds_muon: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    seam = Seam("deepspeed.runtime.engine", "DeepSpeedEngine._nowhere")
    monkeypatch.setattr(patches, "SEAMS", (*patches.SEAMS, seam))
    monkeypatch.setattr(report, "ENTRY_NAME", "nobody")
    status, out, _ = ds_muon("report", "--json")
    facts = json.loads(out)
    assert status == 1 and not facts["ok"]
    lacks, entry = facts["problems"]
    assert "DeepSpeedEngine._nowhere" in lacks and "entry point nobody" in entry
    assert set(facts["seams"].values()) == {"present", "missing"}
    assert ds_muon("report", "--all").status == 1


# ---- the process ----------------------------------------------------------------------------------------

HELP = """
import sys, deepspeed_muon
try:
    deepspeed_muon.command()
finally:
    assert not {"torch", "deepspeed"} & sys.modules.keys()
"""
#: Linux keeps ``ru_maxrss`` across an exec: it would be the peak of the tests' own process.
BIG = r"""
import pathlib, re, sys, deepspeed_muon
status = deepspeed_muon.command()
peak = re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
print(int(peak[1]) / 2**20, file=sys.stderr)
sys.exit(status)
"""


def process(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """A process without DS_ACCELERATOR, where DeepSpeed warns on stdout that it sees no GPU."""
    env = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("flags", [["--help"], ["plan", "--help"], ["--version"]], ids=" ".join)
def test_help_waits_for_nothing(flags: list[str]) -> None:
    done = process("-c", HELP, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: ds_muon" in done.stdout or "deepspeed-muon" in done.stdout


@pytest.mark.full
def test_the_module_prints_json_alone(tmp_path: Path) -> None:
    """Python imports DeepSpeed, which warns on stdout, before it runs the module."""
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW"}}))
    done = process("-m", "deepspeed.muon.cli", "init", "--config", "ds.json", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["optimizer"]["type"] == "Muon", done.stdout


COMMAND = """
import os, socket, sys, deepspeed_muon
os.environ.pop("HF_HUB_OFFLINE")
socket.getaddrinfo = None  # a look-up fails
sys.exit(deepspeed_muon.command())
"""


def test_nothing_stands_before_the_answer() -> None:
    """No warning of DeepSpeed, no look-up in a network; the figures are those of docs/plan.md."""
    flags = ["--config", "ds_config.json", "--model", "llama_8b.json", "--world-size", "8", "--memory", "80"]
    done = process("-c", COMMAND, "plan", *flags, cwd=EXAMPLES)
    assert (done.returncode, done.stderr) == (0, "")
    page = (ROOT / "docs" / "plan.md").read_text()
    printed = [line for line in done.stdout.split("\n\nMuon ")[0].splitlines()[2:] if line]
    assert [line for line in printed if line not in page.splitlines()] == [] and len(printed) == 12


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama_8b.json", "moe_1t.json", "moe_1t.py:model"])
def test_models_far_larger_than_the_machine(model: str) -> None:
    """2 GiB, as a whole process."""
    arguments = ["plan", "--config", "ds_config.json", "--model", model, "--world-size", "1024", "--json"]
    done = process("-c", BIG, *arguments, cwd=EXAMPLES)
    assert done.returncode == 0 and float(done.stderr.splitlines()[-1]) < 2, done.stderr
    facts = json.loads(done.stdout)
    assert sum(half["parameters"] for half in facts["totals"].values()) > (8e9 if "llama" in model else 1e12)
