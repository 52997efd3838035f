"""Hooks of mkdocs.yml.

Nav entries that no page exists for are left out, with a line that says so. Links to files of the
source tree outside docs/ become the file's path: the site does not hold them.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

logger = logging.getLogger("mkdocs.hooks.site")
_OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./([^)#]+)[^)]*\)")


def on_config(config: Any) -> Any:
    config.nav = _existing(config.nav, Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, **_context: Any) -> str:
    return _OUTSIDE.sub(_as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    text, path = link.groups()
    return text if path in text else f"{text} (`{path}`)"


def _existing(nav: list[Any], docs: Path) -> list[Any]:
    kept: list[Any] = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            below = _existing(target, docs)
            if below:
                kept.append({title: below})
        elif (docs / target).is_file():
            kept.append(entry)
        else:
            logger.info("%s is not there and left out", target)
    return kept
