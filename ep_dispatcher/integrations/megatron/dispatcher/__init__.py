"""The token dispatcher: Megatron's six steps on ep.dispatch and ep.combine, with settings, buffers and checks.

dispatcher.py begins with the road of one forward pass. Nothing here imports the package grouped_experts.
"""
