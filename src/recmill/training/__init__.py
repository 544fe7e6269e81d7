"""Training: `loop.fit` is the training loop, `step.Step` one step, `evaluate.evaluate_split` exact evaluation."""
