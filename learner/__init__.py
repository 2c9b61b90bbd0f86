"""Training of policy and critic: plain classes over DeepSpeed, and one Ray shell (``learner_group``) around them."""
