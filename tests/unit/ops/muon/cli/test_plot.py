# SPDX-License-Identifier: Apache-2.0
"""ds_muon plot: panels for what a run has written, from CSV files and from events, and refusals that help."""

import csv
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from deepspeed.muon.cli.plot import draw
from deepspeed.muon.monitor.read_records import Records, read
from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.records import monitored
from helpers.rules import RULES
from helpers.training import make_engine

Command = Callable[..., Any]
PNG = b"\x89PNG\r\n"
LAYERS = [f"blocks.{layer}.{name}.weight" for layer in (0, 2, 10) for name in ("down", "up")]
PHASES = ("prepare", "exchange", "newton_schulz", "apply", "adamw", "step", "record")
PANELS = {
    "Training loss": ["Train_Samples_train_loss"],
    "Gradient norm, before clipping": ["Train_Muon_grad_norm"],
    "Learning rate": ["Train_Muon_lr_muon", "Train_Muon_lr_adamw"],
    "Size of the update, RMS": ["Train_Muon_update_rms_muon", "Train_Muon_update_rms_adamw"],
    "Update / weight in one step, RMS": [f"Train_Muon_update_to_weight_{name}" for name in LAYERS],
    "Share of weights that decay (cautious)": [f"Train_Muon_cautious_decay_{name}" for name in LAYERS],
    "Largest attention logit of each layer": [f"Train_Muon_max_logit_blocks.{layer}.attn" for layer in (0, 2, 10)],
    "Newton-Schulz: distance from orthogonal": [f"Train_Muon_orthogonality_error_{name}" for name in LAYERS],
    "Input of Newton-Schulz: effective rank": [f"Train_Muon_effective_rank_{name}" for name in LAYERS],
    "Time of the optimizer step on rank 0, and medians": [f"Train_Muon_{phase}_ms" for phase in PHASES],
}


def write(folder: Path, names: Iterable[str], samples: Iterable[int] = range(32, 352, 32)) -> Path:
    """Files as DeepSpeed writes them, with values between 0 and 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(names):
        with (folder / f"{name}.csv").open("a") as file:
            rows = csv.writer(file)
            rows.writerow(["step", name.rpartition("_")[2]])
            rows.writerows((at, (math.sin(index + at) + 1.1) / 2.2) for at in samples)
    return folder


def everything() -> list[str]:
    return [name for names in PANELS.values() for name in names]


def titles(written: Records) -> list[str]:
    return draw(written, Path("run"))[1]


def test_a_panel_for_each_measure(tmp_path: Path, ds_muon: Command) -> None:
    folder, other = write(tmp_path / "run", everything()), tmp_path / "other.png"
    facts = ds_muon("plot", folder, "--json").facts
    assert facts == {"file": str(folder / "muon.png"), "panels": [*PANELS], "records": 10}
    assert ds_muon("plot", folder, "--out", other).out == f"{other}: 10 panels from 10 records\n"
    assert all(file.read_bytes().startswith(PNG) for file in (folder / "muon.png", other))


def test_one_record_is_enough(tmp_path: Path) -> None:
    written = read(write(tmp_path, everything(), [48]))
    assert titles(written) == [*PANELS]
    figure, _ = draw(written, tmp_path)
    figure.savefig(tmp_path / "one.png")
    edges = [axes.collections[0].get_coordinates()[0, :, 0] for axes in figure.axes[4:6]]
    assert [list(of_map) for of_map in edges] == [[24, 72]] * 2, "heat maps have a width"


def test_layers_are_in_the_order_of_the_network_and_hundreds_have_a_name_each_layer(tmp_path: Path) -> None:
    figure, names = draw(read(write(tmp_path / "few", everything())), tmp_path)
    axes = next(one for one in figure.axes if one.get_title(loc="left") == names[4])
    assert [label.get_text() for label in axes.get_yticklabels()] == [name.removesuffix(".weight") for name in LAYERS]
    assert axes.yaxis_inverted()
    names = [f"Train_Muon_update_to_weight_layers.{i}.{part}.weight" for i in range(40) for part in "abcdef"]
    figure, _ = draw(read(write(tmp_path / "many", names, [32, 64])), tmp_path)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"layers.{i}" for i in range(40)]


def test_a_run_that_went_on_counts_what_it_has_redone_once(tmp_path: Path) -> None:
    """DeepSpeed writes the head of the table again."""
    for value, samples in ((1.0, (32, 64, 96)), (2.0, (64, 96, 128))):
        with (tmp_path / "Train_Muon_grad_norm.csv").open("a") as file:
            csv.writer(file).writerows([("step", "grad_norm"), *((at, value) for at in samples), (160, "nan")])
    assert read(tmp_path).values["grad_norm"] == {32: 1.0, 64: 2.0, 96: 2.0, 128: 2.0}


def train(folder: str, name: str) -> None:
    settings = monitored(folder, 1, RULES["cautious"][0] | {"qk_clip": {}}, stage=2)
    section = settings.pop("csv_monitor")
    engine = make_engine(MODELS["gpt"](), settings | {name: section})
    train_engine(engine, 3)
    engine.destroy()


def test_files_and_events_of_a_run_say_the_same(tmp_path: Path) -> None:
    found = []
    for name in ("csv_monitor", "tensorboard"):
        run(train, 2, folder=str(tmp_path / name), name=name)
        found.append(read(tmp_path / name / "run"))
    files, events = found
    assert titles(files) == titles(events) == [panel for panel in PANELS if panel != "Training loss"]
    assert files.layers.keys() == events.layers.keys()
    for measure, rows in files.layers.items():
        assert [*rows] == [*events.layers[measure]] != []
        for name, values in rows.items():
            assert values == pytest.approx(events.layers[measure][name])


# ---- refusals ---------------------------------------------------------------------------------------------------


NEAREST, NO_RECORDS = "is not a folder; did you mean {}?", "has no records of deepspeed-muon"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        *((f"logs/{asked}", NEAREST) for asked in ("smal", "smal/run", "small/csv")),
        ("log/small", NEAREST),
        ("logs", f"{NO_RECORDS}; did you mean"),
        ("logs/empty", "expected the folder that DeepSpeed's csv_monitor or tensorboard writes"),
        ("stock", NO_RECORDS),
    ],
)
def test_a_wrong_folder_names_the_nearest(asked: str, words: str, tmp_path: Path, ds_muon: Command) -> None:
    for run_folder in ("large", "small"):
        write(tmp_path / "logs" / run_folder, everything()[:2])
    (tmp_path / "logs" / "empty").mkdir()
    write(tmp_path / "stock", ["Train_Samples_lr"])
    ds_muon("plot", tmp_path / asked).must_refuse("plot", words.format(tmp_path / "logs" / "small"))
    file = tmp_path / "none" / "a.png"
    found = ds_muon("plot", tmp_path / "logs" / "small", "--out", file)
    found.must_refuse("plot", f"cannot write {file}: No such file or directory; choose another path with --out")


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("matplotlib", 'pip install "deepspeed-muon[plot]"'),
        ("tensorboard", "tensorboard is not installed; install it, or enable csv_monitor in the DeepSpeed config"),
    ],
)
def test_a_library_that_is_missing(
    library: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ds_muon: Command
) -> None:
    for name in {library, *(name for name in sys.modules if name.startswith(f"{library}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "events.out.tfevents.1.host").touch()
    if library == "matplotlib":
        write(tmp_path, everything()[:2])
    ds_muon("plot", tmp_path).must_refuse("plot", words)
