# SPDX-License-Identifier: Apache-2.0
"""The documentation against the code: tests, refusals, commands, JSON, generated pages."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed.muon.cli import main
from deepspeed.muon.config.schema import MuonConfig, parse
from deepspeed.muon.zero.refusals import MOMENTUM_DTYPE, RULES
from helpers.parity import CELLS
from helpers.paths import DOCS, EXAMPLES, ROOT, TESTS
from helpers.ports import free_port

PAGES = sorted(DOCS.rglob("*.md"))


def read(name: str) -> str:
    return (DOCS / name).read_text()


def page_id(path: Path) -> str:
    return str(path.relative_to(DOCS))


# ---- pages ----------------------------------------------------------------------------------------------------


def cases_of(file: Path) -> set[str]:
    """Names of the tests of a file."""
    return set(re.findall(r"^(?:def )?(test_\w+)", file.read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_a_page_names_tests_that_exist(path: Path) -> None:
    text, files = path.read_text(), {path.name: path for path in TESTS.rglob("test_*.py")}
    known = {name for file in files.values() for name in (file.name, f"{file.parent.name}/{file.name}")}
    assert set(re.findall(r"\b(?:\w+/)?test_\w+\.py", text)) <= known
    assert [
        case for file, case in re.findall(r"(test_\w+\.py)::(\w+)", text) if case not in cases_of(files[file])
    ] == []


def test_the_matrix_says_what_is_compared_with_the_oracle() -> None:
    kinds = {"": "none", ", optimizer on the CPU": "optimizer", ", optimizer and parameters on the CPU": "both"}
    rows = re.findall(
        r"^\| stage (\d)(.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|",
        read("evidence/support.md"),
        re.MULTILINE,
    )
    stated = {
        (int(stage), precision, kinds[offload])
        for stage, offload, *columns in rows
        for precision, cell in zip(("fp32", "bf16", "fp16", "autocast", "fp16 autocast"), columns, strict=True)
        if cell == "tested"
    }
    assert stated == set(CELLS)


# ---- refusals -----------------------------------------------------------------------------------------------


def test_every_refusal_is_in_the_support_matrix() -> None:
    refusals = [line for line in read("evidence/support.md").splitlines() if "refused" in line]
    refused = [f"`{key}`" for key in (*(rule[0] for rule in RULES), MOMENTUM_DTYPE)]
    assert [key for key in refused if not any(key in line for line in refusals)] == []


# ---- generated pages ----------------------------------------------------------------------------------------


def script(*path: str) -> SimpleNamespace:
    """The names that a script defines."""
    return SimpleNamespace(**runpy.run_path(str(ROOT.joinpath(*path))))


def test_generated_pages_are_up_to_date() -> None:
    assert read("configuration.md") == script("docs", "generate.py").configuration(), "run python docs/generate.py"
    assert read("evidence/support.md") == script("tools", "support_table.py").page(), "run tools/support_table.py"


def test_the_page_of_versions_has_a_line_for_every_row() -> None:
    versions = script("tools", "versions.py")
    files = [name.partition("::")[0] for name in (*versions.SMOKE, *versions.MODELS, versions.STOCK)]
    assert [name for name in files if not (TESTS / name).is_file()] == []
    rows = {row.name: row for row in versions.rows()}
    page = read("evidence/versions.md")
    assert page == versions.page(versions.kept()), "run make versions"
    for name, line in versions.kept().items():
        pins = dict(pin.split("==") for pin in rows[name].pins if "==" in pin and "not run" not in line)
        assert all(f"| {pins[package]} |" in line for package in set(versions.PACKAGES) & set(pins)), line


# ---- commands ------------------------------------------------------------------------------------------------

GUIDES = [ROOT / "README.md", *PAGES, *sorted(EXAMPLES.glob("*/README.md"))]
ELSEWHERE = {
    r"^make (demo|test)": "the demo is compare.py, which runs here; the tests are these",
    r"pip (install|wheel|download)": "installs; tools/release_check.py does it",
    r"^(trl|\w+=\w+ (llamafactory-cli|swift)|axolotl) |tiny_model\.py|openrlhf": "test_integrators.py",
    r"^accelerate launch|--deepspeed ds_config_muon|^python train\.py": "test_frameworks.py",
    r"^python experiments\.py": "test_experiments.py",
    r"examples/staged|two_stages\.py": "test_staged.py",
}
"""What is not run here."""
SMALL = "--steps 4 --layers 1 --width 32 --heads 2 --context 16 --eval-every 2 --eval-batches 1 --precision fp32"
SMALLER = (
    (r"(--num_gpus|--nproc_per_node) 8", r"\1 2"),
    (r"((?:train|compare)\.py.*)", rf"\1 {SMALL}"),
    (r"--save-every 60", "--save-every 2"),
    (r"--stop-at 120", "--stop-at 2"),
)
"""What makes a run short: the later option of two counts."""
TRAINED = {"checkpoints": "Muon", "migrating-from-adamw": "AdamW", "migrating-from-stock-muon": "stock"}
"""The optimizer of `checkpoints/global_step1000`, by page."""


def commands(page: Path) -> list[str]:
    """The lines of a page's bash blocks, joined where they continue, without comments."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [text for line in lines if (text := re.sub(r"(^|\s+)#.*", "", line).strip())]


