"""A report of one or several runs: a record that a run writes as it goes, and the page that is made of it."""
