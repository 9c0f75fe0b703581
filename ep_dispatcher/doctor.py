"""The command ``python -m ep_dispatcher.doctor``: see tools/doctor.py."""

import sys

from ep_dispatcher.tools.doctor import main

if __name__ == "__main__":
    sys.exit(main())