def titled(page: Path) -> dict[str, str]:
    """The files that a page shows: the code blocks with a title, by their names."""
    return dict(re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', page.read_text(), re.M | re.S))


HERE = {page: [text for text in commands(page) if not re.search("|".join(ELSEWHERE), text)] for page in GUIDES}


def shell(command: str, folder: Path) -> str:
    """The output of a command in the folder, with the environment of these tests first on the path."""
    command = re.sub(r"\bdeepspeed --num_gpus", f"deepspeed --master_port {free_port()} --num_gpus", command)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = {"cwd": folder, "env": os.environ | env | {"PATH": path}, "timeout": 600}
    done = subprocess.run(
        ["bash", "-ec", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
    return done.stdout


def smaller(command: str) -> str:
    for pattern, text in SMALLER:
        command = re.sub(pattern, text, command)
    return command


def train_for(optimizer: str, folder: Path) -> None:
    """Make what pages call checkpoints/global_step1000, by AdamW, ours or stock's Muon."""
    name = "adamw" if optimizer == "AdamW" else "muon"
    env = "DS_MUON_AUTOLOAD=0 " if optimizer == "stock" else ""
    line = f"deepspeed --num_gpus 2 train.py --deepspeed_config ds_config_{name}.json --save-every 4 --out checkpoints"
    shell(env + smaller(line), folder)
    (folder / "checkpoints" / "global_step4").rename(folder / "checkpoints" / "global_step1000")
    (folder / "checkpoints" / "latest").write_text("global_step1000")


def prepare(page: Path, folder: Path) -> None:
    """The folder in which a reader would be: the example's, or for pages of the site one with what they name."""
    example = page.parent if page.parent.parent == EXAMPLES else EXAMPLES / "pretrain_gpt"
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    if page.is_relative_to(DOCS):
        for model in ("llama_1b.json", "llama_8b.json"):
            shutil.copy(EXAMPLES / "plan" / model, folder)
        for name in ("ds_config", "ours", "stock"):
            config = json.loads((folder / "ds_config_muon.json").read_text())
            config["optimizer"]["params"].pop("lr")
            config["optimizer"]["params"] |= {"muon_lr": 0.02, "adam_lr": 0.001}
            (folder / f"{name}.json").write_text(json.dumps(config))
        (folder / "model.py").write_text(
            (folder / "model.py").read_text() + "\n\ndef make_model():\n    return GPT(GPTConfig())\n"
        )
        for name, text in titled(page).items():
            (folder / name).write_text(text)
    if page.stem in TRAINED and page.is_relative_to(DOCS):
        train_for(TRAINED[page.stem], folder)


@pytest.mark.full
@pytest.mark.time_limit(1500)
@pytest.mark.parametrize("page", [page for page in GUIDES if HERE[page]], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_run_as_written(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    prepare(page, folder)
    for command in HERE[page]:
        output = shell(smaller(command), folder)
        assert output or ">" in command, f"{command} says nothing"


def json_blocks(page: Path) -> list[str]:
    return re.findall(r"^ *```json.*?\n(.*?)^ *```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize(
    "page", [page for page in GUIDES if json_blocks(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_json_is_a_config_that_is_accepted(page: Path) -> None:
    """A section of Muon, or its params alone, such as a preset's; a framework fills in "auto"."""
    for config in map(json.loads, json_blocks(page)):
        section = config.get("optimizer", {"type": "Muon", "params": {}})
        is_params = set(config) <= set(MuonConfig.model_fields)
        assert section["type"] == "Muon"
        parse({key: value for key, value in (config if is_params else section["params"]).items() if value != "auto"})


@pytest.mark.full
def test_shares_of_a_step_are_those_that_plan_prints(capsys: pytest.CaptureFixture) -> None:
    """In the section on costs, and in the excerpt at the top of the page."""
    pattern = r"ds_muon plan --config ds_config.json --model (\S+) --world-size (\d+)\n```\n.*?```\n(.*?)\n```\n"
    examples = re.findall(pattern, read("plan.md"), re.S)
    assert [(model, ranks) for model, ranks, _ in examples] == [
        ("llama_8b.json", "1024"),
        ("llama_1b.json", "8"),
        ("llama_8b.json", "64"),
    ]
    for model, ranks, text in examples:
        folder = EXAMPLES / "plan"
        flags = ["--config", str(folder / "ds_config.json"), "--model", str(folder / model), "--world-size", ranks]
        assert main.main(["plan", *flags]) == 0
        printed = re.findall(r"^(?:tokens per rank|Muon's share of a step  ).*$", capsys.readouterr().out, re.M)
        assert len(printed) == 2 and "\n".join(printed) in text
