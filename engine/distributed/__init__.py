"""The processes of one job: their ranks, collectives and agreements, and what happens when one fails."""
