"""What a schedule is worth: proofs and models that share no code with the planner."""
