"""Makes records of a sweep with known numbers, and writes them."""

import json


def made_record(sweep="repeated-mlm", cell="toy-exlm", seed=1, **changes):
    """A record with known numbers; ``changes`` replace its fields."""
    record = {
        "sweep": sweep, "cell": cell, "input": "toy", "seed": seed,
        "curve": [],
        "config": {
            "objective": "exlm",
            "masking": {"mask_ratio": 0.15, "num_copies": 1}, "train": {"steps": 400},
            "model": {"states_per_mask": 4}, "data": {"kind": "toy", "grammar": "pairs"},
        },
        "metrics": {}, "downstream": None, "seconds": {"pretrain": 60.0},
        "versions": {"device": "cpu", "commit": "0123456789"},
    }  # fmt: skip
    return record | changes


def write(directory, *made):
    """Append records to the files of their sweeps, as the sweep does; returns the directory."""
    for record in made:
        with open(directory / f"{record['sweep']}.jsonl", "a") as lines:
            lines.write(json.dumps(record) + "\n")
    return directory
