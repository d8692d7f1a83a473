"""Names, numbers, commands and links on the pages before and after the chapters are right."""

import importlib.util
import io
import json
import re
import shlex
import statistics
import tokenize
from collections import defaultdict
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("exlm_mini", "exlm_lab")
BOOK = ROOT / "book"
pytest.importorskip("sphinx")
import author_year  # noqa: E402
import front_matter  # noqa: E402
import recorded_runs  # noqa: E402
import reference_docstrings  # noqa: E402
import sweep_numbers  # noqa: E402

PAGES = {
    name: (BOOK / f"{name}.md").read_text()
    for name in ("course", "glossary", "intro", "notation", "reproduction", "running")
}


def roles(page: str, name: str) -> list[str]:
    """Texts of all roles of this name on a page, with line breaks replaced by spaces."""
    found = re.findall(rf"\{{{name}\}}`([^`]+)`", PAGES[page])
    return [" ".join(text.split()) for text in found]


# ---- numbers ----


def recorded() -> list[dict]:
    """The records of all runs."""
    files = recorded_runs.record_files()
    return [record for path in files for record in json.loads(path.read_text())]


def test_recorded_numbers_are_those_of_the_files():
    # Read the files here too, independently of the role.
    found = {
        (record["command"], objective): curve[-1]
        for record in recorded()
        for objective, curve in record["validation"].items()
    }
    command = "python -m exlm_mini.pretrain --recipe"
    for text, key in (
        ("pairs exlm row", (f"{command} toy-pairs", "exlm")),
        ("molecules exlm mask", (f"{command} smiles-tiny", "exlm")),
        ("manual-mlm mlm mask", (f"{command} text-tiny --objective mlm", "mlm")),
    ):
        exact = found[key][f"validation_bits_per_{text.split()[2]}"]
        assert abs(Decimal(recorded_runs.recorded(text)) - Decimal(str(exact))) <= Decimal(
            "0.0005"
        )


def test_groups_of_seeds_are_counted(monkeypatch):
    def record(seed, bits):
        return {
            "command": f"run --seed {seed}",
            "validation": {"exlm": [{"step": 9, "validation_bits_per_row": bits}]},
            "config": {"data": {"kind": "toy", "grammar": "pairs"}, "seed": seed},
        }

    made = {
        f"--seed {seed}": record(seed, bits) for seed, bits in ((1, 1.01), (2, 2.004), (3, 2.0))
    }
    monkeypatch.setattr(recorded_runs, "records", lambda: made)
    monkeypatch.setattr(recorded_runs, "names", lambda: {"group": ["--seed *"]})
    for what, printed in {
        "row": "1.010 to 2.004", "arrived": "1 of 3", "row-arrived": "1.010",
        "row-stayed": "2.000 to 2.004", "joint": "1.000", "floor": "2.000", "won": "0 to 99",
        "steps": "9",
    }.items():  # fmt: skip
        assert recorded_runs.recorded(f"group exlm {what}") == printed
    assert recorded_runs.by_seed(list(made.values())) == {"run": ", seed 1 to 3"}


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (recorded_runs.span, [1.8695], "1.870"),  # rounded half up
        (partial(recorded_runs.span, digits=0), [0.5], "1"),
        (front_matter.typeset, "-0.24 ± 0.43", "−0.24\xa0±\xa00.43"),
        (front_matter.typeset, "mlm++-4 of 5, e-3, +0.1", "mlm++-4 of 5, e-3, +0.1"),
        (recorded_runs.short, "0123456789" * 4 + " with changes", "0123456 with changes"),
    ],
)
def test_numbers_and_commits_are_printed(function, value, text):
    assert function(value) == text


@pytest.mark.parametrize(
    ("function", "text", "words"),
    [
        (recorded_runs.recorded, "pears exlm row", "no run is named 'pears'"),
        (recorded_runs.recorded, "molecules mlm mask", "trained mlm"),
        (recorded_runs.recorded, "molecules exlm floor", "toy language"),
        (recorded_runs.recorded, "pairs exlm rows", "not something a record holds"),
        (recorded_runs.small, "bbbp mlm-bert", "bbbp mlm-bert"),
        (recorded_runs.small_stamps, "proteins", "proteins"),
        (front_matter.source_line, "tests/core/test_rope.py::test_nothing", "defines no"),
        (sweep_numbers.sweep, "saddle toy-threes downstream", "'saddle toy-threes downstream'"),
        (sweep_numbers.sweep, "ladder toy downstream change-low", "do not hold"),
        (sweep_numbers.score, "nobody-claims-this", "the scorecard has no"),
        (sweep_numbers.tally, "all", "expected planned or unplanned"),
    ],
)
def test_what_cannot_be_found_is_an_error(function, text, words):
    with pytest.raises(ValueError, match=words):
        function(text)


