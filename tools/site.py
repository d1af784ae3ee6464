"""Hooks of the documentation site: pages that stand beside docs/, links to them, and llms.txt.

The pages are written for whoever reads the repository: a link to `../exporters/trl/README.md` leads
there. On the site the same text has to lead to the page that was made of that file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
_link = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_fence = re.compile(r"(```.*?```)", re.DOTALL)


def pages() -> dict[str, str]:
    """Where each page of the repository is on the site, by its path in the repository."""
    found = {
        "CHANGELOG.md": "project/changelog.md",
        "CONTRIBUTING.md": "project/contributing.md",
        "README.md": "index.md",
        "tests/README.md": "project/tests.md",
        "tools/README.md": "project/tools.md",
        "exporters/README.md": "exporters/index.md",
    }
    for path in sorted((ROOT / "exporters").glob("*/README.md")):
        found[f"exporters/{path.parent.name}/README.md"] = f"exporters/{path.parent.name}.md"
    for path in sorted((ROOT / "docs").rglob("*")):
        name = path.relative_to(ROOT / "docs").as_posix()
        found[f"docs/{name}"] = name
    examples = ROOT / "examples"
    for path in sorted([*examples.glob("*.py"), *examples.glob("*.md")]):
        found[f"examples/{path.name}"] = f"examples/{path.stem}.md"
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand beside docs/."""
    for source, page in pages().items():
        path = ROOT / source
        if source.startswith("docs/") or page == "index.md" or not path.is_file():
            continue
        text = path.read_text()
        if path.suffix == ".py":
            text = f"# {path.name}\n\n```python\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page to where their files are on the site."""
    known = pages()
    here = page.file.src_uri
    source = next((path for path, name in known.items() if name == here), f"docs/{here}")
    if here == "index.md":
        source = "docs/index.md"

    def lead(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        name = known.get(target)
        if name is None:
            return match[0]
        return before + posixpath.relpath(name, posixpath.dirname(here) or ".") + after

    parts = _fence.split(markdown)
    _texts[here] = "".join(p if p.startswith("```") else _link.sub(lead, p) for p in parts)
    return _texts[here]


_texts: dict[str, str] = {}
"""The Markdown of each page of the site, with links that lead there."""


def on_post_build(config: Any) -> None:
    """Write llms.txt (https://llmstxt.org), and the Markdown of each page that it lists."""
    site = Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    lines.append("Begin with [For coding agents](coding-agents.md): how to add it to a repository.")
    for section, entries in sections(config["nav"]):
        lines += ["", f"## {section}", ""]
        for title, name in entries:
            lines.append(f"- [{title}]({name})")
            (site / name).write_text(_texts[name])
    (site / "llms.txt").write_text("\n".join([*lines, ""]))


def sections(nav: list[Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The sections of the navigation, each with the titles and names of all its pages."""

    def files(entries: list[Any]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for title, value in (pair for entry in entries for pair in entry.items()):
            found += files(value) if isinstance(value, list) else [(title, value)]
        return found

    top = [next(iter(entry.items())) for entry in nav]
    return [(title, files(value)) for title, value in top if isinstance(value, list)]
