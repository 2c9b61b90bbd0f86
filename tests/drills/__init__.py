"""Drills: real runs on local Ray that lose one process to SIGKILL, at a moment drawn from a seed.

    plan -> driver process (forked from a warm server) -> actors register their pids -> kill -> the run ends by itself
                ^---- started again when it was the victim                                  -> checks

Controller, queue, checkpoints, pools, supervision and the learner's Ray shell are the production code; only what is
behind the actors is small: a softmax policy in numpy that really learns. ``python -m tests.drills.run 500`` runs many.
"""
