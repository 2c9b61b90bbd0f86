"""The production controller and queue in simulated time, against modelled workers, scorers and learner.

virtual_time    an event loop whose clock jumps to the next timer
lengths         how long answers are
actors          workers, scorers, learner and weight updates, described by their speeds
invariants      what must hold after every event of the queue, kept by an independent model of it
faults          which faults a seed brings, and when
faulty_actors   the modelled actors with those faults
fault_run       one seeded run through crashes and resumes: ``run_seed(seed)``
soak            many of them: ``python -m rlhf_cluster.simulation.soak 200000``
cluster_model   the description of a cluster, from a config and what was measured
predict         steps an hour, idle shares, staleness of a described cluster: ``simulate(model, steps)``
command         ``rlhf simulate``
"""
