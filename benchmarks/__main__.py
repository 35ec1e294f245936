# SPDX-License-Identifier: Apache-2.0
"""One command for every measurement: `python -m benchmarks NAME [options]`; without a name it lists them.

A benchmark is a function of the module named beside it; its parameters are the options, its docstring is the help.
"""

import argparse
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable

BENCHMARKS = {
    "step": ("step", "backward + step under ZeRO, also over a slow link: deepspeed-muon, stock's Muon, AdamW"),
    "single": ("optimizers", "the optimizers alone, on one process"),
    "ns": ("ns", "Newton-Schulz by method, dtype and shape: time and error, ours and others'"),
    "launches": ("launches", "kernel launches of a step for 8B and 70B models, counted without a GPU"),
    "loss": ("learning", "held-out loss against seconds, by optimizer or dtype of the momentum"),
    "exactness": ("exactness", "errors against oracles, stock and torch; writes docs/evidence/exactness.md"),
    "quality": ("quality", "orthogonality by schedule, dtype, method and spectrum; writes docs/evidence/quality.md"),
    "gpu": ("gpu", "everything on one GPU, in six calls of less than seven minutes"),
}


def parser_of(benchmark: Callable) -> argparse.ArgumentParser:
    """The command line of a benchmark: one option per parameter, with its default and its line of `Args:`."""
    about, _, rest = inspect.getdoc(benchmark).partition("\nArgs:\n")
    texts = {name: " ".join(text.split()) for name, text in re.findall(r"^    (\w+): ((?:.|\n {8})+)", rest, re.M)}
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {benchmark.__name__}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = typing.get_type_hints(benchmark, include_extras=True)
    for name, parameter in inspect.signature(benchmark).parameters.items():
        flag, hint, default = f"--{name.replace('_', '-')}", hints[name], parameter.default
        hint, choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint, None)
        if hint is bool:
            parser.add_argument(flag, action="store_true", help=texts[name])
            continue
        many = typing.get_origin(hint) is tuple
        kind = typing.get_args(hint)[0] if many else hint
        shown = (" ".join(map(str, default)) if many else default) or "none"
        help_text = f"{texts[name]} (default: {shown})".replace("%", "%%")
        options = {"choices": list(choices), "metavar": name.upper()} if choices else {}
        parser.add_argument(flag, type=kind, nargs="+" if many else None, default=default, help=help_text, **options)
    return parser


def main(name: str = "", *options: str) -> int:
    """Run one benchmark and print its report, or list all of them."""
    if name not in BENCHMARKS:
        print(f"{__doc__}\n" + "\n".join(f"  {known:10} {text}" for known, (_, text) in BENCHMARKS.items()))
        return 0 if name in ("", "-h", "--help") else 2
    benchmark = getattr(importlib.import_module(f"benchmarks.{BENCHMARKS[name][0]}"), name)
    print(benchmark(**vars(parser_of(benchmark).parse_args(options))))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
