"""The built page: its files as the server sends them, or one file with all answers.

The page is built from TypeScript beside it (`page/`), and the build is part of the package.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path

from otel_rollout.errors import ConfigurationError
from otel_rollout.wire import Json, finite

FOLDER = Path(__file__).parent / "page" / "built"
"""The build of the page."""
DATA = "otel-rollout"
"""Id of the element with the answers, in a page that contains them."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_UNPACK = """\
const add = (name, properties) =>
  document.head.append(Object.assign(document.createElement(name), properties));
if (!("DecompressionStream" in window))
  document.body.textContent = "This page needs a browser of 2023 or later.";
else {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const [style, script] = await new Response(stream).json();
  add("style", { textContent: style });
  add("script", { type: "module", textContent: script });
}
"""
_script = re.compile(r"<script\b[^>]*\bsrc=[^>]*></script>")
_style = re.compile(r'<link\b[^>]*\brel="stylesheet"[^>]*>')


@dataclass(frozen=True, slots=True)
class Page:
    """A built page."""

    files: Mapping[str, tuple[bytes, str]]
    """Content and type of each file, by its path; that of the page itself is ""."""

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Page:
        """The files of a build. ConfigurationError where there is none."""
        found = {
            path.relative_to(folder).as_posix(): (path.read_bytes(), _TYPES[path.suffix])
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _TYPES
        }
        index = found.pop("index.html", None)
        if index is None:
            raise ConfigurationError(
                f"the page of otel-rollout view is not built ({folder} has no index.html): "
                f"run `make page`, or install a released version"
            )
        return cls({"": index, **found})

    def whole(self, answers: Json, *, title: str, framed: bool = False) -> str:
        """One HTML file that needs no server, no network and no other file.

        framed: it will be the `srcdoc` of a frame, in which links would lead to the page around it;
        of these a notebook keeps many, so its code is packed.
        """
        html = self.files[""][0].decode()
        script = _inside("script", "\n".join(self._texts(".js")))
        style = _inside("style", "\n".join(self._texts(".css")))
        scripts = [script, *([_unpacking(style, script)] if framed else [])]
        policy = (
            f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; "
            f"style-src {_digest(style)}; "
            f"img-src data:; form-action 'none'" + ("" if framed else "; base-uri 'none'")
        )
        head = (
            ('<base href="about:srcdoc">\n' if framed else "")
            + f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            + ("" if framed else f"<style>{style}</style>\n")
        )
        data = as_json(answers).decode().replace("<", "\\u003c")
        tail = (
            f'<script type="application/json" id="{DATA}">{data}</script>\n'
            f'<script type="module">{scripts[-1]}</script>\n'
        )
        html = _style.sub("", _script.sub("", html))
        html = re.sub(r"<title>.*?</title>", lambda _: f"<title>{escape(title)}</title>", html)
        html = re.sub(r"</head>", lambda _: f"{head}</head>", html, count=1)
        return re.sub(r"</body>", lambda _: f"{tail}</body>", html, count=1)

    def _texts(self, suffix: str) -> list[str]:
        return [body.decode() for name, (body, _) in self.files.items() if name.endswith(suffix)]


def _inside(element: str, text: str) -> str:
    """A script or style that cannot end its own element."""
    text = re.sub(f"</(?={element})", r"<\\/", text, flags=re.IGNORECASE)
    return text.replace("<!--", r"<\!--")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _unpacking(style: str, script: str) -> str:
    """A script that adds these two, which it holds compressed, to its page."""
    packed = b64encode(gzip.compress(as_json([style, script]), mtime=0)).decode()
    return f"const packed = '{packed}';\n{_UNPACK}"


def as_json(value: Json) -> bytes:
    """JSON as a browser reads it: numbers that JSON has no word for are null."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")
