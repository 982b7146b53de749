"""A hook of mkdocs: files outside docs/ are not part of the site, so links to them become plain text."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\[([^\]]+)\]\((?:\.\./|lab_notes)[^)]*\)", r"\1", markdown)
