"""Runs a program written for deep_ep with ep_dispatcher in place of DeepEP, without editing a file.

torchrun ... -m ep_dispatcher.integrations.deep_ep program.py <arguments of program.py>
python -m ep_dispatcher.integrations.deep_ep -m package.module <arguments of the module>
"""

from ep_dispatcher.integrations.deep_ep.import_path import install
from ep_dispatcher.integrations.run_program import run_program

if __name__ == "__main__":
    run_program("ep_dispatcher.integrations.deep_ep", __doc__, install)
