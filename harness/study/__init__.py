"""Studies: many runs that answer one question, with their comparisons, GPU counts and verdicts on claims."""
