"""Time and memory of the alignment, and of whole training steps."""
