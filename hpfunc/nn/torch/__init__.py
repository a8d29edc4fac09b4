"""Modules of torch as pure functions."""
