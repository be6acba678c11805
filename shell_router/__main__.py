"""The command line as `python -m shell_router`."""

import sys

from shell_router.cli import main

sys.exit(main())
