"""All that a strategy may import: actions, events, queries, types, and algorithms that several systems share."""
