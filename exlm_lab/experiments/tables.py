"""The paper's tables with our numbers beside its own, one function for each sweep.

Each takes the groups of one input, in the order of the grid, and gives lines of Markdown. A
number is mean ± standard deviation over seeds unless its column says otherwise; the paper's
stand in brackets or in columns of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from exlm_lab.downstream.results import markdown_table
from exlm_lab.experiments.correlations import (
    STATISTICS,
    lost_share,
    over_seeds,
    paired_difference,
)
from exlm_lab.experiments.grids import cells_of
from exlm_lab.experiments.metric_names import METRICS, PROBE
from exlm_lab.experiments.paper import ENTROPY, cost_ratio, printed_average, printed_grid
from exlm_lab.experiments.records import (
    DOWNSTREAM,
    Group,
    Record,
    Summary,
    grid_of,
    grids_by_seed,
    grouped,
    read_records,
)
from exlm_lab.experiments.saddles import LEFT_BY, LEFT_SHARE, leaving
from exlm_mini.config import UserError

EMPTY = "–"
MATRICES = {
    DOWNSTREAM: ("Downstream accuracy, % (Figure 3: MNLI)", 1, ("Figure 3", "mnli")),
    PROBE: ("Latents read by a probe, %", 1, None),
    "entropy_bits": ("Entropy of lost tokens, bits (Figure 5)", 2, ("Figure 5", ENTROPY)),
    "optimum_entropy_bits": ("Entropy of lost tokens, bits, exact optimum", 2, None),
    "excess_bits": ("Bits per lost token above the exact optimum", 3, None),
    "accuracy": ("Lost tokens guessed, %", 1, None),
    "validation_bits_per_mask": ("Bits per masked copy, lost or not (Figure 9)", 3, None),
    "validation_mask_accuracy": ("Masked copies guessed, lost or not, % (Figure 9)", 1, None),
}
"""Metric: title, digits, where the paper prints the same."""
PAPER_GRIDS = {
    DOWNSTREAM: {
        "paper, MNLI (Figure 3)": ("Figure 3", "mnli"),
        "paper, mean of 4 tasks (Figure 8)": ("Figure 8", "average"),
    },
    "entropy_bits": {"paper (Figure 5)": ("Figure 5", ENTROPY)},
}


def repeated_mlm(groups: Sequence[Group]) -> list[str]:
    """Matrices of p and k as in Figures 3, 4, 5 and 9, and what they say in one number each."""
    lines = ["Lost share of tokens, % (Figure 4)", ""]
    cells = [(g.first.mask_ratio, g.first.num_copies) for g in groups]
    shares = {cell: f"{100 * lost_share(*cell):.4g}" for cell in cells}
    lines += [*_matrix(shares), ""]
    for metric, (title, digits, place) in MATRICES.items():
        known = {(g.first.mask_ratio, g.first.num_copies): g.summary(metric) for g in groups}
        known = {cell: summary for cell, summary in known.items() if summary}
        if not known:
            continue
        factor = _factor(metric)
        numbers = printed_grid(*place) if place else {}
        texts = {
            cell: summary.scaled(factor).shown(digits)
            + (f" ({numbers[cell]:.{digits}f})" if cell in numbers else "")
            for cell, summary in known.items()
        }
        lines += [title, "", *_matrix(texts), ""]
    for metric, title in ((DOWNSTREAM, "Downstream accuracy"), ("entropy_bits", "Entropy")):
        if any(g.summary(metric) for g in groups):
            unit = "changes in points" if metric == DOWNSTREAM else "changes in bits"
            lines += [f"{title}, {unit}", "", *statistics_table(groups, metric), ""]
    return lines


def statistics_table(groups: Sequence[Group], metric: str) -> list[str]:
    """Each statistic over the seeds, of the means over seeds, and of the paper's numbers."""
    of_means = grid_of(groups, metric)
    of_seeds = grids_by_seed(groups, metric)
    papers = {name: printed_grid(*place) for name, place in PAPER_GRIDS[metric].items()}
    rows = [
        (
            "",
            f"ours, {len(of_seeds)} seed{'s' * (len(of_seeds) != 1)}",
            "ours, mean of seeds",
            *papers,
        )
    ]
    for title, statistic, _ in STATISTICS.values():
        seeds = over_seeds(statistic, of_seeds)
        columns = [statistic(grid) for grid in (of_means, *papers.values())]
        numbers = [EMPTY if math.isnan(number) else f"{number:+.2f}" for number in columns]
        rows.append((title, seeds.shown(2, "+") if seeds else EMPTY, *numbers))
    return markdown_table(rows)


