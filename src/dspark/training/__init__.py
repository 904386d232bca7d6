"""Training a drafter: batches and anchors, fused losses, the optimizer, checkpoints and the one loop."""
