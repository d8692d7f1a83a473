"""Sphinx extension that redirects the old addresses of chapters that have moved."""

from pathlib import Path

MOVED = {
    "00_one_notebook": "01_one_notebook",
    "01_mlm": "02_multimodality",
    "04_states_expansion": "04_states",
    "05_rope_2d": "04_states",
    "06_dag_naive": "05_sum_over_paths",
    "07_transition_and_training": "06_own_pieces",
    "08_symmetric_start": "07_symmetric_start",
    "09_reading_the_dag": "08_where_it_pays",
    "10_downstream": "09_downstream",
    "14_what_we_found": "10_what_we_found",
}
"""Chapters of earlier editions, each with the chapter that now holds its content."""

PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{new}</title>
<meta http-equiv="refresh" content="0; url={new}.html">
<link rel="canonical" href="{new}.html">
<p>This chapter is now <a href="{new}.html">{new}</a>.</p>
"""


def write_redirects(app, exception):
    """Write a page at each old address that forwards to the new one."""
    if exception is None and app.builder.format == "html":
        for old, new in MOVED.items():
            Path(app.outdir, "chapters", f"{old}.html").write_text(PAGE.format(new=new))


def setup(app):
    app.connect("build-finished", write_redirects)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
