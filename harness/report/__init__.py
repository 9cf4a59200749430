"""Reports, from rows alone: tables, sentences, explanations of misses, HTML."""
