"""What connects ep_dispatcher with training frameworks. Each folder knows its framework; nothing else does."""
