"""Reports of one or several runs: the record that a run writes as it goes, and the page made from records."""
