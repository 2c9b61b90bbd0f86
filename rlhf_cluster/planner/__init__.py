"""`rlhf plan`: what a configuration needs before anything is started, and what would suit it better.

model_shapes     a Hugging Face folder -> parameter counts and dimensions, from headers alone
activations      bytes of a forward pass, and of what it keeps for the backward one
learner_memory   policy, critic and reference of one learner rank, by ZeRO stage
memory           the ledger: every process of a run, part by part
advice           what does not fit, and the settings that make it fit
recommendation   workers to ranks, and max_staleness, from the simulation
command          `rlhf plan`
"""
