"""The file that ``book/evidence.py`` writes: results so far, on the disk after each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exlm_mini.config import UserError
from exlm_mini.data.files import write_atomically

SAME = ("torch", "device", "cpu", "threads", "sources")
"""What results in one file have in common."""
Result = dict[str, Any]


class File:
    """Results so far, on the disk after each."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self.content = path, content

    def result(self, section: str, key: str) -> Result | None:
        """A result that is there; what raised an exception is to be tried again."""
        found = self.content["sections"].get(section, {}).get(key)
        return None if found is None or "error" in found else found

    def ask_for(self, results: Iterable[tuple[str, str]]) -> None:
        """Say in the file what is missing, of these and of what earlier runs asked for.

        Args:
            results: section and key of each.
        """
        asked = [f"{section}: {key}" for section, key in results]
        names = {
            f"{s}: {key}" for s, found in self.content["sections"].items() for key in found
        }
        wanted = dict.fromkeys([*self.content["missing"], *asked])
        self.content["missing"] = [name for name in wanted if name not in names]

    def put(self, section: str, key: str, result: Result) -> None:
        """Keep a result."""
        self.content["sections"].setdefault(section, {})[key] = result
        self.content["passed"] = not self.problems()
        self.ask_for([])
        self.write()

    def problems(self) -> list[str]:
        """Checks that failed and results that are missing, one line each."""
        lines = []
        for section, results in self.content["sections"].items():
            for key, result in results.items():
                if "error" in result:
                    lines.append(f"{section}: {key}: {result['error']}")
                elif result.get("passed") is False:
                    first, *rest = result["failures"] or ["no reason given"]
                    more = f" and {len(rest)} more" if rest else ""
                    lines.append(f"{section}: {key}: {first}{more}")
        return lines

    def write(self) -> None:
        """Replace the file on the disk.

        Raises:
            UserError: it cannot be written.
        """
        text = json.dumps(self.content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, text.encode())
        except OSError as error:
            raise UserError(
                f"cannot write {self.path} ({error.strerror}); choose another --output"
            ) from None


def opened(path: Path, content: dict[str, Any], is_afresh: bool) -> File:
    """The file with what it holds already, or a new one.

    Args:
        path: of the file.
        content: of a new one.
        is_afresh: forget what is there.

    Raises:
        UserError: it holds something else, or results that do not go with the new ones.
    """
    if is_afresh or not path.exists():
        return File(path, content)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        before, now = stored["machine"], content["machine"]
        differing = [name for name in SAME if before[name] != now[name]]
        if stored["quick"] != content["quick"]:
            differing.append("quick")
        sections = {
            section: {key: dict(result) for key, result in results.items()}
            for section, results in stored["sections"].items()
        }
        missing = list(stored.get("missing", []))
        backends = {**stored.get("backends", {}), **content["backends"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} holds no evidence; choose another --output") from None
    if differing:
        raise UserError(
            f"{path} holds results of another {', '.join(differing)}; --again measures anew, "
            "another --output keeps both"
        )
    known = {"missing": missing, "backends": backends, "sections": sections}
    return File(path, {**stored, **known})
