"""A hook of mkdocs for `docs/api.md`: lists the routes there, and adds the OpenAPI document that the page shows."""

from __future__ import annotations

import json

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from mlx_parallm.server.app import openapi_document

PAGE, DOCUMENT, ROUTES = "api.md", "openapi.json", "<!-- routes -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, DOCUMENT, content=json.dumps(openapi_document())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri != PAGE:
        return markdown
    document = files.get_file_from_path(DOCUMENT)
    assert document is not None
    return markdown.replace(ROUTES, _table(json.loads(document.content_string)["paths"]))


def _table(paths: dict[str, dict[str, dict[str, str]]]) -> str:
    rows = (
        f"| `{method.upper()} {path}` | {_first_sentence(operation['description'])} |"
        for path, operations in sorted(paths.items())
        for method, operation in operations.items()
    )
    return "\n".join(("| route | what it does |", "|---|---|", *rows))


def _first_sentence(description: str) -> str:
    return " ".join(description.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")
