"""An interactive explorer of the state graph: HTML for the book, for Jupyter or as a single file.

A reader inspects states, fixes a word or a state for a mask, and sees the exact distribution of all
other masks that follows. JavaScript draws the scene and runs the same forward-backward recursion as
``scene.conditionals``. Nothing is loaded from elsewhere, and the script touches only its own
element, so a page may hold several explorers.

The HTML is a pure function of the scene, whose numbers have four significant digits. The numbers of
a freshly trained model still differ between processors; to compare outputs, draw a recorded scene
(``Scene.to_json``).
"""

from __future__ import annotations

import hashlib
from html import escape
from pathlib import Path

from exlm_mini.reading.scene import Scene

STYLE = Path(__file__).with_name("explorer.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("explorer.js").read_text(encoding="utf-8")
"""The script that draws a scene. Its recursion is that of ``conditionals``, and a test compares the
two. ``NAME`` is replaced by the name of each element."""
PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:0 auto;padding:16px;max-width:980px;font-family:system-ui,sans-serif;
background:Canvas;color:CanvasText}
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


class Explorer:
    """An interactive drawing of a scene, shown by Jupyter and the book; ``save`` writes it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        payload = scene.to_json()
        name = hashlib.sha256(payload.encode()).hexdigest()[:10]
        self.html = (
            f'<div class="exlm-widget tex2jax_ignore mathjax_ignore" data-exlm="{name}"'
            f' role="group" aria-label="Explorer of the state graph"'
            f' data-scene="{escape(payload)}">\n<style>\n{STYLE}</style>\n'
            f"<div>This graph is drawn by JavaScript.</div>\n"
            f"<script>\n{SCRIPT.replace('NAME', name)}</script>\n</div>"
        )
        """The HTML element with its style and script, to put into any page."""

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        scene = self.scene
        return f"Explorer({scene.num_masks} masks, {len(scene.labels)} states)"

    def save(self, path: str | Path, title: str = "ExLM explorer", below: str = "") -> None:
        """Write a self-contained page; ``below`` is HTML to add below the graph."""
        body = f"{self.html}\n{below}"
        page = PAGE.format(title=escape(title), style=PAGE_STYLE, body=body)
        Path(path).write_text(page, encoding="utf-8")
