"""The benchmark harness: every method on the same target, prompts and machine, one record a decoding."""
