"""All that a strategy may import: actions, events, queries, nouns, and algorithms that several systems share."""
