"""Run the command line as `python -m rollyard`."""

import sys

from rollyard.main import main

sys.exit(main())
