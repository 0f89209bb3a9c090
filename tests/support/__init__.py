"""What several folders of tests use: ranks, checkpoints, toys, terminals."""
