"""python -m normkit: the same as the command normkit."""

import sys

from normkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
