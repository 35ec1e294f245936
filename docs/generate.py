# SPDX-License-Identifier: Apache-2.0
"""Write the pages that follow from the code: configuration, wrong configurations, changed models.

Usage: python docs/generate.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from deepspeed.muon.config.messages import ELSEWHERE, allowed
from deepspeed.muon.config.presets import PRESETS
from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.config.types import GROUP_KEYS, HARMLESS, STOCK_TUNING_KEYS
from deepspeed.muon.math.coefficients import NAMED
from deepspeed.muon.math.rules import SCALES, update_rms

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests" / "unit" / "ops" / "muon"

CONFIGURATION = """# Configuration

Generated from `deepspeed/muon/config/` by `python docs/generate.py`.

```json
{{"optimizer": {{"type": "Muon", "params": {{"lr": 1e-3, "weight_decay": 0.1}}}}}}
```

Every key of `optimizer.params` is optional. `null` means the default. Unknown keys raise an error that suggests the
closest valid key ([wrong configurations](reference/wrong-configurations.md)). Stock DeepSpeed's keys and defaults keep
working; *stock* means DeepSpeed without this package. The optimizer has two halves: the *Muon half* updates hidden
matrices, the *AdamW half* everything else ([which parameters](#which-parameters-go-to-muon)).

A number may be a string in plain decimals, as YAML reads `1e-5`; `"1e_5"`, `"1e-5 "` and `"inf"` are refused, and so is
anything but `true` and `false` for a flag ([why](decisions/0013-settings-and-errors.md)). dtypes may be written
`bfloat16`, `float16` and `float32` too. Keys of AdamW without effect on its results are accepted: {harmless}.

| key | default | allowed | unit | what it is | source |
|---|---|---|---|---|---|
{keys}

## Presets

A preset fills in the keys that the section leaves out. A key in the section overrides the preset's; `null` gives the
key's own default, and `"auto"`, where Hugging Face fills it in, the value of its arguments. `lr` and `weight_decay`
override those of both halves. The log prints what a preset has set.

```json
{{"optimizer": {{"type": "Muon", "params": {{"preset": "kimi_k2"}}}}}}
```

| preset | sets | source | routers of experts | other differences |
|---|---|---|---|---|
{presets}

These are values of pre-training runs of large models; their rates suit large batches.

## The scale of an update

`adjust_lr_fn` multiplies the orthogonalized matrix by a number that depends on its shape. `auto` means:

- `match_rms_adamw` for a section with `lr`: an update is as large as AdamW's, so AdamW's learning rate fits.
- `original` for a section with {tuning}, keys that only stock's Muon has, and for one without any learning rate, where
  stock's defaults act. `original` means that we assume your learning rate was tuned for stock DeepSpeed's Muon.
- `match_rms_adamw` for a section with `rms_scale`, which only this scale uses.

A section with `lr` and `momentum` alone could be either, so it raises an error that asks for `adjust_lr_fn`. Write
`"original"` if the section was written for stock's Muon or `lr` was tuned for it, and `"match_rms_adamw"` if `lr` comes
from AdamW. No other key decides. The first line of the log names the scale and the reason.

| value | formula | RMS per unit of lr, 1024 x 1024 | 4096 x 1024 | 1024 x 4096 |
|---|---|---|---|---|
{scales}

Megatron's `spectral` is `match_rms_adamw` with `rms_scale` set to its `muon_extra_scale_factor`.

## Newton-Schulz coefficients

One step takes a singular value s to a s + b s^3 + c s^5.

| name | steps | triples (a, b, c) |
|---|---|---|
{schedules}

## Parameter groups

A group that the script passes keeps its own settings, in both of its halves:
{group_keys}. A group's `lr` replaces the config's `muon_lr` and `adam_lr` as well, its `weight_decay` both decays; to
set one half of a group, write `muon_lr` or `adam_lr` into it. The halves are named `muon` and `adam`; with several
groups `group0-muon`, `group0-adam` and so on, or after the group's `name`. Those of experts that only some ranks have
bear the name of their process group.

Other keys of a group, such as `lr_scale` or `layer_id` of layer-wise decay, are the script's own: they change nothing
and stay in both halves, as in torch's AdamW. Misspelt keys, the keys in the last table of this page, and keys that only
`optimizer.params` may set raise an error.

## Which parameters go to Muon

In this order: `param.use_muon`, set before `deepspeed.initialize`; `muon_exclude`; `muon_include`; then the rules.
Hidden matrices, that is 2-D weights of linear layers, go to Muon; embeddings, output heads, routers, norms, biases,
convolutions and LoRA factors go to AdamW. Patterns are regular expressions, searched anywhere in a parameter's name;
one that matches nothing is an error. A model in which the rules find no matrix for Muon is an error too; one in which
your patterns or tags leave none, as `"muon_exclude": ".*"` does, trains with AdamW and logs a warning. `ds_muon plan`
prints every parameter's route and reason. Afterwards every parameter carries `param.use_muon` as routed; the next
optimizer takes only the tags that you have set.

**Output heads** are found by what the model says first: the layer that `get_output_embeddings` or timm's
`get_classifier` returns, and layers with as many outputs as the config has labels or tokens. Next comes the place of a
layer. In a model of transformers, the heads lie outside of the base model. In other models, a head lies outside of
repeated blocks, and no other layer takes its outputs. Names such as `lm_head` or `classifier` come last. If only the
place tells, one line of the start log and of `ds_muon plan` names the layers and the key that decides:

```
output heads or not, only their place tells: AdamW updates fc.weight (muon_include sends them to Muon)
```

**LoRA factors** are known by their names and by the other factor of the pair, so a square factor is one, too. PEFT
packs the factors of all experts into one weight (`target_parameters`), loralib and LitGPT those of a fused projection;
with `muon_lora`, each factor is a matrix of its own. Where the layout is unknown, the weight stays one matrix, and the
start log says so.

## Learning-rate schedules

A schedule changes both halves in proportion: the ratio of `muon_lr` to `adam_lr` stays what it was at start.

- DeepSpeed's schedules from the config (`WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle`, `LRRangeTest`): a
  number such as `warmup_max_lr` describes `lr` if the section sets it, otherwise `muon_lr`, or, in a section without
  any rate, that of the script's first group with one; every group gets it in proportion to its own. A list has one
  value per group of the script, or one per half, as for stock's Muon.
- A callable passed as `lr_scheduler`, which is what Hugging Face's Trainer does, gets the script's own groups:
  absolute numbers such as `eta_min` and `max_lr` describe `lr`, and a list of lambdas has one per group of the script.
- In plain PyTorch write `Schedule(optimizer.given, ...)` instead of `Schedule(optimizer, ...)` for schedules with
  absolute numbers.
- On resume the rates come from the checkpoint, the ratio from the config.
- A cycle of the momentum (`OneCycle`, `OneCycleLR`, `CyclicLR`) moves the first of AdamW's `betas`; Muon's `momentum`
  [stays as it is](decisions/0010-schedules-and-learning-rates.md).

## Names from other optimizers, and removed keys

Each of these keys raises an error that says what to write instead.

| key | message |
|---|---|
{refused}
"""

WRONG_CONFIGURATIONS = """# Wrong configurations

Wrong configurations and what each of them gets from `deepspeed.initialize`, before anything is allocated. Generated by
`python docs/generate.py`, and compared with the code by `tests/unit/ops/muon/zero/test_refusals.py`.

{table}
"""


def rows(lines: list[tuple[str, ...]]) -> str:
    """Lines of a Markdown table."""
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def default(value: object) -> str:
    """A default as it would stand in a ds_config."""
    return "" if value is None else f"`{json.dumps(value)}`"


CHANGED_MODELS = """# Changed models

What becomes of a run on two ranks whose model, parameter groups, stage, ranks, precision or optimizer change: with this
Muon and `"checkpoint": {{"muon_changed_model": "match"}}` ([how](../checkpoints.md#a-changed-model)), and with
DeepSpeed's AdamW and its ordinary load. `python docs/generate.py` generates this page, and
`checkpoint/test_changed_model.py` compares it with the code.

## Across a save

*Continues*: after the load, weights and states of all parameters that both runs have are those of the save, bit for
bit. With Muon, the steps that follow are those of a reference in one process that carries states by name, in float64.
An error is raised by the load.

{changes}

- *Another stage* is the next one, and 0 after 3. *From AdamW* is a checkpoint of DeepSpeed's AdamW; in the row of AdamW
  it loads one of this Muon.
- At stage 0, checkpoints of DeepSpeed's AdamW have no names of parameters, so their states cannot be matched. The error
  says so.
- *Two layers swapped*: the parameters of two equal layers change places in `model_parameters`. AdamW then trains each
  with the state of the other, and at stages 1 to 3 with its weights.

## In mid-run

`requires_grad` is switched off and on between the steps of one run, or forward passes leave a layer out. Each cell says
what the parameter does meanwhile. Afterwards it trains with the state that it had.

{events}

- With Muon, a matrix without a gradient and its momentum stay constant at every stage, as a parameter without `grad`
  does in torch ([decision 5](../decisions/0005-one-answer-of-all-ranks.md)).
- Parameters that Muon leaves to AdamW are updated as by DeepSpeed's AdamW: at stages 1 to 3 ZeRO passes gradients of
  zeros, so moments and weight decay still act. At stage 3 DeepSpeed's AdamW trains a layer that is left out on its
  last gradient; this Muon does not, in either half. To keep such a parameter constant, set the `lr` of its group to 0,
  or save, freeze it and load by names into a new engine.
- *Never trained*: ZeRO's partitions lack what is frozen when the engine is built. AdamW trains it at stage 0, Muon does
  not; it warns, and names the parameters. Save and load by names, as in the row *unfrozen*.
"""


def configuration() -> str:
    """The text of docs/configuration.md."""
    keys = [
        (f"`{key}`", default(field.default), allowed(field), extra["unit"], field.description or "", extra["source"])
        for key, field in MuonConfig.model_fields.items()
        for extra in (field.json_schema_extra,)
    ]
    shapes = ((1024, 1024), (4096, 1024), (1024, 4096))
    scales = [
        (f"`{name}`", f"`{formula}`", *(f"{update_rms(name, *shape):.3g}" for shape in shapes))
        for name, (formula, _) in SCALES.items()
    ]
    schedules = [
        (f"`{name}`", "any, 5 by default" if len(triples) == 1 else str(len(triples)), _triples(triples))
        for name, triples in NAMED.items()
    ]
    presets = [
        (
            f"`{name}`",
            "<br>".join(f"`{key}`: {json.dumps(value)}" for key, value in preset.values.items()),
            preset.source,
            preset.routers,
            preset.left_out,
        )
        for name, preset in PRESETS.items()
    ]
    return CONFIGURATION.format(
        keys=rows(keys),
        harmless=", ".join(
            f"`{key}`" if len(values) > 1 else f"`{key}: {json.dumps(*values)}`" for key, values in HARMLESS.items()
        ),
        presets=rows(presets),
        scales=rows(scales),
        schedules=rows(schedules),
        group_keys=", ".join(f"`{key}`" for key in GROUP_KEYS),
        tuning=" or ".join(f"`{key}`" for key in STOCK_TUNING_KEYS),
        refused=rows([(f"`{key}`", text) for key, text in ELSEWHERE.items()]),
    )


def _triples(triples: tuple[tuple[float, float, float], ...]) -> str:
    runs = [(", ".join(f"{value:.6g}" for value in triple), len(list(run))) for triple, run in groupby(triples)]
    return "<br>".join(text + f" ({count} times)" * (count > 1) for text, count in runs)


def wrong_configurations() -> str:
    """The text of docs/reference/wrong-configurations.md, from a process that tries every case."""
    sys.path.insert(0, str(TESTS))
    from helpers.distributed import run, shutdown
    from helpers.wrong_configs import attempt_all, table

    text = table(run(attempt_all, 1)[0])
    shutdown()
    return WRONG_CONFIGURATIONS.format(table=text)


def changed_models() -> str:
    """The text of docs/evidence/changed-models.md, from runs of every change with both optimizers; takes minutes."""
    sys.path.insert(0, str(TESTS))
    from helpers.changed_models import tables
    from helpers.distributed import shutdown

    with tempfile.TemporaryDirectory() as folder:
        changes, events = tables(Path(folder))
    shutdown()
    return CHANGED_MODELS.format(changes=changes, events=events)


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(configuration())
    (DOCS / "reference" / "wrong-configurations.md").write_text(wrong_configurations())
    (DOCS / "evidence" / "changed-models.md").write_text(changed_models())
