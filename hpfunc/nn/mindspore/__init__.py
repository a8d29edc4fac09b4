"""Cells of MindSpore as pure functions."""
