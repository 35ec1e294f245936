# SPDX-License-Identifier: Apache-2.0
"""The documentation against the code: names of tests, refusals, messages, the generated page, and the site itself."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.muon.zero.refusals import MOMENTUM_DTYPE, RULES, _engine_problems, _pipeline_problems
from helpers.distributed import run
from helpers.models import MODELS, initialize_, train_engine
from helpers.parity import CELLS
from helpers.paths import DOCS, PACKAGE, ROOT, TESTS
from helpers.training import ds_config, fp32_weights, make_engine

PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = ("configuration.md", "reference/errors.md", "evidence/damaged-checkpoints.md")
#: Functions whose strings are messages, though they are raised elsewhere.
WRITERS = {
    "_silence",
    "differences",
    "_target",
    "damages",
    "_damage",
    "routing_difference",
    "_shape_differences",
    "_misfits",
    "_refusal",
}
WRITERS |= {f"_{about}_problems" for about in ("path", "library", "optimizer", "param", "lock", "engine", "pipeline")}
WRITERS |= {"_problem", "_layout_problem", "_unmatched", "check_options", "empty_muon_half"}
#: So many words of a message must stand in the page, in its own order.
WORDS = 8


def read(name: str) -> str:
    return (DOCS / name).read_text()


def page_id(path: Path) -> str:
    return str(path.relative_to(DOCS))


# ---- names of tests -----------------------------------------------------------------------------------------


def cases_of(file: Path) -> set[str]:
    """Names of the tests of a file."""
    named = [name for node in ast.parse(file.read_text()).body for name in names_of(node)]
    return {name for name in named if name.startswith("test_")}


def names_of(node: ast.AST) -> list[str]:
    """What a statement at the top of a file defines."""
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef) else []


def missing_tests(text: str) -> list[str]:
    """The tests that a text names and that do not exist."""
    files = {path.name: path for path in TESTS.rglob("test_*.py")}
    named = set(re.findall(r"(test_\w+\.py)::(\w+)", text))
    found = {file: cases_of(files[file]) if file in files else set() for file, _ in named}
    missing = {f"{file}::{name}" for file, name in named if name not in found[file]}
    return sorted(missing | {file for file in re.findall(r"\btest_\w+\.py", text) if file not in files})


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_named_test_exists(path: Path) -> None:
    assert missing_tests(path.read_text()) == []


def test_a_test_that_does_not_exist_is_noticed() -> None:
    text = "`test_docs.py::test_messages_are_found`, `test_docs.py::test_nothing`, `test_none.py::test_it`, test_no.py"
    assert missing_tests(text) == ["test_docs.py::test_nothing", "test_no.py", "test_none.py", "test_none.py::test_it"]


def test_the_matrix_names_tests() -> None:
    assert len(re.findall(r"test_\w+\.py::test_\w+", read("evidence/support.md"))) >= 30


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


class EverythingIsWrong:
    """An engine to which every refusal applies."""

    pipeline_parallelism, has_moe_layers, moe_layers = False, True, True
    sequence_parallel_size = mp_world_size = 2
    seq_dp_world_size, world_size = 1, 4

    def __init__(self, autotp_size: int) -> None:
        self.torch_autocast_enabled, self.torch_autocast_dtype = lambda: True, lambda: torch.float16
        self.zero_optimization = lambda: False
        self.autotp_size, self.load_universal_checkpoint = lambda: autotp_size, lambda: True
        facts = {"rank": int, "world_size": lambda: 2}
        self.mpu = SimpleNamespace(**{f"get_tensor_model_parallel_{key}": fact for key, fact in facts.items()})


class WrongPipeline:
    """A pipeline to which every refusal applies, but for the stage of ZeRO, which can be one only."""

    def __init__(self, stage: int) -> None:
        self.zero_optimization_stage = lambda: stage
        self.bfloat16_enabled = bool
        self.module = SimpleNamespace(phase_bounds=[])


def test_every_refusal_is_in_the_support_matrix() -> None:
    engines = list(dict.fromkeys(text for size in (1, 2) for text in _engine_problems(EverythingIsWrong(size))))
    pipelines = list(dict.fromkeys(text for stage in (0, 2) for text in _pipeline_problems(WrongPipeline(stage))))
    for name, problems in {"_engine_problems": engines, "_pipeline_problems": pipelines}.items():
        texts = strings_in(function(PACKAGE / "zero" / "refusals.py", name))
        assert len(problems) == len([text for text in texts if "_" not in text.split()[0]])
    refusals = [line for line in read("evidence/support.md").splitlines() if "refused" in line]
    refused = [f"`{key}`" for key in (*(rule[0] for rule in RULES), MOMENTUM_DTYPE)]
    refused += [re.split("[,;]", problem)[0] for problem in engines + pipelines]
    assert [key for key in refused if not any(key in line for line in refusals)] == []


# ---- messages -----------------------------------------------------------------------------------------------


def function(path: Path, name: str) -> ast.FunctionDef:
    nodes = ast.walk(ast.parse(path.read_text()))
    return next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)


def strings_in(node: ast.AST) -> list[str]:
    """The longest constant part of every string below a node, docstrings left out, with at least two words."""
    docstring = ast.get_docstring(node, clean=False) if isinstance(node, ast.FunctionDef) else None
    found: list[str] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            found.append(max((part.value for part in child.values if isinstance(part, ast.Constant)), key=len))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value != docstring:
            found.append(max(re.split(r"%[sd.\df]+", child.value), key=len))
        elif not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            found += strings_in(child)
    return [text for text in found if len(words_of(text)) >= 2]


def words_of(text: str) -> list[str]:
    return re.findall(r"[\w.'/=-]+", re.sub(r"[`*]|\\(?=\|)", "", text.lower()))


def says(node: ast.AST) -> bool:
    """Whether a node raises an error or logs a warning or an error."""
    if isinstance(node, ast.FunctionDef):
        return node.name in WRITERS
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_log = isinstance(node.func.value, ast.Name) and node.func.value.id == "logger"
        return is_log and node.func.attr in ("warning", "error", "exception", "critical")
    return isinstance(node, ast.Raise) and node.exc is not None


def messages(source: str) -> Iterator[str]:
    """Beginnings of the messages of a module, and names of the errors that it raises."""
    for node in ast.walk(ast.parse(source)):
        if says(node):
            yield from (" ".join(words_of(text)[:WORDS]) for text in strings_in(node))
            kind = ast.unparse(node.exc.func) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else ""
            yield from [kind.lower()] * (kind.endswith("Error") and "." not in kind)


SOURCES = [ROOT / "deepspeed_muon.py", *sorted(PACKAGE.rglob("*.py"))]
ALL = [(str(path.relative_to(ROOT)), text) for path in SOURCES for text in dict.fromkeys(messages(path.read_text()))]


def explained(message: str) -> bool:
    """Whether a table of the page has the message, or the name of the error."""
    rows = [" ".join(words_of(line)) for line in read("reference/messages.md").splitlines() if line.startswith("|")]
    return any(f" {message} " in f" {row} " for row in rows)


@pytest.mark.parametrize(("module", "message"), ALL, ids=lambda value: value)
def test_every_message_is_explained(module: str, message: str) -> None:
    assert explained(message), f"docs/reference/messages.md has no row for a message of {module}"


def test_messages_are_found() -> None:
    assert len(ALL) > 40
    new = 'logger.warning("a new %s kind of trouble with it", x)\nraise KeyError(f"this {x} is news to you")'
    assert set(messages(new)) == {"kind of trouble with it", "is news to you", "keyerror"}
    assert not any(explained(message) for message in messages(new))


# ---- the generated page -------------------------------------------------------------------------------------


def script(path: Path) -> Any:
    """A script as a module."""
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_up_to_date() -> None:
    assert read("configuration.md") == script(DOCS / "generate.py").configuration(), "run python docs/generate.py"


def test_the_page_of_versions_has_a_line_for_every_row() -> None:
    versions = script(ROOT / "tools" / "versions.py")
    rows = {row.name: row for row in versions.rows()}
    page = read("evidence/versions.md")
    assert page == versions.page(versions.kept()), "run make versions"
    for name, line in versions.kept().items():
        pins = dict(pin.split("==") for pin in rows[name].pins if "==" in pin and "not run" not in line)
        assert all(f"| {pins[package]} |" in line for package in set(versions.PACKAGES) & set(pins)), line


# ---- style --------------------------------------------------------------------------------------------------

#: A path of one machine. `/path/to` and links of a site are none.
MACHINE = re.compile(r"(?<![\w.~])/(home|work|root|tmp|mnt|opt|usr|var|Users|private|data)/\w")


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_no_path_of_a_machine(path: Path) -> None:
    assert MACHINE.findall(path.read_text()) == []


def test_paths_of_machines_are_noticed() -> None:
    for folder in ("home", "root", "tmp", "Users"):
        path = f"/{folder}/me"
        for text in (path, f"see {path}", f"({path})", f"`{path}`"):
            assert MACHINE.search(text), text
        for text in (f"docs{path}", f"https://a.b{path}", f"..{path}", "and/or"):
            assert not MACHINE.search(text), text


@pytest.mark.parametrize("path", [path for path in PAGES if page_id(path) not in GENERATED], ids=page_id)
def test_lines_are_short(path: Path) -> None:
    """Except in tables and code."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


