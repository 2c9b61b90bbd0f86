"""Metrics: one table of names, a recorder that fills one row a learner step, and sinks that carry the rows."""
