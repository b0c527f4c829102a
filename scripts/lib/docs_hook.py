"""For mkdocs: each page is in the list of the site, and the fence of a tested example is taken for one.

Such a fence has words behind its language.
"""

import re
from pathlib import Path

_TESTED = re.compile(r"^(```\w+) .*$", re.MULTILINE)


def on_config(config):
    """`FOLDER/*.md` at the end of a section of the list: all pages of the folder that it does not name."""
    docs = Path(config.docs_dir)
    sections = [pages for part in config.nav for pages in part.values() if isinstance(pages, list)]
    named = {page for pages in sections for page in pages}
    for pages in sections:
        if "*" in pages[-1]:
            found = (page.relative_to(docs).as_posix() for page in sorted(docs.glob(pages.pop())))
            pages += [page for page in found if page not in named]
    return config


def on_page_markdown(markdown, **_):
    """The page with plain fences."""
    return _TESTED.sub(r"\1", markdown)
