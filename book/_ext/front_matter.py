"""Sphinx extension with the book's roles and directives, so that no number is typed by hand.

* ``{recorded}`NAME OBJECTIVE WHAT` ``: a number of a recorded run, from ``book/results/``;
* ``{provenance}`NAME` ``: device and commit of the run;
* ``{sweep}`NAME CELL METRIC` `` and ``{sweep-made}`NAME` ``: the same for a sweep; ``{score}``,
  ``{difference}``, ``{verdict}`` and ``{tally}`` for the scorecard; see ``sweep_numbers``;
* ``{small}`NAME WHAT` `` and ``{small-made}`CORPUS` ``: the same for the small downstream runs;
* ``{parameters}`OPTIONS` ``: how many parameters a model has, counted as ``--dry-run`` does;
* ``{source}`FILE::NAME` ``: a link to a file of the repository, which must exist;
* ``{explorer} NAME``: the recorded scene of a run as an interactive figure;
* ``{scorecard}``: the paper's claims with their evidence; ``{sweep-report} NAME``: the tables of a
  sweep, or, for ``study``, the study's claims;
* ``{runs}``: the table of all recorded runs; ``{course-minutes}``: the table of chapter lengths.

A lookup that finds nothing is a warning of the build, which ``make book`` turns into an error.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import course_minutes
import recorded_runs
import sweep_numbers
from docutils import nodes
from recorded_runs import by_seed, listed_runs, provenance, short
from reference_docstrings import (
    after_napoleon,
    before_napoleon,
    drop_unreadable_values,
    plain_signature,
)
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sweep_numbers import typeset

ROOT = Path(__file__).resolve().parents[2]


# ---- numbers of the repository ----


def parameters(text: str) -> str:
    """Parameters in millions of the model that ``OPTIONS`` describe.

    ``OPTIONS without transitions`` leaves out the transition head.
    """
    from exlm_mini.config.options import parse
    from exlm_mini.training.cost import estimate

    options = text.removesuffix(" without transitions")
    config = parse(["--recipe", "text-tiny", *shlex.split(options)]).config
    if config.model.vocab_size is None:
        raise ValueError(f"'{options}' does not set --model.vocab_size")
    cost = estimate(config, config.model.vocab_size, config.data.block_length)
    count = cost.num_parameters
    if options != text:
        count -= cost.num_transition_parameters
    return f"{count / 1e6:.1f}\N{NO-BREAK SPACE}M"


def source_line(text: str) -> tuple[str, int | None]:
    """File and line that ``FILE::NAME`` or ``FILE`` refers to; without a name the line is None."""
    file, _, name = text.partition("::")
    path = ROOT / file
    if not path.exists():
        raise ValueError(f"there is no {file}")
    if not name:
        return file, None
    for node in ast.walk(ast.parse(path.read_text())):
        if getattr(node, "name", None) == name:
            return file, node.lineno
    raise ValueError(f"{file} defines no {name}")


# ---- roles and directives ----


class LookupRole(SphinxRole):
    """A role whose text is looked up when the page is read; a failed lookup is a warning.

    Args:
        find: takes the text of the role and returns what it asks for, or raises ``ValueError``.
        show: takes the role and the result of ``find``, and returns the nodes to show.
    """

    def __init__(self, find: Callable[[str], Any], show: Callable[..., list[nodes.Node]]):
        self.find, self.show = find, show

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            return self.show(self, self.find(self.text)), []
        except ValueError as error:
            message = self.inliner.reporter.warning(str(error), line=self.lineno)
            return [nodes.problematic(self.rawtext, self.rawtext)], [message]


def show_number(role: LookupRole, number: str) -> list[nodes.Node]:
    """Nodes for a number that was looked up or computed."""
    return [nodes.inline(text=typeset(number), classes=["recorded"])]


def show_provenance(role: LookupRole, stamps: list[tuple[str, str]]) -> list[nodes.Node]:
    """Nodes for the devices and commits of some runs."""
    out: list[nodes.Node] = []
    for device, commit in provenance(stamps):
        out += [nodes.Text(f"{', ' if out else ''}{device}, "), nodes.literal(text=commit)]
    return out or [nodes.Text("no record yet")]


def show_source(role: LookupRole, place: tuple[str, int | None]) -> list[nodes.Node]:
    """A link to a file of the repository, or to the line in it that defines a name."""
    file, line = place
    url = "{repository_url}/blob/{repository_branch}".format(**role.config.html_theme_options)
    link = nodes.reference(refuri=f"{url}/{file}" + (f"#L{line}" if line else ""))
    link += nodes.literal(text=role.text.rpartition("::")[2] if line else file)
    return [link]


def table(directive: SphinxDirective, rows: list[list[str]], *options: str) -> list[nodes.Node]:
    """A table from rows of Markdown cells, the header first; ``options`` are the directive's."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    shown = directive.parse_text_to_nodes(
        "\n".join(["```{table}", *options, "", *lines, "```"])
    )
    shown[0]["classes"].remove("colwidths-auto")  # MyST adds it; it would override the widths
    return shown


