"""Finding out what is wrong: before a run starts (preflight) and while it runs (self-check)."""
