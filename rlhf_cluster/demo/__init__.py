"""`rlhf demo`: a real instruct model is aligned on this machine, from its weights to a held-out comparison."""