# ---- the recipe of migrating-from-adamw.md ------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "dtype": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
    *({"stage": stage, "dtype": dtype} for stage in (2, 3) for dtype in ("fp32", "bf16")),
    {"stage": 3, "offload": True},
]


def master_weights(engine: Any) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.zero_optimization_stage() == 0:
        return fp32_weights(engine)
    return {name: safe_get_full_fp32_param(p).cpu().clone() for name, p in engine.module.named_parameters()}


def start_from_adamw(case: dict[str, Any], folder: str) -> tuple[float, int, float]:
    """The largest difference of a weight from AdamW's, the step count, and how far a step of Muon moves one."""
    import deepspeed

    stock = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    engine = deepspeed.initialize(model=MODELS["mlp"](), config=ds_config(**case, optimizer=stock))[0]
    train_engine(engine, 2)
    engine.save_checkpoint(folder)
    saved = master_weights(engine)
    engine.destroy()
    net = MODELS["mlp"]()
    initialize_(net, 7)
    engine = make_engine(net, ds_config(**case))
    engine.load_checkpoint(folder, load_module_only=True, load_optimizer_states=False)
    steps, loaded = engine.global_steps, master_weights(engine)
    train_engine(engine, 1)
    after = master_weights(engine)
    engine.destroy()
    furthest = [max(float((b[n] - a[n]).abs().max()) for n in saved) for a, b in ((saved, loaded), (loaded, after))]
    return furthest[0], steps, furthest[1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_muon_starts_from_adamws_weights(case: dict[str, Any], tmp_path: Path) -> None:
    assert "load_checkpoint(folder, load_module_only=True, load_optimizer_states=False)" in read(
        "migrating-from-adamw.md"
    )
    for difference, steps, moved in run(start_from_adamw, 2, case=case, folder=str(tmp_path)):
        assert difference <= (0.01 if case.get("dtype") == "bf16" else 0.0)
        assert steps == 0 and 0 < moved < 0.05


# ---- the site -----------------------------------------------------------------------------------------------


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path / "site").with_suffix(".md") for path in (tmp_path / "site").rglob("*.html")}
    assert {path.relative_to(DOCS) for path in PAGES} <= pages
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?://(?!squidfunk)', page.read_text()), page.name
