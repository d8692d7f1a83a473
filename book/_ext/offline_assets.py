"""Sphinx extension: the built book serves everything itself; no request leaves it.

MathJax comes from the ``sphinx-mathjax-offline`` wheel (MathJax 3.2.2, Apache-2.0). Of its 24 MB
only the bundle that reads TeX and writes HTML, and its fonts, are copied: 1.7 MB.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

FONTS = "output/chtml/fonts/woff-v2"


def use_own_mathjax(app, config):
    config.mathjax_path = "mathjax/tex-chtml.js"
    config.mathjax_options = {"defer": "defer"}


def drop_thebe(app, pagename, templatename, context, doctree):
    """Jupyter Book 1 loads thebe on every page, twice, from elsewhere; it has no use here."""

    def is_thebe(script):
        name = str(getattr(script, "filename", script) or "")
        body = getattr(script, "attributes", {}).get("body") or ""
        return "thebe" in f"{name} {body}".lower()

    context["script_files"] = [s for s in context["script_files"] if not is_thebe(s)]


def copy_mathjax(app, exception):
    if exception is not None or app.builder.format != "html":
        return
    source = Path(find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
    target = Path(app.outdir, "_static", "mathjax")
    shutil.copytree(source / FONTS, target / FONTS, dirs_exist_ok=True)
    shutil.copy2(source / "tex-chtml.js", target)


def setup(app):
    # After sphinx.ext.mathjax and the theme have had their say.
    app.connect("config-inited", use_own_mathjax, priority=900)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
