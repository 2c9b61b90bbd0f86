"""The numerics of RLHF as pure torch functions: kl, rewards, advantages, losses. No I/O, no Ray, no config.

Tensors are ``[B, T]`` over response tokens; ``mask`` is 1 on tokens the policy sampled (EOS included). Whatever
stands under mask 0, NaN included, changes no bit of an output or a gradient; NaN under mask 1 stays visible.
"""
