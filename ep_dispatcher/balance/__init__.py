"""Balanced experts: for one microbatch, copies of the experts with most rows go to other ranks of their node."""
