"""Training of drafters: data written by the target itself, and DeepSpec's recipe."""
