"""A kill campaign: jobs under every launcher are killed again and again, at random moments of every phase, and lose nothing.

``python -m tests.failure.campaign --kills 200`` prints the table. ``test_campaign.py`` beside this folder runs a few in the suite.

- ``recipes.py`` says how jobs save, validate and end;
- ``job.py`` is the training of one of ``models.py``, ``watch.py`` tells the campaign where it is, file by file and step by step;
- ``setups.py`` says how a job is started, ``kills.py`` draws who is killed and when, ``life.py`` starts one job until it is over;
- ``check.py`` compares it with a run that nobody disturbed, ``table.py`` prints what was found, ``faults.py`` makes the library wrong on purpose.
"""
