"""Experts in grouped GEMMs: which layers can, how they run, and where the gradients of their weights go.

They are optional: the dispatcher also works with Megatron's own experts. They also work with Megatron's dispatchers.
"""
