"""The command ``python -m ep_dispatcher.estimate``: see tools/estimate/command.py."""

import sys

from ep_dispatcher.tools.estimate.command import main

if __name__ == "__main__":
    sys.exit(main())