def test_a_page_prints_the_numbers_of_the_records():
    texts = [text.split() for page in PAGES for text in roles(page, "sweep")]
    of_cells = [words for words in texts if len(words) == 3]
    assert len(of_cells) > 20
    for name, cell, metric in of_cells:
        lines = (BOOK / "results" / f"{name}.jsonl").read_text().splitlines()
        runs = [run for run in map(json.loads, lines) if run["cell"] == cell]
        values = [run["metrics"].get(metric) for run in runs]
        if metric == "downstream":
            values = [run["downstream"]["test"] for run in runs]
        is_share = metric in ("downstream", "probe_accuracy", "accuracy", "missed_share")
        factor, digits = (100, 1) if is_share else (1, 2)
        mean, sd = (factor * f(values) for f in (statistics.fmean, statistics.stdev))
        want = f"{mean:.{digits}f} ± {sd:.{digits}f}"
        assert sweep_numbers.sweep(f"{name} {cell} {metric}") == want


@pytest.mark.parametrize(
    ("shown", "size"),
    [
        ("-1.91 (-2.00 to -1.80)", "1.91 (1.80 to 2.00)"),
        ("-0.10 (-0.30 to +0.10)", "0.10 (-0.10 to 0.30)"),
        ("-9.8 ± 6.0", "9.8 ± 6.0"),
        ("+0.240 ± 0.238", "0.240 ± 0.238"),
    ],
)
def test_the_size_of_a_difference_has_no_sign(monkeypatch, shown, size):
    score = SimpleNamespace(shown=shown)
    monkeypatch.setattr(sweep_numbers, "score_of", lambda text: score)
    assert sweep_numbers.score("") == size


def test_the_scorecard_is_counted_planned_and_others_apart():
    told = [sweep_numbers.tally(text) for text in ("planned", "unplanned")]
    numbers = [[int(n) for n in re.findall(r"\d+", text)] for text in told]
    assert all(sum(counts) == rows for rows, *counts in numbers)
    assert sum(rows for rows, *_ in numbers) == len(sweep_numbers.scores())


def test_every_record_is_listed_by_its_name_or_by_its_file():
    listed = [r["command"] for runs in recorded_runs.listed_runs().values() for r in runs]
    stored = [record["command"] for record in recorded()]
    assert set(listed) == set(stored)
    assert len(set(stored)) == len(stored)


def test_the_page_on_running_shows_the_recorded_curves():
    rows = re.findall(r"^\| (text|molecules) \|([\d. |]+)\|$", PAGES["running"], re.M)
    names = {"text": "textbooks", "molecules": "zinc"}
    assert [kind for kind, _ in rows] == list(names)
    for kind, cells in rows:
        (record,) = recorded_runs.runs_of(names[kind])
        printed = [cell.strip() for cell in cells.split("|") if cell.strip()]
        curve = record["validation"]["exlm"]
        exact = [point["validation_bits_per_mask"] for point in curve]
        assert printed == [str(recorded_runs.rounded(bits, 2)) for bits in exact]


# ---- names and commands ----


def identifiers() -> set[str]:
    """Every name the packages define or use."""
    found = set()
    for path in [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        found |= {token.string for token in tokens if token.type == tokenize.NAME}
    return found


def test_every_name_of_the_glossary_is_in_the_code():
    known, listed = identifiers(), []
    for head, body in re.findall(
        r"^(\|.*\bin code\b.*\|)\n\|[-|]+\|\n((?:\|.*\n)+)", PAGES["notation"], re.M
    ):
        column = [cell.strip() for cell in head.split("|")].index("in code")
        for line in body.splitlines():
            listed += re.findall(r"`(\w+)`", line.split("|")[column])
    assert len(listed) > 40
    assert [name for name in listed if name not in known] == []
    for name in re.findall(r"`(\w+)`", PAGES["notation"].partition("## Conventions")[2]):
        assert name in known or any(k.startswith(name) or k.endswith(name) for k in known), name


@pytest.mark.parametrize("page", ["running", "reproduction"])
def test_every_command_of_a_page_is_understood(page):
    from exlm_mini.config.options import parse

    text = PAGES[page].replace("\\\n", " ")
    code = re.findall(r"```bash\n(.*?)```", text, re.S)
    code += re.findall(r"(?<!\})`([^`\n]+)`", text)
    found = re.findall(r"python -m (exlm_(?:mini|lab)\..+)", "\n".join(code))
    assert len(found) > 2
    for call in found:
        name, *arguments = shlex.split(call, comments=True)
        assert importlib.util.find_spec(name), call
        if name == "exlm_mini.pretrain" and "…" not in arguments:
            assert parse([a if a != "S" else "1" for a in arguments]).config


# ---- links ----


def test_the_reference_shows_every_public_module():
    pages = "".join(page.read_text() for page in (BOOK / "api").glob("*.md"))
    shown = re.findall(r"automodule:: (\S+)", pages)
    assert len(set(shown)) == len(shown)
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "exlm_mini").rglob("*.py")
    }
    inner = ("exlm_mini.alignment.", "exlm_mini.plot.")  # their package shows what is public
    left_out = {name for name in modules - set(shown) if not name.startswith(inner)}
    hands = {"data.files", "config.options", "training.console"}
    assert left_out == {"exlm_mini", *(f"exlm_mini.{name}" for name in hands)}


