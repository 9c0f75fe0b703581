"""The folder that ``install`` puts on the path: the modules that programs import by DeepEP's names."""
