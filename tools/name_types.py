# SPDX-License-Identifier: Apache-2.0
"""Count the annotated names of the package that carry three or more types, and list them: `python tools/name_types.py`.

A name is that of an argument, an attribute or a variable. A reader has to look up a name that stands for many things.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "deepspeed" / "muon"
#: A name with at least this many types counts.
MANY = 3
#: Containers that a reader does not tell apart -> one name for all of them.
SAME = {
    **dict.fromkeys(("Sequence", "Iterable", "Iterator", "Collection", "Set", "list", "set", "frozenset"), "many"),
    **dict.fromkeys(("Mapping", "MutableMapping"), "dict"),
    **{"torch.nn.Module": "nn.Module", "torch.optim.Optimizer": "Optimizer"},
}


def simple(annotation: str) -> str:
    """Return an annotation without ``None``, and with one name for containers that a reader does not tell apart."""
    text = re.sub(r"tuple\[(.*), \.\.\.\]", r"many[\1]", annotation.removesuffix(" | None"))
    return re.sub(r"[\w.]+", lambda word: SAME.get(word[0], word[0]), text)


def annotations(tree: ast.AST) -> list[tuple[str, str]]:
    """Return (name, annotation) of each annotated argument and variable."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            found.append((node.arg, ast.unparse(node.annotation)))
        elif isinstance(node, ast.AnnAssign):
            target = node.target.attr if isinstance(node.target, ast.Attribute) else ast.unparse(node.target)
            found.append((target, ast.unparse(node.annotation)))
    return found


def main() -> None:
    """Print the share of names with many types, and these names."""
    types = defaultdict[str, set[str]](set)
    for file in PACKAGE.rglob("*.py"):
        for name, annotation in annotations(ast.parse(file.read_text())):
            types[name.lstrip("_")].add(simple(annotation))
    many = {name: found for name, found in types.items() if len(found) >= MANY}
    for name, found in sorted(many.items(), key=lambda item: -len(item[1])):
        print(f"{name}: {', '.join(sorted(found))}")
    print(f"{len(many)} of {len(types)} names have {MANY} or more types: {len(many) / len(types):.1%}")


if __name__ == "__main__":
    main()
