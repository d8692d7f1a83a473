"""Time and memory of the alignment, the emission, whole training steps and the data."""
