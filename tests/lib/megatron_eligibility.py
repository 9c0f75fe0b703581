"""A hook that does nothing."""


def hook(module):
    module.register_forward_hook(lambda *given: None)
