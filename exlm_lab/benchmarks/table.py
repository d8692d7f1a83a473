"""What was measured as a table for a person."""

from __future__ import annotations

from typing import Any

from exlm_lab.benchmarks.step import PARTS

_COLUMNS = "{:>16} {:<12} {:>3} {:>12} {:>12} {:>18} {:>10} {:>10} {:>9}"


def heading(reference: str, machine: dict[str, Any]) -> list[str]:
    """What stands above the first row: the machine, and the names of the columns.

    Args:
        reference: that ratios compare with.
        machine: from ``provenance.machine``.
    """
    names = ("B,M,L", "", "thr", "wall ms", "cpu ms", f"vs {reference}", "peak MiB")
    return [machine_line(machine), _COLUMNS.format(*names, "RSS MiB", "error")]


def machine_line(machine: dict[str, Any]) -> str:
    """What was measured on, from ``provenance.machine``."""
    device = machine["device"] if machine["device"] != "cpu" else machine["cpu"]
    return f"{device}, torch {machine['torch']}, commit {machine['commit']}"


def train_lines(row: dict[str, Any]) -> list[str]:
    """A record of ``benchmarks.training``, from its ``as_json``."""
    used = row["settings"]
    micro = used["train.micro_batch_size"] or used["train.batch_size"]
    unit = "rows"
    if used["train.batch_tokens"] is not None:
        micro = used["train.micro_batch_tokens"] or used["train.batch_tokens"]
        unit = "tokens"
    peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f} MiB"
    share = row["flops_utilisation"]
    of_peak = "" if share is None else f" ({share:.1%} of the device's peak)"
    return [
        f"{row['recipe']}, {row['objective']}: {row['tokens_per_second']:,.0f} tokens/s, "
        f"{row['flops_per_second']:.3g} FLOP/s{of_peak}, peak memory {peak}",
        f"    {row['steps']} steps of {row['median_ms']:,.0f} ms = {row['accumulated']} (of "
        f"{row['accumulated_by_recipe']}) x {micro:,} {unit}, {used['train.precision']}, "
        f"{row['num_parameters'] / 1e6:.1f} M parameters, vocabulary {row['vocab_size']:,}, "
        f"threads {row['threads']}",
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
        cpu_ratio = "-" if row["cpu_ratio"] is None else f"{row['cpu_ratio']:.2f}"
        ratio = f"{row['wall_ratio']:.2f}, cpu {cpu_ratio}"
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
    if "step_tokens_per_second" in row:
        share = row["flops_utilisation"]
        of_peak = "" if share is None else f", {share:.1%} of the device's peak"
        lines.append(
            f"{'':>16} {row['step_tokens_per_second']:,.0f} tokens/s, {row['dtype']}"
            f"{', compiled' * row['is_compiled']}{of_peak}"
        )
    for part in PARTS:
        if spent := row.get("parts", {}).get(part):
            forward, backward = spent["forward_ms"], spent["backward_ms"]
            lines.append(
                f"{part:>30}: forward {forward:8.1f} ms, backward {backward:8.1f} ms "
                f"(cpu {spent['forward_cpu_ms']:.1f}, {spent['backward_cpu_ms']:.1f})"
            )
    return lines
