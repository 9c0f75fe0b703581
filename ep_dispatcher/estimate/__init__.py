"""What dispatch and combine cost on machines that were not at hand: bytes, memory and time. See docs/estimate.md."""
