"""One file for each family of launchers: the variables that it sets, and their meaning."""
