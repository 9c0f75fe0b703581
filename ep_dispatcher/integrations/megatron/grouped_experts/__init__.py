"""Experts in grouped GEMMs: which layers can, how they run, and where the gradients of their weights go.

They are optional: a layer of the dispatcher runs Megatron's own experts too, and these run with Megatron's dispatchers.
"""
