"""Ray shells around inference: rollout workers (vLLM), frozen scorers, and the routers that hold their handles."""
