"""Run `rollyard quickstart` as `python -m rollyard.quickstart`."""

from __future__ import annotations

import sys

from rollyard.main import main

sys.exit(main(["quickstart", *sys.argv[1:]]))
