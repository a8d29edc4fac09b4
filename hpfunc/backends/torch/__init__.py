"""torch: its tensors, streams, collectives, autograd and modes."""