def test_every_work_has_a_label_of_its_own():
    from pybtex.database import parse_file

    works = parse_file(str(BOOK / "references.bib")).entries
    labels = [author_year.label(work) for work in works.values()]
    assert len(set(labels)) == len(labels)
    assert author_year.label(works["zheng2025exlm"]) == "Zheng et al., 2025"
    assert author_year.label(works["cover2006elements"]) == "Cover and Thomas, 2006"


# ---- docstrings ----


def as_shown(what: str, text: str) -> list[str]:
    """Lines of a docstring after our first handler, napoleon, and our second handler."""
    from sphinx.ext.napoleon import Config, GoogleDocstring

    lines = text.splitlines()
    reference_docstrings.before_napoleon(None, what, "x", None, None, lines)
    kind = Config(napoleon_use_rtype=False)
    lines[:] = GoogleDocstring(lines, kind, what=what).lines()
    reference_docstrings.after_napoleon(None, what, "x", None, None, lines)
    return lines


@pytest.mark.parametrize(
    ("what", "text", "shown"),
    [
        ("attribute", "Head: two parts.", ["Head: two parts."]),  # "Head" is no type
        ("attribute", "Only for --top; ``a --top 3``, a -- b too.",
         ["Only for ``--top``; ``a --top 3``, a -- b too."]),
        ("function", "Do.\n\nReturns:\n    a_B: first,\n        more.\n    b_B: second.",
         ["    * ``a_B``: first,", "      more.", "    * ``b_B``: second."]),
        ("function", "Do.\n\nReturns:\n    Nats, of\n    them: two.",
         ["    Nats, of", "    them: two."]),
        ("function", "Do.\n\nArgs:\n    k: k.", [":param k: \\k."]),
    ],
)  # fmt: skip
def test_a_docstring_is_shown_as_written(what, text, shown):
    lines = [line for line in as_shown(what, text) if line]
    assert lines[len(lines) - len(shown) :] == shown


# ---- the picture ----


@pytest.mark.slow
def test_the_recorded_picture_is_what_its_script_draws(tmp_path, monkeypatch):
    import overview

    def words(file: Path) -> list[str]:
        """Texts in the picture, without its numbers, whose last digits differ between machines."""
        texts = re.findall("<!-- (.*?) -->", file.read_text())
        return sorted(re.sub(r"\d\.\d\d", "#", text) for text in texts)

    recorded = words(overview.FILE)
    assert len(recorded) > 100
    monkeypatch.setattr(overview, "FILE", tmp_path / "overview.svg")
    overview.main()
    assert words(tmp_path / "overview.svg") == recorded


def test_bits_of_longer_rows_are_those_of_their_record():
    """A line of the table holds the data, the row length, and the means over seeds."""
    bits = defaultdict(list)
    for run in json.loads((ROOT / "book/results/learned-places.json").read_text())["runs"]:
        where = run["data"], run["transition"], run["use_position"]
        for tokens, value in run["bits_per_target"].items():
            bits[*where, tokens].append(value)
            bits[*where, "chains", tokens].append(run["with_fixed_chains"][tokens])
    columns = [("gated", True), ("gated", False), ("spans", True), ("gated", True, "chains")]
    section = PAGES["reproduction"].partition("(longer-rows)=")[2].partition("\n(")[0]
    rows = re.findall(r"^\| (\w+), \d+ \| (.*) \|$", section, flags=re.M)
    assert len(rows) == 5
    for data, line in rows:
        tokens, *cells = line.split(" | ")
        for column, cell in zip(columns, cells, strict=True):
            values = bits[data, *column, tokens.replace(" to ", "-")]
            expected = f"{sum(values) / len(values):.2f}" if values else "–"
            assert cell == expected, (data, tokens, column)
