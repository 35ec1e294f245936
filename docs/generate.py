# SPDX-License-Identifier: Apache-2.0
"""Write the pages that follow from the code: configuration and wrong configurations.

Usage: python docs/generate.py
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from deepspeed.muon.config.messages import ELSEWHERE, allowed
from deepspeed.muon.config.schema import GROUP_KEYS, PRESETS, STOCK_TUNING_KEYS, MuonConfig
from deepspeed.muon.math.rules import SCALES, update_rms

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests" / "unit" / "ops" / "muon"

CONFIGURATION = """# Configuration

Generated from `deepspeed/muon/config/` by `python docs/generate.py`.

```json
{{"optimizer": {{"type": "Muon", "params": {{"lr": 1e-3, "weight_decay": 0.1}}}}}}
```

Every key of `optimizer.params` is optional, and `null` means the default. Unknown keys raise an error that suggests the
closest valid key. The *Muon half* of the optimizer updates hidden matrices, the *AdamW half* everything else. *Stock*
means DeepSpeed without this package; its keys and defaults keep working.

## Keys

{keys}

- Patterns are regular expressions, searched anywhere in a parameter's name. One that matches nothing is an error.
- With [a, b, c], a Newton-Schulz step takes a singular value s to a s + b s^3 + c s^5.
- Numbers may be strings such as `"1e-5"`, as YAML reads them.
- Keys of AdamW that change no result, such as `fused`, `foreach` and `amsgrad: false`, are accepted.

## The scale of an update

`adjust_lr_fn` multiplies the orthogonalized matrix by a number that depends on its shape. **A learning rate means
nothing without it.** With `auto`, the first line that applies decides:

| the section has | scale | because |
|---|---|---|
| `rms_scale` | `match_rms_adamw` | only this scale uses the key |
| {tuning} | `original` | we assume your learning rate was tuned for stock's Muon |
| no learning rate | `original` | stock's defaults act |
| `lr` and `momentum` | an error | `lr` may be AdamW's or stock's, so write `adjust_lr_fn` |
| `lr` | `match_rms_adamw` | an update is as large as AdamW's, so its learning rate fits |

Presets set `adjust_lr_fn` themselves. The start log names the scale and the reason. **`muon_lr` with `rms_scale`**
needs a rate of AdamW's size: stock's 0.02 would make the update of a 1024 x 1024 matrix 6.4 times as large as with
`original`.

| value | formula | RMS per unit of lr, 1024 x 1024 | 4096 x 1024 | 1024 x 4096 |
|---|---|---|---|---|
{scales}

Megatron's `spectral` is `match_rms_adamw` with `rms_scale` set to its `muon_extra_scale_factor`.

## Presets

```json
{{"optimizer": {{"type": "Muon", "params": {{"preset": "kimi_k2"}}}}}}
```

A preset holds the values of a published pre-training run of a large model; its rate suits large batches. Your keys
override it, `lr` and `weight_decay` in both halves, and `null` gives a key its own default.

What the recipes do with the routers of experts:

{routers}

{presets}

## Which parameters go to Muon

The first rule that applies decides:

1. `param.use_muon`, if you set it before `deepspeed.initialize`
2. `muon_exclude`
3. `muon_include`
4. Hidden matrices, that is 2-D weights of linear layers, go to Muon. Embeddings, output heads, routers, norms, biases,
   convolutions and LoRA factors go to AdamW.

`ds_muon plan` prints every route with its reason. A model in which rule 4 finds no matrix is refused. If your own
patterns or tags leave none, everything trains with AdamW, and a warning says so.

**Output heads** are what `get_output_embeddings` or timm's `get_classifier` returns, and layers with as many outputs as
the config has labels or tokens; then the place in the model counts, and names come last. If only the place tells, the
start log names the layer. `muon_include` sends it to Muon.

