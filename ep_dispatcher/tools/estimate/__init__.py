"""Estimates of dispatch and combine on machines that are not at hand: bytes, memory and time. See docs/estimate.md."""
