"""`python -m rollyard` is the command line."""

import sys

from rollyard.main import main

sys.exit(main())
