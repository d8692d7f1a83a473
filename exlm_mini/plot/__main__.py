"""``python -m exlm_mini.plot``, see the package."""

import sys

from exlm_mini.plot import main

sys.exit(main())