def ablations(groups: Sequence[Group]) -> list[str]:
    """Tables 2 and 13: each variant, and what it loses against ExLM, seed by seed."""
    columns = {
        "downstream, %": (DOWNSTREAM, 1),
        "read by a probe, %": (PROBE, 1),
        "bits per row": ("bits_per_row", 2),
        "captured bits per row": ("captured_bits", 2),
        "won by links, bits": ("linked_bits", 3),
        "bits per mask": ("bits_per_mask", 3),
        "entropy, bits": ("entropy_bits", 2),
    }
    columns = {t: m for t, m in columns.items() if any(g.summary(m[0]) for g in groups)}
    base = next((g for g in groups if g.name == "exlm"), None)
    against = {
        DOWNSTREAM: "points to ExLM",
        PROBE: "probe, points to ExLM",
        "captured_bits": "captured bits to ExLM",
    }
    against = {m: t for m, t in against.items() if base and base.summary(m)}
    printed_base = printed_average("Table 2", "ExLM")
    head = (
        "variant",
        "steps",
        *columns,
        *against.values(),
        "paper's mean, %",
        "paper's points to ExLM",
    )
    rows = [head]
    for group in groups:
        steps = group.first.data["config"]["train"]["steps"]
        row = [group.name, f"{steps:,}", *(_text(group, *at) for at in columns.values())]
        for metric in against:
            difference = paired_difference(group.by_seed(metric), base.by_seed(metric))
            row.append(EMPTY if group is base else _with_error(difference, _factor(metric)))
        mean = printed_average(*group.paper_row) if group.paper_row else None
        row += [EMPTY] * 2 if mean is None else [f"{mean:.1f}", f"{mean - printed_base:+.1f}"]
        rows.append(tuple(row))
    notes = [
        "Differences to ExLM: mean over seeds ± its standard error, equal seeds compared.",
        "",
    ]
    floor, joint = (groups[0].summary(f"{name}_bits_per_row") for name in ("floor", "joint"))
    if floor and joint:
        notes += [
            f"Exact bits per row: joint entropy {joint.mean:.3f}, floor of MLM {floor.mean:.3f}; "
            "captured bits are counted from the floor and are negative above it.",
            "",
        ]
    return [*markdown_table(rows), "", *notes]


def saddle(groups: Sequence[Group]) -> list[str]:
    """How many seeds of each cure left the floor, when, and where they ended."""
    columns = {
        "bits per row": ("bits_per_row", 3),
        "captured, bits": ("captured_bits", 3),
        "bits per mask": ("bits_per_mask", 3),
        "read by a probe, %": (PROBE, 1),
        "downstream, %": (DOWNSTREAM, 1),
    }
    columns = {t: m for t, m in columns.items() if any(g.summary(m[0]) for g in groups)}
    rows = [("cell", "total correlation", "left the floor", "first step below it", *columns)]
    for group in groups:
        found = [leaving(record) for record in group.records]
        known = [leave for leave in found if leave is not None]
        left = [leave.step for leave in known if leave.step is not None]
        steps = f"{min(left)}" if left else EMPTY
        if len(set(left)) > 1:
            steps += f" to {max(left)}"
        share = f"{len(left)} of {len(known)}" if known else EMPTY
        shared = group.summary("total_correlation_bits")
        total = f"{shared.mean:.2f}" if shared else EMPTY
        numbers = (_text(group, *place) for place in columns.values())
        rows.append((group.name, total, share, steps, *numbers))
    note = (
        f"A run has left the floor of MLM when it is {LEFT_BY:.2g} bits or {LEFT_SHARE:.0%} of the "
        "total correlation below it, whichever is less, and stays there."
    )
    return [*markdown_table(rows), "", note, ""]


def cost(groups: Sequence[Group]) -> list[str]:
    """Table 12: a step of ExLM over a step of MLM, as measured and as counted."""
    rows = [("cell", "k", "measured ratio", "floor by operations", "paper (k = 4, p = 15%)")]
    for group in groups:
        is_paper = group.paper_row is not None
        measured, floor = group.summary("cost_ratio"), group.summary("cost_ratio_floor")
        rows.append(
            (
                group.name,
                str(group.first.states_per_mask),
                measured.shown(2) if measured else EMPTY,
                floor.shown(2) if floor else EMPTY,
                f"{cost_ratio():.2f}" if is_paper else EMPTY,
            )
        )
    return [*markdown_table(rows), ""]


def k_and_p(groups: Sequence[Group]) -> list[str]:
    """Table 4, with the entropy of Figure 12, which prints no numbers."""
    rows = [("p", "model", "downstream, %", "paper's mean, %", "read by a probe, %")]
    rows[0] = (*rows[0], "entropy, bits", "bits per mask", "above the optimum, bits")
    for group in groups:
        record, k = group.first, group.first.states_per_mask
        mean = printed_average(*group.paper_row) if group.paper_row else None
        rows.append(
            (
                f"{record.mask_ratio:.1%}",
                f"ExLM k={k}" if record.objective == "exlm" else "MLM",
                _text(group, DOWNSTREAM, 1),
                EMPTY if mean is None else f"{mean:.1f}",
                *(
                    _text(group, *place)
                    for place in (
                        (PROBE, 1), ("entropy_bits", 3),
                        ("bits_per_mask", 3), ("excess_bits", 3),
                    )
                ),
            )
        )  # fmt: skip
    return [*markdown_table(rows), ""]


