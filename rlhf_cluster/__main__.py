"""``python -m rlhf_cluster`` is the program ``rlhf``."""

from rlhf_cluster.cli import main

if __name__ == "__main__":
    main()
