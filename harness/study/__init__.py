"""Many runs as one question: studies, comparisons, sizes and claims, as numbers and verdicts."""
