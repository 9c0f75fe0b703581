"""Runs a program written for deep_ep with ep_dispatcher in place of DeepEP, without editing a file.

torchrun ... -m ep_dispatcher.integrations.deep_ep program.py <arguments of program.py>
python -m ep_dispatcher.integrations.deep_ep -m package.module <arguments of the module>
"""

from ep_dispatcher.integrations.deep_ep.path import install
from ep_dispatcher.integrations.launch import launch

if __name__ == "__main__":
    launch("ep_dispatcher.integrations.deep_ep", __doc__, install)
