"""The token dispatcher: Megatron's six steps on ep.dispatch and ep.combine, its settings, its buffers, its steps' ends.

Nothing here imports the package grouped_experts.
"""
