"""The command ``python -m ep_dispatcher.integrations.megatron.parity``: see ep_dispatcher/tools/parity/compare.py."""

import sys

from ep_dispatcher.tools.parity.compare import main

if __name__ == "__main__":
    sys.exit(main())
