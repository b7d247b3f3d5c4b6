"""``python -m otaro``: what this machine offers and which backend runs each operation."""

import sys

from otaro.diagnostics import main

if __name__ == "__main__":
    sys.exit(main())
