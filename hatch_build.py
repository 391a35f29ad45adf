"""The README as a package index shows it: links into the repository become addresses, or words where there are none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def for_index(readme: str, repository: str | None, version: str) -> str:
    """The README with no relative link: each leads into the repository at this version, or is its words alone.

    Args:
        readme: Markdown with links relative to the repository.
        repository: The repository's address, if it has one.
        version: The version whose tag the links lead to.

    Returns:
        Markdown that reads the same anywhere. Pictures are left out where there is no address.
    """

    def address(match: re.Match[str]) -> str:
        picture, words, path = match.groups()
        if repository is None:
            return "" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/v{version}/{path})"

    fences = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(address, part) for part in fences)


class ReadmeHook(MetadataHookInterface):
    """Gives the built package its README."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`; `project.urls` has the repository's address under "Repository"."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        version = re.search(r'^__version__ = "(.+)"', self._package().read_text(encoding="utf-8"), re.MULTILINE)
        assert version is not None
        readme = for_index(text, repository, version[1])
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}

    def _package(self) -> Path:
        return Path(self.root) / "src" / "blockadapt" / "__init__.py"
