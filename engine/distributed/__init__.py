"""The processes of one job: who they are, how they talk, how they agree, and how one that dies ends the others."""
