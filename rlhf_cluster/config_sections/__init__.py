"""The sections of the configuration, each checked by itself; ``config.Config`` puts them together."""
