"""A seeded sample of what we write, to be read as a newcomer would: `python scripts/lib/english.py SEED [COUNT]`.

At most 3 of 60 may have to be read twice: 20 docstrings, 18 comments, 8 messages and 14 sentences of pages.
"""

import ast
import io
import random
import re
import sys
import tokenize
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SHARES = {"docstring": 20, "comment": 18, "message": 8, "page": 14}
_SENTENCE = re.compile(r"(?<=[.:]) (?=[A-Z`])")
_WORDS = 4


def _of_code(path):
    text = path.read_text()
    docs = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            docs.add(getattr(node.body[0], "value", None))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = "docstring" if node in docs else "message"
            told = _SENTENCE.split(" ".join(node.value.split())) if kind == "docstring" else [node.value]
            yield from ((kind, node.lineno, one) for one in told)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#( ?(type|noqa|fmt|!)|:| ---)", token.string):
            yield "comment", token.start[0], f"{token.line.strip()}"


def _of_page(path):
    text = re.sub(
        r"```.*?```|^\|.*?$|<[^>]*>", lambda found: "\n" * found[0].count("\n"), path.read_text(), flags=re.S | re.M
    )
    for number, line in enumerate(text.splitlines(), 1):
        yield from (("page", number, one) for one in _SENTENCE.split(line))


def sample(seed, count=60):
    """Lines "place: text", the same for the same seed and tree."""
    found: dict[str, list[str]] = {kind: [] for kind in SHARES}
    files = [*(REPO / "nvrx_slurm").rglob("*.py"), *(REPO / "docs").rglob("*.md")]
    for path in sorted(files):
        if not path.name.endswith("_pb2.py"):
            for kind, line, text in (_of_code if path.suffix == ".py" else _of_page)(path):
                if len(text.split()) >= _WORDS and " " in text:
                    found[kind].append(f"{kind} {path.relative_to(REPO)}:{line}: {text}")
    rng = random.Random(seed)
    for kind, share in SHARES.items():
        yield from rng.sample(found[kind], share * count // 60)


if __name__ == "__main__":
    print("\n".join(sample(*map(int, sys.argv[1:]))))
