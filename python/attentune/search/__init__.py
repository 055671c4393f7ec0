"""Find the best candidate of a plan: measure, bound, rank."""
