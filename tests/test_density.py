"""One thought per line. tests/data/dense.txt lists the files that are still packed; it only shrinks."""

import ast
import tokenize

import pytest
from test_tidy import DEFINITIONS, IN_PACKAGE, PACKAGE, REPO, code_lines, nodes

pytestmark = [pytest.mark.fast, pytest.mark.xdist_group("tidy")]

MAX_TOKENS_PER_LINE, _SMALL = 9.5, 40  # smaller files are not judged
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def tokens(path):
    """Tokens of code, without comments, docstrings and layout."""
    docs = set()
    for node in nodes(path):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node):
            docs.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    with path.open("rb") as file:
        found = [token for token in tokenize.tokenize(file.readline) if token.type not in _LAYOUT]
    return sum(token.start[0] not in docs for token in found)


def test_no_line_is_packed():
    """At most 9.5 tokens in a line of code, on average over a file: one thought per line."""
    dense = set()
    for path in IN_PACKAGE:
        lines = code_lines(path)
        if lines >= _SMALL and tokens(path) > MAX_TOKENS_PER_LINE * lines:
            dense.add(str(path.relative_to(PACKAGE)))
    known = (REPO / "tests/data/dense.txt").read_text().split()
    assert sorted(dense - {*known}) == [], "unfold: one thought per line, compound conditions split and named"
    assert sorted({*known} - dense) == [], "these are unfolded: take them off tests/data/dense.txt"
