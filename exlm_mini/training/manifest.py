"""The manifest of a checkpoint: what is in its files, and whether they are still as written."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from exlm_mini.config import UserError
from exlm_mini.data.files import read_bytes

FORMAT = "exlm_mini checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"[A-Za-z0-9_]+\.safetensors")
# ".replaced" is a complete checkpoint, moved aside for the moment in which a new save of the
# same step takes its place.
DIRECTORY_NAME = re.compile(r"step-([0-9]{6,12})(\.replaced)?")
USE_EARLIER = "delete {} to use an earlier checkpoint"


def encode_manifest(fields: dict) -> bytes:
    """The manifest as JSON, its last entry the sha256 of the same text without that entry."""
    digest = _sha256(json.dumps(fields, indent=1).encode())
    return (json.dumps({**fields, "manifest_sha256": digest}, indent=1) + "\n").encode()


def file_entry(data: bytes, tied: dict[str, str]) -> dict:
    """What the manifest says of a file of tensors.

    Args:
        data: the file.
        tied: names that are not in it, and the name in it that each shares its tensor with.
    """
    return {"bytes": len(data), "sha256": _sha256(data), "tied": tied}


def read_manifest(file: Path) -> dict:
    """The manifest, its text unchanged and its fields of the right types.

    Raises:
        UserError: missing, damaged, or of another version.
    """
    if not file.parent.is_dir():
        raise UserError(f"there is no checkpoint {file.parent}; give a step-NNNNNN directory")
    data = _read(file)
    try:
        fields = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise broken(file, "is damaged: it is not JSON") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise broken(file, f"is no manifest of an {FORMAT}")
    if fields.get("version") != VERSION:
        raise UserError(
            f"{file} is of format version {fields.get('version')!r}, this program reads "
            f"version {VERSION}; use the version of exlm_mini that wrote it"
        )
    try:
        # Written again it must come out byte for byte: one comparison for every kind of change.
        rest = {key: value for key, value in fields.items() if key != "manifest_sha256"}
        is_unchanged = encode_manifest(rest) == data
    except (ValueError, RecursionError):
        is_unchanged = False
    if not is_unchanged:
        raise broken(file, "is damaged: its text does not fit its sha256")
    _check_fields(file, fields)
    name = DIRECTORY_NAME.fullmatch(file.parent.name)
    if name and int(name[1]) != fields["step"]:
        raise broken(file, f"is of step {fields['step']}, so {file.parent} was renamed")
    return fields


def _check_fields(file: Path, fields: dict) -> None:
    """Refuse a manifest with keys missing or of wrong type."""
    for key, kind in {"step": int, "files": dict, "state": dict}.items():
        if type(fields.get(key)) is not kind:
            raise broken(file, f"lacks '{key}', or it is not of type {kind.__name__}")
    for name, entry in fields["files"].items():
        # A plain name, so that a manifest cannot point outside its directory.
        if not FILE_NAME.fullmatch(name) or not isinstance(entry, dict):
            raise broken(file, f"lists {name!r}, which is not a file of tensors")
        for key, kind in {"bytes": int, "sha256": str, "tied": dict}.items():
            if type(entry.get(key)) is not kind:
                raise broken(
                    file, f"lacks '{key}' of {name}, or it is not of type {kind.__name__}"
                )
        if not all(isinstance(owner, str) for owner in entry["tied"].values()):
            raise broken(file, f"ties names of {name} to things that are not names")


def read_checked(file: Path, entry: dict) -> bytes:
    """The bytes of a file that are exactly those the manifest speaks of.

    Args:
        file: of tensors.
        entry: the manifest's for it, see ``file_entry``.

    Raises:
        UserError: missing or damaged.
    """
    data = _read(file)
    if len(data) != entry["bytes"]:
        raise broken(file, f"has {len(data):,} bytes instead of {entry['bytes']:,}")
    if _sha256(data) != entry["sha256"]:
        raise broken(file, "is damaged: its sha256 is not the one in the manifest")
    return data


def _read(file: Path) -> bytes:
    if not file.exists():
        raise broken(file, "is missing")
    return read_bytes(file)


def broken(file: Path, what: str) -> UserError:
    """The line for a checkpoint that must not be used."""
    remedy = USE_EARLIER.format(file.parent)
    return UserError(f"{file} {what}; restore it from a copy, or {remedy}")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
