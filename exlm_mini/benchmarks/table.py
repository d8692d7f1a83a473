"""What was measured as a table for a person."""

from __future__ import annotations

from typing import Any

from exlm_mini.benchmarks.step import PARTS

_COLUMNS = "{:>16} {:<12} {:>3} {:>12} {:>12} {:>18} {:>10} {:>10} {:>9}"


def heading(reference: str, machine: dict[str, Any]) -> list[str]:
    """What stands above the first row: the machine, and the names of the columns.

    Args:
        reference: that ratios compare with.
        machine: from ``measure.machine``.
    """
    device = machine["device"] if machine["device"] != "cpu" else machine["cpu"]
    names = ("B,M,L", "", "thr", "wall ms", "cpu ms", f"vs {reference}", "peak MiB")
    return [
        f"{device}, torch {machine['torch']}, commit {machine['commit']}",
        _COLUMNS.format(*names, "RSS MiB", "error"),
    ]


def lines(row: dict[str, Any]) -> list[str]:
    """A record, from ``as_json``, and below it the parts of a step."""
    benchmark = row["benchmark"]
    ratio = "-"
    shape = ",".join(map(str, row["shape"]))
    if benchmark == "emission":
        shape += f" V{row['vocab_size']}"
    if row["wall_ratio"] is not None and benchmark == "dag":
        ratio = f"{1 / row['wall_ratio']:.3g}x faster"
    elif row["wall_ratio"] is not None:
        ratio = f"{row['wall_ratio']:.2f}, cpu {row['cpu_ratio']:.2f}"
    lines = [
        _COLUMNS.format(
            shape,
            row["backend"],
            row["threads"],
            f"{row['median_ms']:.3f}",
            f"{row['median_cpu_ms']:.3f}",
            ratio,
            f"{row['peak_mib']:.1f}",
            "-" if row["resident_mib"] is None else f"{row['resident_mib']:.1f}",
            "-" if row["max_error"] is None else f"{row['max_error']:.1e}",
        )
    ]
    for part in PARTS:
        if spent := row.get("parts", {}).get(part):
            forward, backward = spent["forward_ms"], spent["backward_ms"]
            lines.append(
                f"{part:>30}: forward {forward:8.1f} ms, backward {backward:8.1f} ms "
                f"(cpu {spent['forward_cpu_ms']:.1f}, {spent['backward_cpu_ms']:.1f})"
            )
    return lines
