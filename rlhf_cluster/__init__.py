"""The system without its hardware: config, records, control loop, queue, numerics, metrics, CLI."""
