"""The command ``python -m ep_dispatcher.bench``: see tools/bench.py."""

import sys

from ep_dispatcher.tools.bench import main

if __name__ == "__main__":
    sys.exit(main())