**LoRA factors** of several experts (PEFT's `target_parameters`) or of a fused projection (loralib, LitGPT) are one
matrix each. If the layout is unknown, the weight stays one matrix, and the log says so.

## Parameter groups

Groups that the script passes keep their own settings, in both halves. A group may set
{group_keys}. Its `lr` overrides the config's `muon_lr` and `adam_lr`, and its `weight_decay` both decays. Keys of the
script's own, such as `lr_scale`, change nothing; misspelt keys are refused. The halves are named `muon` and `adam`,
with several groups `group0-muon` and so on, or after the group's `name`.

## Learning-rate schedules

A schedule changes both halves in proportion, so the ratio of `muon_lr` to `adam_lr` stays.

- **In the config**: a number such as `warmup_max_lr` describes `lr`; without `lr` it describes `muon_lr`, and without
  either the rate of the script's first group that has one. A list has one value per group, or one per half.
- **A callable passed as `lr_scheduler`**, as Hugging Face's Trainer does: numbers such as `eta_min` describe `lr`. A
  list of lambdas has one per group of the script.
- **In plain PyTorch**: write `Schedule(optimizer.given, ...)` if the schedule has absolute numbers.
- **On resume** the rates come from the checkpoint, the ratio from the config.
- **Cycles of the momentum** (`OneCycle`, `CyclicLR`) move the first of AdamW's `betas`; Muon's `momentum` stays.
"""

#: Topic -> the keys of its table, in the order of the page.
TOPICS = {
    "Learning rates": "lr muon_lr adam_lr adjust_lr_fn rms_scale",
    "Weight decay": "weight_decay muon_weight_decay adam_weight_decay muon_weight_decay_steps cautious_weight_decay",
    "Momentum": "momentum nesterov momentum_start momentum_warmup_steps momentum_dtype import_momentum",
    "Variants": "preset normuon normuon_beta2 muon_eq muon_plus qk_clip",
    "Routing": "muon_include muon_exclude muon_lora muon_conv muon_fused muon_split per_head_muon tp_mode",
    "Newton-Schulz": "ns_steps ns_coefficients ns_method ns_dtype kernels",
    "Communication and records": "wire_dtype bucket_bytes monitor_interval",
    "AdamW half": "betas eps bias_correction adam_w_mode fp32_optimizer_states torch_adam",
}
KEYS = "### {topic}\n\n| key | default | meaning |\n|---|---|---|\n{rows}"
PRESET = """### `{name}`

Source: {source}.{left_out}{base}

```json
{values}
```"""

WRONG_CONFIGURATIONS = """# Wrong configurations

Wrong configurations and what each of them gets from `deepspeed.initialize`, before anything is allocated. Generated by
`python docs/generate.py`, and compared with the code by `tests/unit/ops/muon/zero/test_refusals.py`.

{table}

## Names from other optimizers, and removed keys

Each of these keys raises an error that says what to write instead.

| key | message |
|---|---|
{elsewhere}
"""


def rows(lines: list[tuple[str, ...]]) -> str:
    """Lines of a Markdown table."""
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def default(value: object) -> str:
    """A default as it would stand in a ds_config."""
    return "" if value is None else f"`{json.dumps(value)}`"


def meaning(field: FieldInfo) -> str:
    """What a key means, with its values if they are words; errors name the allowed numbers."""
    words = field.annotation if get_origin(field.annotation) is Literal else None
    choices = f". Values: {allowed(field)}" if words and len(get_args(words)) > 1 else ""
    return f"{field.description}{choices}"


def configuration() -> str:
    """The text of docs/configuration.md."""
    fields = MuonConfig.model_fields
    topics = {topic: keys.split() for topic, keys in TOPICS.items()}
    assert sorted(key for keys in topics.values() for key in keys) == sorted(fields), "every key has one topic"
    tables = [
        KEYS.format(
            topic=topic,
            rows=rows([(f"`{key}`", default(fields[key].default), meaning(fields[key])) for key in keys]),
        )
        for topic, keys in topics.items()
    ]
    shapes = ((1024, 1024), (4096, 1024), (1024, 4096))
    scales = [
        (f"`{name}`", f"`{formula}`", *(f"{update_rms(name, *shape):.3g}" for shape in shapes))
        for name, (formula, _) in SCALES.items()
    ]
    first = next(iter(PRESETS.values())).settings
    presets = []
    for name, preset in PRESETS.items():
        differences = {
            key: preset.settings.get(key)
            for key in first | preset.settings
            if preset.settings.get(key) != first.get(key)
        }
        is_variant = 0 < len(differences) < len(first)
        presets.append(
            PRESET.format(
                name=name,
                source=preset.source,
                left_out=f" {preset.left_out}." if preset.left_out else "",
                base=f" As `{next(iter(PRESETS))}`, except:" if is_variant else "",
                values=_json(differences if is_variant else preset.settings),
            )
        )
    routers = defaultdict[str, list[str]](list)
    for name, preset in PRESETS.items():
        routers[preset.routers].append(f"`{name}`")
    return CONFIGURATION.format(
        keys="\n\n".join(tables),
        presets="\n\n".join(presets),
        routers="\n".join(f"- {', '.join(names)}: {what}." for what, names in routers.items()),
        scales=rows(scales),
        group_keys=", ".join(f"`{key}`" for key in GROUP_KEYS),
        tuning=" or ".join(f"`{key}`" for key in STOCK_TUNING_KEYS),
    )


def _json(values: dict[str, object]) -> str:
    """A JSON object on lines of at most 100 characters."""
    lines, parts = [""], [f'"{key}": {json.dumps(value)}' for key, value in values.items()]
    for part in parts:
        if len(lines[-1]) + len(part) > 96:
            lines.append("")
        lines[-1] += part + ("," if part is not parts[-1] else "") + " "
    return "{" + "\n ".join(line.rstrip() for line in lines) + "}"


def wrong_configurations() -> str:
    """The text of docs/reference/wrong-configurations.md, from a process that tries every case."""
    sys.path.insert(0, str(TESTS))
    from helpers.distributed import run, shutdown
    from helpers.wrong_configs import attempt_all, table

    text = table(run(attempt_all, 1)[0])
    shutdown()
    elsewhere = rows([(f"`{key}`", message) for key, message in ELSEWHERE.items()])
    return WRONG_CONFIGURATIONS.format(table=text, elsewhere=elsewhere)


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(configuration())
    (DOCS / "reference" / "wrong-configurations.md").write_text(wrong_configurations())
