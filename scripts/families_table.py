"""A hook of mkdocs for `docs/models.md`: shows the record of `benchmarks/studies/families.py` as a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lib.families import Family, page_table  # noqa: E402

PAGE, TABLE = "models.md", "<!-- families -->"
RECORD = ROOT / "benchmarks" / "results" / "families.json"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri != PAGE:
        return markdown
    found = [Family(**each) for each in json.loads(RECORD.read_text())["families"]]
    return markdown.replace(TABLE, page_table(found))
