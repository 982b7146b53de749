"""The branch of selected blocks: a loop over blocks of keys, each with the queries that selected it."""
