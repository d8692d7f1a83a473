"""Sphinx extension that makes the built book self-contained: no page loads anything from elsewhere.

MathJax comes from the ``sphinx-mathjax-offline`` wheel (MathJax 3.2.2, Apache-2.0). Only 1.7 of its
24 MB are copied: the bundle that reads TeX and writes HTML, and its fonts.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

FONTS = "output/chtml/fonts/woff-v2"


def use_own_mathjax(app, config):
    config.mathjax_path = "mathjax/tex-chtml.js"
    config.mathjax_options = {"defer": "defer"}


def drop_thebe(app, pagename, templatename, context, doctree):
    """Remove thebe, which Jupyter Book 1 loads twice on every page from elsewhere; it is unused."""

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
    # A late priority: the handlers of sphinx.ext.mathjax and of the theme must run first.
    app.connect("config-inited", use_own_mathjax, priority=900)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
