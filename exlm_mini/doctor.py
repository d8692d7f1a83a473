"""Show what this machine offers and check that it computes correctly. ::

    python -m exlm_mini.doctor

It builds the compiled backend. On every device, every alignment backend is compared with the
enumeration of all paths on a few small graphs: likelihood, gradients and best path, in float32 and
float64. A missing library is only reported; the exit status is 1 only if a result is wrong.
"""

from __future__ import annotations

import sys

from exlm_mini.config.options import command_parser
from exlm_mini.training.console import exit_code


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 works, 1 a wrong result, 2 a mistake of the user, 130 interrupted."""

    def command() -> int:
        command_parser("python -m exlm_mini.doctor", __doc__).parse_args(argv)
        from exlm_mini.training.checkup import report

        is_right = True
        for line in report():
            print(line)
            is_right &= "  WRONG: " not in line
        print("\nevery result is right" if is_right else "\nSOME RESULTS ARE WRONG: see above")
        return 0 if is_right else 1

    return exit_code(command, unread=0)


if __name__ == "__main__":
    sys.exit(main())