def scale(groups: Sequence[Group]) -> list[str]:
    """Bits against width and data, for each objective; the paper has no such table."""
    columns = {
        "bits per mask": ("bits_per_mask", 3),
        "above the optimum, bits": ("excess_bits", 3),
        "read by a probe, %": (PROBE, 1),
        "downstream, %": (DOWNSTREAM, 1),
    }
    columns = {t: m for t, m in columns.items() if any(g.summary(m[0]) for g in groups)}
    rows = [("cell", "objective", "parameters", *columns)]
    for group in groups:
        parameters = group.first.data.get("parameters")
        known = EMPTY if parameters is None else f"{parameters:,}"
        texts = (_text(group, *place) for place in columns.values())
        rows.append((group.name, group.first.objective, known, *texts))
    return [*markdown_table(rows), ""]


TABLES: dict[str, Callable[[Sequence[Group]], list[str]]] = {
    "repeated-mlm": repeated_mlm,
    "ablations": ablations,
    "saddle": saddle,
    "cost": cost,
    "k-and-p": k_and_p,
    "scale": scale,
}
"""By the name of the sweep."""


def _matrix(texts: Mapping[tuple[float, int], str]) -> list[str]:
    """Texts by (p, k) as a table: k down, p across, as the paper's figures."""
    ratios = sorted({p for p, _ in texts})
    rows = [("k \\ p", *(f"{100 * p:.4g}%" for p in ratios))]
    for k in sorted({k for _, k in texts}):
        rows.append((str(k), *(texts.get((p, k), "") for p in ratios)))
    return markdown_table(rows)


def _text(group: Group, metric: str, digits: int) -> str:
    found = group.summary(metric)
    return EMPTY if found is None else found.scaled(_factor(metric)).shown(digits)


def _factor(metric: str) -> float:
    """Shares are shown in percent."""
    is_share = metric in METRICS and METRICS[metric].unit == "share"
    return 100 if is_share or metric == "validation_mask_accuracy" else 1


def _with_error(difference: Summary | None, factor: float) -> str:
    """A paired difference with the standard error of its mean."""
    if difference is None:
        return EMPTY
    difference = difference.scaled(factor)
    error = difference.standard_error
    return f"{difference.mean:+.2f}" + ("" if error is None else f" ± {error:.2f}")


SHOWN_MISSING = 6
"""Names of missing cells that are spelled out; of more only the number is told."""
Wanted = Sequence[tuple[str, str, int]]
"""Input, cell and seed of every record a sweep is to have, in the order of its tables."""


def wanted(name: str, scale: str) -> Wanted:
    """What the grid of a sweep asks for.

    Raises:
        UserError: if there is no such sweep, or it has no cells at this scale.
    """
    return [
        (cell.input, cell.name, seed) for cell in cells_of(name, scale) for seed in cell.seeds
    ]


def report(name: str, scale: str, directory: Path) -> str:
    """The report of a sweep as Markdown.

    Args:
        name: of the sweep.
        scale: mini, gpu or paper.
        directory: that holds the folders of all sweeps.

    Raises:
        UserError: if the sweep is unknown, a record is damaged, or there is none yet.
    """
    asked = wanted(name, scale)
    records = read_records(name, Path(directory), scale)
    if not records:
        raise UserError(
            f"{Path(directory) / name} holds no record of scale {scale}; run the sweep first"
        )
    lines = [f"# {name}, {scale}", ""]
    for kind, groups in by_input(records, asked).items():
        lines += [f"## Input: {kind}", "", *TABLES[name](groups)]
    return "\n".join([*lines, *missing(records, asked), made_with(records)])


def by_input(records: Sequence[Record], asked: Wanted = ()) -> dict[str, list[Group]]:
    """Groups of each input in the order of the grid; what the grid does not name stands last."""
    groups = grouped(list(records))
    order = list(dict.fromkeys((kind, cell) for kind, cell, _ in asked))
    place = {key: number for number, key in enumerate(order)}
    found: dict[str, list[Group]] = {}
    for key in sorted(groups, key=lambda key: place.get(key, len(place))):
        found.setdefault(key[0], []).append(groups[key])
    return found


def missing(records: Sequence[Record], asked: Wanted) -> list[str]:
    """One line about the records that are not there yet; empty when all are."""
    known = {(record.input, record.cell, record.seed) for record in records}
    gone = [
        f"{cell} seed {seed}" for kind, cell, seed in asked if (kind, cell, seed) not in known
    ]
    if not gone:
        return []
    shown = ", ".join(gone[:SHOWN_MISSING])
    more = len(gone) - SHOWN_MISSING
    rest = f" and {more} more" if more > 0 else ""
    return [f"{len(gone)} of {len(asked)} records missing: {shown}{rest}.", ""]


def made_with(records: Sequence[Record]) -> str:
    """Devices, commits and hours of all records, in one line."""
    versions = [record.data["versions"] for record in records]
    devices = sorted({str(found.get("device")) for found in versions})
    commits = sorted({str(found.get("commit"))[:7] for found in versions})
    seconds = sum(sum((record.data.get("seconds") or {}).values()) for record in records)
    return (
        f"{len(records)} records, made on {', '.join(devices)} at commit {', '.join(commits)} in "
        f"{seconds / 60:,.0f} minutes."
    )
