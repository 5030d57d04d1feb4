"""``python -m kvtuner``: the command line."""

import sys

from kvtuner.cli import main

if __name__ == "__main__":  # a worker process imports this module too
    sys.exit(main())
