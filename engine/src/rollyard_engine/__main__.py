"""The entry point of ``python -m rollyard_engine``."""

import sys

from rollyard_engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
