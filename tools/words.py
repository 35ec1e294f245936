# SPDX-License-Identifier: Apache-2.0
"""Refuse words that readers of this project did not understand, in the package, the documentation and README.md.

``python tools/words.py`` prints ``file:line: words -> what to write instead`` for each, and fails if there are any.
"""

import re
import sys
from pathlib import Path

#: Pattern, in any case -> what to write instead. A pattern must be wrong wherever it occurs, in code too.
WORDS = {
    r"\banew\b": "again",
    r"\bbeside\b": "next to, with, compared with, in addition to",
    r"\bbut for\b": "except",
    r"\bcomes? about\b": "happens, can be made",
    r"(?:[,;:#]|\band|\bor|\bwhich) else\b": "otherwise",
    r"\bfor ever\b": "forever",
    r"\bgo(es)? on\b(?! (a|an|one|the|every)\b)": "continue",
    r"\bheld against\b": "compared with",
    r"\bif need be\b": "if necessary",
    r"\bin silence\b": "silently, without a message",
    r"\bin spite of\b": "despite",
    r"(?<!there )\b(is|are|was|were) no (?!longer|such)": "is not a",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"(?<!each )(?<!any )\bof which (all|each|none|nothing|one|some)\b": "each of which, or two sentences",
    r"\b(errors?|exceptions?|functions?|class(es)?|methods?) of (pydantic|torch|numpy|Triton)\b": "a torch error",
    r"\bperhaps\b": "may",
    r"\bspeaks?\b": "says, shows, is_logging_rank",
    r"\bstands? still\b": "hangs, does not change",
    r"\bthe like\b": "similar ones, or name them",
    r"\b(weights|adapters|GPUs) alone\b": "only the weights",
    r"\btold\b": "reported, known, configured",
    r"(?-i:\b(MOST|TOLD|UNEVEN|WORTH)\b)": "a name that says what it limits, such as MIN_SAVING",
}

#: A function's docstring without a verb at its beginning, which ruff's D401 does not see.
NO_VERB = re.compile(
    r'^ *(?!class )[^\n#"]*\).*:\n +"""(?=(An?|Around|Also|As|Each|How|If|In|The|What|Whe\w+|Which|While|Why|`+\w+)\b)',
    re.M,
)


def findings() -> list[str]:
    """Return a line for each refused word in the files of the current folder."""
    patterns = {re.compile(pattern, re.I): instead for pattern, instead in WORDS.items()}
    patterns[NO_VERB] = 'a verb first, such as "Return"'
    lines = []
    for file in (*Path().glob("deepspeed/**/*.py"), *Path().glob("docs/**/*.md"), *Path().glob("*.md")):
        text = file.read_text()
        for pattern, instead in patterns.items():
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.end()) + 1
                lines.append(f"{file}:{line}: {match[0].splitlines()[-1].strip()} -> {instead}")
    return sorted(lines)


if __name__ == "__main__":
    sys.exit("\n".join(findings()) or None)
