"""Proofs and models of schedules. They share no code with the planner."""
