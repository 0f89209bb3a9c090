"""Starting the processes of a job: ``fit launch``'s agent, and functions run as ranks."""
