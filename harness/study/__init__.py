"""Many runs as one question: studies, comparisons, sizes and claims, with the words of their answers."""
