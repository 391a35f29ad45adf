"""What MkDocs does not do by itself: pages from the repository's other files, links to them, and the API's names.

Links in the Markdown are those of the repository, so that they work where it is read. Here a link that leaves `docs/`
leads to a page made of the file that it names. The build fails where the API reference is not complete.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from site_reference import ENTRY, faults, place

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
"""Files outside `docs/` that are pages of their own, and where."""

LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".toml": "toml"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside `docs/`, and one for every file outside that a page links to."""
    root = Path(config.config_file_path).parent
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(root / source).read_text(encoding="utf-8")))
    pages = {target: source for source, target in PAGES.items()}
    pages |= {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages() if file.src_uri not in pages}
    linked = {
        posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        for source in pages.values()
        for match in LINK.finditer((root / source).read_text(encoding="utf-8"))
    }
    for path in sorted(linked - {*PAGES}):
        if _is_shown(path) and (root / path).exists():
            shown, apart = _shown(root, path), InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, f"source/{path}.md", content=shown, inclusion=apart))
    return files


def _is_shown(path: str) -> bool:
    """Tell whether a file gets a page that shows it: what lies outside `docs/`, and programs and tables within."""
    return not path.startswith("docs/") or path.endswith((".py", ".csv"))


def _shown(root: Path, path: str) -> str:
    """Show a file as a page, or a folder as its list of files."""
    if (root / path).is_dir():
        names = sorted(entry.relative_to(root / path).as_posix() for entry in (root / path).rglob("*.py"))
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names)
    text = (root / path).read_text(encoding="utf-8")
    return f"# {path}\n\n~~~~{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n~~~~\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the repository's links into the site's, and names of the API into their documentation.

    Raises:
        PluginError: A public name is not in the reference, or has no documentation.
    """
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    source = next((path for path, target in PAGES.items() if target == here), f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = PAGES.get(path, f"source/{path}.md") if _is_shown(path) else path.removeprefix("docs/")
        return match[1] + posixpath.relpath(target, posixpath.dirname(here) or ".") + match[3]

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    markdown = "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)
    if here != "api.md":
        return markdown
    if wrong := faults(markdown):
        raise PluginError("\n".join(wrong))
    return ENTRY.sub(lambda match: f"::: {place(match[1])}", markdown)
