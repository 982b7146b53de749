"""A hook of mkdocs: the pages of lab/docs are part of the site, in lab/; links to other files outside docs/
become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

LAB = Path(__file__).resolve().parent.parent / "lab" / "docs"


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path in sorted(LAB.iterdir()):
        files.append(File.generated(config, f"lab/{path.name}", abs_src_path=str(path)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\[([^\]]+)\]\(([^)]*)\)", _link, markdown)


def _link(link: re.Match[str]) -> str:
    text, target = link.groups()
    for on_disk, on_site in (("../lab/docs/", "lab/"), ("../../docs/", "../")):
        if target.startswith(on_disk):
            return f"[{text}]({target.replace(on_disk, on_site)})"
    return text if target.startswith(("../", "lab_notes")) else link[0]
