"""MindSpore: its tensors, streams, collectives and autograd."""
