"""Rewards that are functions of an answer, and how named components become one score."""