class ExplorerDirective(SphinxDirective):
    """The recorded scene of a run as an interactive figure."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from exlm_mini.reading.explorer import Explorer
        from exlm_mini.reading.scene import scene_from_json

        (record,) = recorded_runs.runs_of(self.arguments[0])
        html = Explorer(scene_from_json(record["scene"])).html
        return [nodes.raw(html, html, format="html")]


class RunsDirective(SphinxDirective):
    """A table of all recorded runs: command, device, commit, versions."""

    def run(self) -> list[nodes.Node]:
        rows = [["run", "python -m exlm_mini.pretrain …", "device, versions, commit"]]
        for name, runs in listed_runs().items():
            commands = [f"`{command}`{seeds}" for command, seeds in by_seed(runs).items()]
            stamps = []
            for record in runs:
                versions = record["versions"]
                stamp = f"{versions['device'].upper()}, torch {versions['torch']}, Python "
                stamps.append(f"{stamp}{versions['python']}, {short(versions['commit'])}")
            made_with = "; ".join(dict.fromkeys(stamps))
            rows.append([f"`{name}`", ", and ".join(commands), made_with])
        return table(self, rows, ":widths: 19 51 30", ":class: dense")


class ScorecardDirective(SphinxDirective):
    """A table of the paper's claims, each with its evidence and its verdict."""

    def run(self) -> list[nodes.Node]:
        rows = [["claim of the paper", "verdict", "difference", "runs", "measured here"]]
        for score in sweep_numbers.scores():
            word, comma, rest = score.verdict.word_so_far.partition(",")
            color = {"for": "success", "against": "danger"}.get(word, "muted")
            verdict = f"{{bdg-{color}}}`{word}`{comma}{rest}"
            claim = f"{score.text} ({score.row.place})"
            number = typeset(score.shown)
            rows.append([claim, verdict, number, score.evidence, score.row.measured])
        return table(self, rows, ":widths: 26 13 18 16 27", ":class: dense scorecard")


class SweepReportDirective(SphinxDirective):
    """The report that ``sweep NAME --report`` prints."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(sweep_numbers.sweep_page(self.arguments[0]))


class CourseMinutesDirective(SphinxDirective):
    """A table of the time it takes to read, run and solve each chapter."""

    def run(self) -> list[nodes.Node]:
        head = ["chapter", "to read", "to run", "to solve"]
        return table(self, [head, *course_minutes.rows()], ":widths: 50 12 26 12")


NUMBERS = {
    "recorded": recorded_runs.recorded,
    "parameters": parameters,
    "sweep": sweep_numbers.sweep,
    "score": sweep_numbers.score,
    "difference": lambda name: sweep_numbers.score_of(name).shown,
    "verdict": lambda name: sweep_numbers.score_of(name).verdict.word_so_far,
    "tally": sweep_numbers.tally,
    "small": recorded_runs.small,
}
STAMPS = {
    "provenance": recorded_runs.stamps,
    "sweep-made": sweep_numbers.stamps,
    "small-made": recorded_runs.small_stamps,
}
"""Lookup functions of the roles: a number for ``NUMBERS``, device and commit for ``STAMPS``."""


def name_folded_cells(app, pagename, templatename, context, doctree):
    """Let a folded cell's title be its name; MyST-NB labels all of them alike."""
    label = ' aria-label="Toggle hidden content"'
    context["body"] = context.get("body", "").replace(f"<summary{label}>", "<summary>")


def setup(app):
    app.connect("html-page-context", name_folded_cells)
    for name, find in NUMBERS.items():
        app.add_role(name, LookupRole(find, show_number))
    for name, find in STAMPS.items():
        app.add_role(name, LookupRole(find, show_provenance))
    app.add_role("source", LookupRole(source_line, show_source))
    app.add_directive("explorer", ExplorerDirective)
    app.add_directive("runs", RunsDirective)
    app.add_directive("course-minutes", CourseMinutesDirective)
    app.add_directive("scorecard", ScorecardDirective)
    app.add_directive("sweep-report", SweepReportDirective)
    app.add_css_file("front_matter.css")
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("doctree-read", drop_unreadable_values)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
