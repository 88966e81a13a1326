"""The mathematics of a training step: pure functions on tensors and scalars; no state, communication or model."""
