"""``python -m kvtuner``: the command line."""

import sys

from kvtuner.cli import main

sys.exit(main())
